"""mpi4jax's tests applied to the adapter: each operation, eager and compiled, on arrays and numbers.

Derivatives, vmap and transposes follow its tests of allreduce, of matrix-vector products and of sendrecv.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import mpi4jaxlike as mpi4jax
import numpy as np
import pytest
from jaxchecks import close, equal, separate

from xvcomm.adapters import jax as xvjax

WRAPS = {"eager": lambda f: f, "jit": jax.jit}


@separate
def collectives(comm, form):
    wrap, rank, size = WRAPS[form], comm.rank, comm.size
    mpi4jax.comm_world = comm
    ones = np.ones((3, 2), np.float32)
    each = jnp.asarray(ones * rank)
    ranks = list(range(size))
    equal(wrap(partial(mpi4jax.allreduce, op="sum"))(jnp.asarray(ones)), ones * size)
    equal(wrap(partial(mpi4jax.allreduce, op="sum"))(1), np.int32(size))
    equal(wrap(partial(mpi4jax.reduce, op="sum", root=0))(each), ones * (sum(ranks) if rank == 0 else rank))
    equal(wrap(partial(mpi4jax.reduce, op="sum", root=0))(rank), np.int32(sum(ranks) if rank == 0 else rank))
    equal(wrap(partial(mpi4jax.scan, op="sum"))(each), ones * sum(range(rank + 1)))
    equal(wrap(partial(mpi4jax.scan, op="max"))(rank), np.int32(rank))
    equal(
        wrap(jax.grad(lambda x: mpi4jax.scan(x, "sum").sum()))(jnp.ones(2) * rank), np.full(2, size - rank, np.float32)
    )
    equal(wrap(partial(mpi4jax.bcast, root=0))(jnp.asarray(ones * (rank == 0))), ones)
    equal(wrap(partial(mpi4jax.bcast, root=0))(int(rank == 0)), np.int32(1))
    equal(wrap(mpi4jax.allgather)(each), np.stack([ones * r for r in ranks]))
    equal(wrap(mpi4jax.allgather)(rank), np.arange(size, dtype=np.int32))
    found = wrap(partial(mpi4jax.gather, root=0))(each)
    equal(found, np.stack([ones * r for r in ranks]) if rank == 0 else each)
    equal(wrap(partial(mpi4jax.gather, root=0))(rank), np.arange(size, dtype=np.int32) if rank == 0 else np.int32(rank))
    given = jnp.asarray(np.stack([ones * r for r in ranks])) if rank == 0 else each
    equal(wrap(partial(mpi4jax.scatter, root=0))(given), ones * rank)
    with pytest.raises(ValueError, match=r"must have shape \(nproc, ...\)"):
        mpi4jax.alltoall(jnp.ones(size + 1))
    blocks = jnp.ones((size, 3, 2)) * rank
    equal(wrap(mpi4jax.alltoall)(blocks), np.stack([ones * r for r in ranks]))


@pytest.mark.parametrize("form", WRAPS)
def test_collectives(world, form):
    world.run(collectives, form)


@separate
def messages(comm, form):
    wrap, rank, other = WRAPS[form], comm.rank, 1 - comm.rank
    mpi4jax.comm_world = comm
    ones = np.ones((3, 2), np.float32)
    for x in (jnp.asarray(ones * rank), rank):
        if rank == 0:
            equal(wrap(partial(mpi4jax.recv, source=1, tag=1))(x), np.asarray(jnp.asarray(x) + 1))
        else:
            wrap(lambda x: mpi4jax.send(x, 0, tag=1))(x)
        found = wrap(lambda x, y: mpi4jax.sendrecv(x, y, source=other, dest=other))(x, x)
        equal(found, np.asarray(jnp.zeros_like(x) + other))
        equal(wrap(partial(mpi4jax.sendrecv, source=rank, dest=rank))(x, x), np.asarray(jnp.asarray(x)))
    batch = jnp.asarray(ones * rank)
    exchange = partial(mpi4jax.sendrecv, source=other, dest=other)
    equal(wrap(jax.vmap(exchange))(batch, batch), ones * other)

    @wrap
    def both_ways(x):  # without an order this would wait for ever
        if rank == 0:
            mpi4jax.send(x, 1)
            return mpi4jax.recv(x, 1)
        y = mpi4jax.recv(x, 0)
        mpi4jax.send(x, 0)
        return y

    equal(both_ways(jnp.ones(10) * rank), np.ones(10, np.float32) * other)


@pytest.mark.parametrize("form", WRAPS)
def test_messages(pair, form):
    pair.run(messages, form)


@separate
def any_source(comm, form):
    """A rank receives from all others in any order, and gets the source of each message."""
    wrap, rank, status = WRAPS[form], comm.rank, xvjax.Status()
    mpi4jax.comm_world = comm
    if rank > 0:
        for i in range(5):
            wrap(lambda x, i=i: mpi4jax.send(x, 0, tag=10 * rank + i))(rank + i / 8)
        return
    assert (status.Get_source(), status.Get_tag()) == (-1, -1)
    take, count = wrap(lambda x: mpi4jax.recv(x, status=status)), {1: 0, 2: 0}
    for _ in range(10):
        value = float(take(0.0))
        source = status.Get_source()
        assert value == source + count[source] / 8
        assert status.Get_tag() == 10 * source + count[source]
        count[source] += 1
    assert count == {1: 5, 2: 5}


@pytest.mark.parametrize("form", WRAPS)
def test_any_source(uneven, form):
    uneven.run(any_source, form)


@separate
def all_reduce_derivatives(comm, form):
    wrap, size = WRAPS[form], comm.size
    mpi4jax.comm_world = comm
    x = jnp.ones((3, 2))
    reduce = partial(mpi4jax.allreduce, op="sum")
    equal(wrap(jax.vmap(reduce))(x), np.asarray(x) * size)

    def transposed(y):
        return jax.linear_transpose(reduce, x)(y)[0]

    equal(wrap(transposed)(x), x)
    equal(wrap(lambda y: jax.linear_transpose(transposed, x)(y)[0])(x), np.asarray(x) * size)
    value, gradient = wrap(jax.value_and_grad(lambda x: reduce(x).sum()))(x)
    equal(value, np.float32(6 * size))
    equal(gradient, x)

    def with_unused(x):
        y = reduce(x)
        _ = x + 2 * y
        return reduce(x).sum()

    equal(wrap(jax.grad(with_unused))(x), x)
    y, dy = wrap(lambda x, v: jax.jvp(reduce, (x,), (v,)))(x, x)
    equal(y, np.asarray(x) * size)
    equal(dy, np.asarray(x) * size)
    y, vjp = jax.vjp(reduce, x)
    equal(vjp(x)[0], x)
    equal(wrap(jax.grad(lambda x: reduce(x) + reduce(x)))(0.0), np.float32(2))


@pytest.mark.parametrize("form", WRAPS)
def test_all_reduce_derivatives(world, form):
    world.run(all_reduce_derivatives, form)


@separate
def products(comm, form):
    """Products with a matrix whose columns are distributed over the ranks, and their transposes, nested up to three times."""
    wrap, rank, size = WRAPS[form], comm.rank, comm.size
    mpi4jax.comm_world = comm
    keys = jax.random.split(jax.random.PRNGKey(123), 5)
    m, n = 5, 12
    a, x, y, v, w = (jax.random.uniform(k, s) for k, s in zip(keys, ((m, n), (n,), (m,), (n,), (m,)), strict=True))
    mine = slice(n // size * rank, n // size * (rank + 1))
    a_mine, x_mine, v_mine = a[:, mine], x[mine], v[mine]

    def reduce(x):
        return mpi4jax.allreduce(x, "sum")

    def transpose(f, like):
        return lambda y: jax.linear_transpose(f, like)(y)[0]

    def product(x):
        return reduce(a_mine @ x)

    def product_t(y):
        return a_mine.T @ transpose(reduce, y)(y)

    ax, aty = a @ x, (a.T @ y)[mine]
    av, atw = a @ v, (a.T @ w)[mine]
    once, once_t = transpose(product, x_mine), transpose(product_t, y)
    twice, twice_t = transpose(once, y), transpose(once_t, x_mine)
    thrice, thrice_t = transpose(twice, x_mine), transpose(twice_t, y)
    for f in (product, once_t, twice, thrice_t):
        close(wrap(f)(x_mine), ax)
    for f in (product_t, once, twice_t, thrice):
        close(wrap(f)(y), aty)
    for f, at, direction, value, change in ((product, x_mine, v_mine, ax, av), (product_t, y, w, aty, atw)):
        found, tangent = wrap(lambda x, v, f=f: jax.jvp(f, (x,), (v,)))(at, direction)
        close(found, value)
        close(tangent, change)
    for f, at, back, value, change in ((product, x_mine, w, ax, atw), (product_t, y, v_mine, aty, av)):

        def both(x, v, f=f):
            found, vjp = jax.vjp(f, x)
            return found, vjp(v)[0]

        found, cotangent = wrap(both)(at, back)
        close(found, value)
        close(cotangent, change)


def test_matrix_vector_products(pair):
    pair.run(products, "jit")


@separate
def expectation(comm):
    """NetKet's gradient of an expectation: a custom_vjp whose rule differentiates operations itself."""
    mpi4jax.comm_world = comm

    def mean(x):
        return mpi4jax.allreduce(x, "sum") / comm.size

    @partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
    def expect(chains, log_pdf, function, parameters, x):
        return mean(function(parameters, x).reshape((chains, -1)).mean())

    def forward(chains, log_pdf, function, parameters, x):
        values = function(parameters, x)
        average = mean(values.reshape((chains, -1)).mean())
        return average, (parameters, x, values - average)

    def backward(chains, log_pdf, function, residuals, out):
        parameters, x, difference = residuals

        def f(parameters, x):
            first = jax.vmap(jnp.multiply)(difference, log_pdf(parameters, x))
            return mean(jnp.mean(first + function(parameters, x), axis=0)).sum()

        _, pullback = jax.vjp(f, parameters, x)
        return pullback(out)

    expect.defvjp(forward, backward)

    def log_pdf(w, x):
        return jnp.sum(x.dot(w), axis=-1)

    def function(w, x):
        return jnp.exp(jnp.sum(x.dot(w), axis=-1)) - 2

    w = jax.random.normal(jax.random.PRNGKey(3), (4, 8))
    x = jax.random.normal(jax.random.PRNGKey(3), (16, 4))
    value, pullback = jax.vjp(lambda w: expect(16, log_pdf, function, w, x), w)
    close(value, function(w, x).mean())
    assert np.isfinite(pullback(jnp.ones_like(value))[0]).all()


def test_expectations(pair):
    pair.run(expectation)


@separate
def transposed(comm):
    """A distributed transpose, in which XLA must not produce non-contiguous arrays."""
    mpi4jax.comm_world = comm
    rank, size, n = comm.rank, comm.size, 12 * comm.size
    whole = np.random.default_rng(0).normal(size=(n, n)).astype(np.float32)
    part = n // size

    def turn(x):
        x = x.reshape([part, size, part]).transpose([1, 0, 2])
        return mpi4jax.alltoall(x).reshape([n, part]).transpose([1, 0])

    mine = slice(part * rank, part * (rank + 1))
    for wrap in WRAPS.values():
        equal(wrap(turn)(jnp.asarray(whole[mine])), whole.T[mine])


def test_distributed_transpose(uneven):
    uneven.run(transposed)
