"""Operations under JAX transformations: vmap, control flow, remat, caches, donation, ahead-of-time compilation."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxchecks import close, equal, inputs, separate, total

from xvcomm.adapters import jax as xvjax
from xvcomm.trace import recorder


@separate
def batched(comm, axis):
    """vmap over any axis gives the results of a loop over it."""
    size, rank = comm.size, comm.rank
    arrays = inputs(comm, (4, 2 * size, 3))  # four members
    stacked = jnp.moveaxis(jnp.asarray(arrays[rank]), 0, axis)
    before, after = (rank - 1) % size, (rank + 1) % size
    last = size - 1
    whole = total(arrays)
    block = slice(2 * rank, 2 * rank + 2)
    expected = {
        "all_reduce": (partial(xvjax.all_reduce, comm=comm), whole),
        "max": (partial(xvjax.all_reduce, op="max", comm=comm), np.maximum.reduce(arrays)),
        "reduce": (partial(xvjax.reduce, comm=comm), whole if rank == 0 else arrays[rank]),
        "broadcast": (partial(xvjax.broadcast, root=last, comm=comm), arrays[last]),
        "reduce_scatter": (partial(xvjax.reduce_scatter, comm=comm), whole[:, block]),
        "all_gather": (partial(xvjax.all_gather, comm=comm), np.concatenate(arrays, 1)),
        "scatter": (partial(xvjax.scatter, root=last, comm=comm), arrays[last][:, block]),
        "all_to_all": (partial(xvjax.all_to_all, comm=comm), np.concatenate([a[:, block] for a in arrays], 1)),
        "sendrecv": (lambda x: xvjax.sendrecv(x, after, x, before, comm=comm), arrays[before]),
    }
    for name, (operation, result) in expected.items():
        for wrap in (lambda f: f, jax.jit):
            equal(wrap(jax.vmap(operation, in_axes=axis))(stacked), result, name)
    found = jax.vmap(partial(xvjax.gather, comm=comm), in_axes=axis)(stacked)
    if rank == 0:
        equal(found, np.concatenate(arrays, 1), "gather")
    scalars = jnp.asarray(arrays[rank][:, 0, 0])
    found = jax.vmap(partial(xvjax.all_gather, comm=comm))(scalars)
    equal(found, np.stack([a[:, 0, 0] for a in arrays], 1), "scalars")


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_vmap(pair, axis):
    pair.run(batched, axis)


@separate
def batched_more(comm):
    """Nested vmap, vmap of a derivative, with tokens, of messages, and with an unbatched operand."""
    size, rank, other = comm.size, comm.rank, 1 - comm.rank
    x = jnp.asarray(np.arange(24, dtype=np.float32).reshape(2, 3, 4)) * (rank + 1)
    ranks = size * (size + 1) / 2
    equal(jax.jit(jax.vmap(jax.vmap(partial(xvjax.all_reduce, comm=comm))))(x), np.asarray(x) / (rank + 1) * ranks)
    gradient = jax.vmap(jax.grad(lambda x: (xvjax.all_reduce(x, comm=comm) ** 2).sum()))
    close(jax.jit(gradient)(x), np.asarray(x) / (rank + 1) * ranks * 2 * size)

    def with_token(x, token):
        y, token = xvjax.all_reduce(x, token=token, comm=comm)
        return xvjax.all_gather(y, token=token, comm=comm)

    y, token = jax.jit(jax.vmap(with_token, in_axes=(0, None), out_axes=(0, None)))(x, xvjax.make_token())
    equal(y, np.concatenate([np.asarray(x) / (rank + 1) * ranks] * size, 1))
    equal(token, np.float32(0))

    def message(x):
        receipt = xvjax.send(x, other, comm=comm)
        return xvjax.recv(x, other, comm=comm) + receipt

    equal(jax.jit(jax.vmap(message))(x), np.asarray(x) / (rank + 1) * (other + 1))
    constant = jnp.ones(4, jnp.float32)
    found = jax.vmap(lambda x: x + xvjax.all_reduce(constant, comm=comm))(x)
    equal(found, np.asarray(x) + size)
    found = jax.vmap(lambda x: xvjax.sendrecv(constant, other, x, other, comm=comm))(x[0])
    equal(found, np.ones((3, 4), np.float32))


def test_nested_vmap(pair):
    pair.run(batched_more)


@separate
def loops(comm):
    size = comm.size
    one = jnp.ones(2, jnp.float32)

    def reduce(x):
        return xvjax.all_reduce(x, comm=comm)

    def body(carry, _):
        return reduce(carry), carry.sum()

    last, sums = jax.jit(lambda x: jax.lax.scan(body, x, None, length=4))(one)
    equal(last, np.full(2, size**4, np.float32))
    equal(sums, 2.0 * size ** np.arange(4, dtype=np.float32))
    unrolled = jax.jit(lambda x: jax.lax.scan(body, x, None, length=4, unroll=2)[0])(one)
    equal(unrolled, last)
    found = jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, reduce(c[1])), (0, x))[1])(
        one
    )
    equal(found, np.full(2, size**3, np.float32))
    equal(jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: reduce(x), x))(one), found)
    equal(jax.lax.scan(body, one, None, length=2)[0], np.full(2, size**2, np.float32))
    choose = jax.jit(lambda p, x: jax.lax.cond(p, reduce, lambda x: x, x))
    equal(choose(True, one), np.full(2, size, np.float32))
    equal(choose(False, one), one)
    switch = jax.jit(lambda i, x: jax.lax.switch(i, [lambda x: x, reduce, lambda x: reduce(reduce(x))], x))
    equal(switch(2, one), np.full(2, size**2, np.float32))

    def carried(carry, _):
        x, token = carry
        x, token = xvjax.all_reduce(x, token=token, comm=comm)
        return (x, token), None

    (found, _), _ = jax.jit(lambda x, t: jax.lax.scan(carried, (x, t), None, length=4))(one, xvjax.make_token())
    equal(found, last)


def test_control_flow(world):
    world.run(loops)


@separate
def derived_loops(comm):
    """Derivatives of loops, with and without checkpoints, ordered by effects and by tokens."""
    size = comm.size
    x = jnp.linspace(0.1, 0.9, 5, dtype=jnp.float32)

    def one(x):  # all ranks have the same
        for _ in range(3):
            x = size * jnp.sin(x)
        return x.sum()

    def by_effect(body):
        return lambda x: jax.lax.scan(lambda c, _: (body(c), None), x, None, length=3)[0].sum()

    def by_token(body):
        def loss(x):
            carry, _ = jax.lax.scan(lambda c, _: (body(c), None), (x, xvjax.make_token()), None, length=3)
            return carry[0].sum() + carry[1]

        return loss

    def effect_body(x):
        return xvjax.all_reduce(jnp.sin(x), comm=comm)

    def token_body(carry):
        return xvjax.all_reduce(jnp.sin(carry[0]), token=carry[1], comm=comm)

    expected = jax.grad(one)(x)
    for loss in (
        by_effect(effect_body), by_effect(jax.checkpoint(effect_body)), by_token(token_body),
        by_token(jax.checkpoint(token_body)),
    ):  # fmt: skip
        close(jax.jit(jax.grad(loss))(x), expected)
    whole = jax.jit(jax.grad(jax.checkpoint(lambda x: jnp.sin(effect_body(jnp.cos(x))).sum())))(x)
    assert np.isfinite(whole).all()
    chosen = jax.jit(jax.grad(lambda x: jax.lax.cond(x[0] > 0, effect_body, jnp.sin, x).sum()))(x)
    close(chosen, np.cos(x) * size)


def test_derivatives_of_control_flow(pair):
    pair.run(derived_loops)


@separate
def checkpoints(comm):
    """Recomputation in a checkpoint does not communicate again; results stay correct."""
    calls = []
    recorder.hooks.append(calls.append)
    try:
        for token in (False, True):

            @jax.checkpoint
            def block(x, token):
                if token is None:
                    return jnp.sin(xvjax.all_reduce(jnp.cos(x), comm=comm)), None
                y, token = xvjax.all_reduce(jnp.cos(x), token=token, comm=comm)
                return jnp.sin(y), token

            def loss(x, token, block=block):
                for _ in range(2):
                    x, token = block(x, token)
                return x.sum() + (0 if token is None else token)

            calls.clear()
            gradient = jax.jit(jax.grad(loss))(jnp.ones(3, jnp.float32), xvjax.make_token() if token else None)
            gradient.block_until_ready()
            jax.effects_barrier()
            assert len(calls) == 4, [str(call) for call in calls]  # two forward, two backward
    finally:
        recorder.hooks.remove(calls.append)


def test_checkpoints_do_not_communicate_again(pair):
    pair.run(checkpoints)


@separate
def own_rules(comm):
    """custom_vjp around operations, custom_jvp beside them, a solver that calls them."""
    size = comm.size

    @jax.custom_vjp
    def f(x, y):
        return xvjax.all_reduce((jnp.sin(x) * y).sum(), comm=comm)

    def forward(x, y):
        return f(x, y), (jnp.cos(x), jnp.sin(x), y)

    def backward(residuals, g):
        g = xvjax.all_reduce(g, comm=comm)
        cos, sin, y = residuals
        return cos * g * y, sin * g

    f.defvjp(forward, backward)
    x, y = jnp.ones(3, jnp.float32), jnp.full(3, 2, jnp.float32)
    close(jax.jit(jax.grad(f))(x, y), np.cos(x) * 2 * size)
    close(jax.grad(f)(x, y), np.cos(x) * 2 * size)
    close(jax.grad(lambda x: f(jax.nn.relu(x), y))(x), np.cos(x) * 2 * size)
    b = jnp.asarray(np.random.default_rng(0).normal(size=24).astype(np.float32))
    matrix = jax.tree_util.Partial(lambda v: xvjax.all_reduce(v, comm=comm))
    for solve in (jax.scipy.sparse.linalg.cg, jax.jit(jax.scipy.sparse.linalg.cg)):
        found, _ = solve(matrix, b)
        close(found * size, b)


def test_own_rules_and_solvers(pair):
    pair.run(own_rules)


@separate
def compiled_once(comm):
    """Programs are cached by communicator; a communicator is a static argument; jits nest."""
    traces = []

    @partial(jax.jit, static_argnames=("comm", "op"))
    def reduce(x, comm, op="sum"):
        traces.append(op)
        return xvjax.all_reduce(x, op, comm=comm)

    x = jnp.ones(3, jnp.float32)
    for _ in range(3):
        equal(reduce(x, comm), np.full(3, comm.size, np.float32))
    assert traces == ["sum"]
    reduce(x, comm, op="max")
    sub = comm.split(0)
    equal(reduce(x, sub), np.full(3, comm.size, np.float32))
    assert traces == ["sum", "max", "sum"]
    sub.close()
    nested = jax.jit(lambda x: reduce(jax.jit(lambda x: reduce(x * 2, comm))(x), comm))
    equal(nested(x), np.full(3, 2 * comm.size**2, np.float32))
    before = jax.jit(lambda x: xvjax.all_reduce(x, comm=comm), donate_argnums=0)
    given = jnp.ones(100_000, jnp.float32)
    equal(before(given), np.full(100_000, comm.size, np.float32))
    assert given.is_deleted()


def test_caches_static_arguments_and_donation(pair):
    pair.run(compiled_once)


@separate
def ahead_of_time(comm):
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    lowered = jax.jit(lambda x: xvjax.all_reduce(x, comm=comm)).lower(shape)
    assert "xvcomm_all_reduce" in lowered.as_text() and "all_reduce (sum) of float32[4] on " in lowered.as_text()
    program = lowered.compile()
    for _ in range(2):
        equal(program(jnp.ones(4, jnp.float32)), np.full(4, comm.size, np.float32))
    out = jax.eval_shape(lambda x: xvjax.all_gather(x, comm=comm), shape)
    assert out.shape == (4 * comm.size,) and out.dtype == jnp.float32
    assert "xvcomm_all_reduce" in str(jax.make_jaxpr(lambda x: xvjax.all_reduce(x, comm=comm))(shape))


def test_ahead_of_time(pair):
    pair.run(ahead_of_time)


def one_core(comm):
    """Several programs run concurrently in several threads, each on its own communicator, in order within each."""
    import threading

    subs = [comm.split(0) for _ in range(3)]
    failures = []

    def work(sub, number):
        try:
            program = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda i, x: xvjax.all_reduce(x, "avg", comm=sub), x))
            for _ in range(5):
                equal(program(jnp.full(10, number, jnp.float32)), np.full(10, number, np.float32))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(sub, number)) for number, sub in enumerate(subs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for sub in subs:
        sub.close()
    assert not failures, failures


def test_threads(pair):
    pair.run(one_core)
