"""Derivatives in forward and reverse mode, of first and second order, against one process that has all arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxchecks import close, equal, separate

import xvcomm
from xvcomm.adapters import jax as xvjax
from xvcomm.errors import ArgumentError

X = [np.linspace(0.5, 1.5, 6, dtype=np.float32).reshape(3, 2) * (rank + 1) for rank in range(4)]


@separate
def sums(comm):
    """The loss is the sum over all ranks, as `jax.grad` in one process computes it."""
    size, rank = comm.size, comm.rank

    def loss(x, number):  # of one rank, given what all_reduce gives
        return (jnp.sin(x) * (number + 1)).sum()

    def mine(x):
        return loss(xvjax.all_reduce(x**2, comm=comm), rank)

    def everybody(xs):
        y = sum(x**2 for x in xs)
        return sum(loss(y, number) for number in range(size))

    x = jnp.asarray(X[rank])
    expected = jax.grad(everybody)([jnp.asarray(a) for a in X[:size]])[rank]
    close(jax.grad(mine)(x), expected, "eager")
    close(jax.jit(jax.grad(mine))(x), expected, "jit")
    value, vjp = jax.vjp(mine, x)
    close(vjp(jnp.ones_like(value))[0], expected, "vjp")
    close(jax.jit(jax.jacrev(mine))(x), expected, "jacrev")


def test_all_reduce_is_its_own_transpose(uneven):
    uneven.run(sums)


@separate
def forward(comm):
    size, rank = comm.size, comm.rank
    x, v = jnp.asarray(X[rank]), jnp.ones((3, 2)) * (rank + 1)
    for wrap in (lambda f: f, jax.jit):
        y, dy = wrap(lambda x, v: jax.jvp(lambda x: xvjax.all_reduce(jnp.sin(x), comm=comm), (x,), (v,)))(x, v)
        close(y, sum(np.sin(a) for a in X[:size]))
        close(dy, sum(np.cos(a) * (r + 1) for r, a in enumerate(X[:size])))
    (back,) = jax.linear_transpose(lambda x: xvjax.all_reduce(x, comm=comm), x)(x)
    close(back, sum(X[:size]))

    # The Hessian of the sum of all ranks' losses, rows and columns of this rank's element.
    def square(x):
        return xvjax.all_reduce(x, comm=comm) ** 2

    found = jax.grad(jax.grad(square))(jnp.asarray(2.0, jnp.float32))
    close(found, 2.0 * size * size)


def test_forward_mode_and_second_order(world):
    world.run(forward)


@separate
def replicated(comm):
    """A loss that every rank has: its derivative with respect to this rank's input."""
    size, rank = comm.size, comm.rank
    x = jnp.asarray(X[rank])

    def loss(x):
        return jnp.log(xvjax.all_reduce((x**2).sum(), comm=comm, replicated=True))

    everything = sum((a**2).sum() for a in X[:size])
    for form in (jax.grad(loss), jax.jit(jax.grad(loss))):
        close(form(x), 2 * X[rank] / everything)

    def reduced(x):
        return xvjax.all_reduce(x, comm=comm, replicated=True)

    def transposed(x):
        return jax.linear_transpose(reduced, x)(x)[0]

    equal(transposed(x), X[rank])
    close(jax.linear_transpose(transposed, x)(x)[0], sum(X[:size]))
    close(jax.jvp(reduced, (x,), (x,))[1], sum(X[:size]))


def test_replicated_losses(world):
    world.run(replicated)


@separate
def blocks(comm):
    """all_gather and reduce_scatter, even and uneven, with sums, averages and factors."""
    size, rank = comm.size, comm.rank
    counts = [r + 1 for r in range(size)]
    rows = sum(counts)
    weights = [np.random.default_rng(r).normal(size=(rows, 2)).astype(np.float32) for r in range(size)]
    start = sum(counts[:rank])
    mine, block = jnp.ones((rank + 1, 2)), slice(start, start + rank + 1)

    def gathered(x):
        return (xvjax.all_gather(x, counts=counts, comm=comm) * weights[rank]).sum()

    expected = sum(weights)[block]
    for wrap in (lambda f: f, jax.jit):
        close(wrap(jax.grad(gathered))(mine), expected, "all_gather")
    whole = jnp.asarray(weights[rank])
    for op, factor in (("sum", 1.0), ("avg", 1 / size), (xvcomm.premul_sum(rank + 2.0), rank + 2.0)):

        def scattered(x, op=op):
            return (xvjax.reduce_scatter(x, op, counts=counts, comm=comm) * (rank + 1)).sum()

        expected = factor * np.repeat(np.arange(1, size + 1, dtype=np.float32), counts)[:, None] * np.ones((1, 2))
        for wrap in (lambda f: f, jax.jit):
            close(wrap(jax.grad(scattered))(whole), expected, f"reduce_scatter {op}")
    y, dy = jax.jvp(lambda x: xvjax.all_gather(x, counts=counts, comm=comm), (mine,), (mine * 2,))
    close(dy, 2 * y)


def test_blocks_transpose_each_other(uneven):
    uneven.run(blocks)


@separate
def scaled_sums(comm):
    size, rank = comm.size, comm.rank
    x = jnp.asarray(X[rank])

    def loss(x, op):
        return (xvjax.all_reduce(x, op, comm=comm) * (rank + 1)).sum()

    total = size * (size + 1) / 2
    close(jax.grad(loss)(x, "avg"), np.full((3, 2), total / size))
    close(jax.jit(jax.grad(lambda x: loss(x, xvcomm.premul_sum(rank + 0.5))))(x), np.full((3, 2), total * (rank + 0.5)))


def test_averages_and_factors(pair):
    pair.run(scaled_sums)


@separate
def two_stages(comm, form):
    """y = w1 * w0 * x over two ranks, by send and recv; the last rank computes the loss of y."""
    x = jnp.arange(1.0, 4.0, dtype=jnp.float32)
    other = 1 - comm.rank
    if form == "token":

        def first(w, token):
            return xvjax.send(w * x, other, 3, comm=comm, token=token)

        def last(w, like, token):
            y, token = xvjax.recv(like, other, 3, comm=comm, token=token)
            return ((w * y) ** 2).sum() + token

        arguments = (xvjax.make_token(),)
    else:

        def first(w):
            return xvjax.send(w * x, other, 3, comm=comm)

        def last(w, like):
            y = xvjax.recv(like, other, 3, comm=comm)
            return ((w * y) ** 2).sum()

        arguments = ()
    wrap = (lambda f: f) if form == "eager" else jax.jit
    w0, w1 = jnp.asarray(2.0, jnp.float32), jnp.asarray(3.0, jnp.float32)
    if comm.rank == 0:
        numbers = tuple(range(1 + len(arguments)))
        back = wrap(jax.grad(first, argnums=numbers))(w0, *arguments)
        close(back[0], (x * 2 * w1 * (w1 * w0 * x)).sum())
    else:
        numbers = tuple(range(2 + len(arguments)))
        back = wrap(jax.grad(last, argnums=numbers))(w1, jnp.zeros_like(x), *arguments)
        close(back[0], (2 * w1 * (w0 * x) ** 2).sum())
        equal(back[1], np.zeros(3, np.float32))


@pytest.mark.parametrize("form", ["eager", "jit", "token"])
def test_send_and_recv_transpose_each_other(pair, form):
    pair.run(two_stages, form)


@separate
def tangents(comm):
    """Forward mode across a message: both ranks take part."""
    other, x = 1 - comm.rank, jnp.arange(3.0, dtype=jnp.float32)
    if comm.rank == 0:
        _, dy = jax.jit(lambda x: jax.jvp(lambda x: xvjax.send(jnp.sin(x), other, comm=comm), (x,), (x * 2,)))(x)
        equal(dy, np.float32(0))
    else:
        like = jnp.zeros(3)
        y, dy = jax.jvp(lambda like: xvjax.recv(like, other, comm=comm), (like,), (like,))
        close(y, np.sin(x))
        close(dy, np.cos(x) * 2 * x)


def test_forward_mode_of_messages(pair):
    pair.run(tangents)


@separate
def exchanges(comm, wrapped):
    """sendrecv once and twice, as in mpi4jax's tests; forward mode too."""
    other, rank = 1 - comm.rank, comm.rank
    wrap = jax.jit if wrapped else lambda f: f
    x = jnp.ones((3, 2)) * (rank + 1)

    def swap(x):
        return xvjax.sendrecv(x, other, x, other, comm=comm)

    def once(x):
        return (swap(x) * (rank + 1)).sum()

    def twice(x):
        return (swap(swap(x) * (rank + 1) * 5) * (rank + 1) ** 2).sum()

    equal(wrap(jax.grad(once))(x), np.full((3, 2), other + 1, np.float32))
    equal(wrap(jax.grad(twice))(x), np.full((3, 2), (rank + 1) ** 2 * (other + 1) * 5, np.float32))
    equal(wrap(jax.jacrev(once))(x), np.full((3, 2), other + 1, np.float32))
    equal(wrap(lambda x: jax.jvp(swap, (x,), (x * 3,)))(x)[1], np.full((3, 2), 3.0 * (other + 1), np.float32))
    jacobian = wrap(jax.jacfwd(once))(x)
    equal(jacobian, np.full((3, 2), rank + 1, np.float32))  # each end's tangents are its own unit vectors


@pytest.mark.parametrize("wrapped", [False, True])
def test_exchanges(pair, wrapped):
    pair.run(exchanges, wrapped)


@separate
def along_tokens(comm):
    """The operations of the backward pass are ordered by the tokens' cotangents."""

    def loss(x, token):
        for _ in range(3):
            x, token = xvjax.all_reduce(jnp.sin(x), token=token, comm=comm)
        return x.sum() + token

    def one(x):
        for _ in range(3):
            x = comm.size * jnp.sin(x)  # all ranks have the same
        return x.sum()

    x = jnp.asarray(X[0])
    value, (dx, dtoken) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, xvjax.make_token())
    close(value, one(x))
    close(dx, jax.grad(one)(x))
    assert np.isfinite(dtoken)
    batch = jax.jit(jax.vmap(jax.grad(loss), in_axes=(0, None)))(jnp.stack([x, x]), xvjax.make_token())
    close(batch, np.stack([dx, dx]))


@separate
def past_constants(comm):
    """Values that are not differentiated may be part of the token chain."""
    other, n = 1 - comm.rank, jnp.arange(3)

    def loss(x, token):
        y, token = xvjax.all_reduce(x * x, token=token, comm=comm)
        total, token = xvjax.all_reduce(n, token=token, comm=comm)
        token = xvjax.barrier(token=token, comm=comm)
        largest, token = xvjax.all_reduce(jax.lax.stop_gradient(x), "max", token=token, comm=comm)
        swapped, token = xvjax.sendrecv(n + comm.rank, other, n, other, token=token, comm=comm)
        token = xvjax.send(n, other, token=token, comm=comm)
        received, token = xvjax.recv(n, other, token=token, comm=comm)
        z, token = xvjax.all_reduce(jnp.sin(y), token=token, comm=comm)
        factor = total.sum() + largest.sum() + swapped.sum() + received.sum()
        return z.sum() * factor + token

    x = jnp.asarray([0.5, 1.0], jnp.float32)
    factor = 6 + 1.5 + (3 + 3 * other) + 3
    # Both ranks' losses count, each with its factor.
    factors = 2 * (6 + 1.5 + 3) + 3 + 3 + 3
    for wrap in (lambda f: f, jax.jit):
        value, (dx, _) = wrap(jax.value_and_grad(loss, argnums=(0, 1)))(x, xvjax.make_token())
        close(value, (2 * np.sin(2 * x * x)).sum() * factor)
        close(dx, factors * 2 * np.cos(2 * x * x) * 2 * x)


def test_constants_in_the_token_chain(pair):
    pair.run(past_constants)


def test_backward_operations_follow_the_tokens(pair):
    pair.run(along_tokens)


@separate
def refusals(comm):
    """Operations without a derivative raise; integers and constants beside them do not matter."""
    x = jnp.ones((comm.size, 2))
    for name, call in {
        "all_reduce (max": lambda x: xvjax.all_reduce(x, "max", comm=comm),
        "all_reduce (prod": lambda x: xvjax.all_reduce(x, "prod", comm=comm),
        "reduce_scatter (min": lambda x: xvjax.reduce_scatter(x, "min", comm=comm),
        "reduce (": lambda x: xvjax.reduce(x, comm=comm),
        "broadcast": lambda x: xvjax.broadcast(x, comm=comm),
        "gather": lambda x: xvjax.gather(x, comm=comm),
        "scatter": lambda x: xvjax.scatter(x, comm=comm),
        "all_to_all": lambda x: xvjax.all_to_all(x, comm=comm),
    }.items():
        for wrap in (lambda f: f, jax.jit):
            with pytest.raises(ArgumentError, match=r"has no derivative; put jax.lax.stop_gradient") as caught:
                wrap(jax.grad(lambda x, call=call: jnp.sum(call(x))))(x)
            assert str(caught.value).startswith(name)

    def constant(x):
        return x.sum() * xvjax.all_reduce(jax.lax.stop_gradient(x), "max", comm=comm).sum()

    close(jax.grad(constant)(x), np.full((comm.size, 2), 2.0 * comm.size))

    def integers(x, n):
        return x.sum() * xvjax.all_reduce(n, comm=comm).sum()

    close(jax.jit(jax.grad(integers))(x, jnp.ones(3, jnp.int32)), np.full((comm.size, 2), 3.0 * comm.size))


def test_no_derivative(pair):
    pair.run(refusals)
