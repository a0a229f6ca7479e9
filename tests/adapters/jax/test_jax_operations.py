"""Every operation, in every form, for every dtype, in one island and across islands."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxchecks import DTYPES, FORMS, WIDE, equal, inputs, separate, total

import xvcomm
from xvcomm.adapters import jax as xvjax


def reductions(comm, form, dtype):
    """all_reduce, reduce and reduce_scatter of a dtype."""
    run, rows = FORMS[form], 2 * comm.size
    arrays = inputs(comm, (rows, 3), dtype)
    mine, expected = jnp.asarray(arrays[comm.rank]), total(arrays)
    block = slice(2 * comm.rank, 2 * comm.rank + 2)
    equal(run(partial(xvjax.all_reduce, comm=comm), mine), expected, "all_reduce")
    for root in range(comm.size):
        found = run(partial(xvjax.reduce, root=root, comm=comm), mine)
        equal(found, expected if comm.rank == root else arrays[comm.rank], "reduce")
    equal(run(partial(xvjax.reduce_scatter, comm=comm), mine), expected[block], "reduce_scatter")
    equal(mine, arrays[comm.rank], "input")


def moves(comm, form, dtype):
    """Operations that only move arrays of a dtype."""
    run, last = FORMS[form], comm.size - 1
    arrays = inputs(comm, (comm.size, 3), dtype)
    mine, everything = jnp.asarray(arrays[comm.rank]), np.concatenate(arrays)
    equal(run(partial(xvjax.broadcast, root=last, comm=comm), mine), arrays[last], "broadcast")
    equal(run(partial(xvjax.all_gather, comm=comm), mine), everything, "all_gather")
    found = run(partial(xvjax.gather, root=last, comm=comm), mine)
    if comm.rank == last:
        equal(found, everything, "gather")
    else:
        assert found is None
    found = run(partial(xvjax.scatter, root=last, comm=comm), mine)
    equal(found, arrays[last][comm.rank : comm.rank + 1], "scatter")
    expected = np.concatenate([a[comm.rank : comm.rank + 1] for a in arrays])
    equal(run(partial(xvjax.all_to_all, comm=comm), mine), expected, "all_to_all")
    equal(mine, arrays[comm.rank], "input")


def messages(comm, form, dtype):
    """Messages around a ring, by sendrecv, and by send and recv."""
    run, arrays = FORMS[form], inputs(comm, (5, 3), dtype)
    mine, after, before = jnp.asarray(arrays[comm.rank]), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    found = run(lambda x, **k: xvjax.sendrecv(x, after, x, before, 7, 7, channel=3, comm=comm, **k), mine)
    equal(found, arrays[before], "sendrecv")

    def exchange(x, token=None):
        carrier = {} if token is None else {"token": token}
        receipt = xvjax.send(x, after, 5, comm=comm, **carrier)
        carrier = {} if token is None else {"token": receipt}
        return xvjax.recv(x, before, 5, comm=comm, **carrier)

    equal(run(exchange, mine), arrays[before], "recv")


@separate
def all_operations(comm, form, dtype):
    reductions(comm, form, dtype)
    moves(comm, form, dtype)
    messages(comm, form, dtype)


@pytest.mark.parametrize("form", FORMS)
def test_operations(world, form):
    world.run(all_operations, form, "float32")


@pytest.mark.parametrize("form", ["eager", "jit"])
def test_operations_of_uneven_islands(uneven, form):
    uneven.run(all_operations, form, "float32")


@separate
def all_dtypes(comm, form, dtypes, wide):
    jax.config.update("jax_enable_x64", wide)
    try:
        for dtype in dtypes:
            reductions(comm, form, dtype)
            moves(comm, form, dtype)
            messages(comm, form, dtype)
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("form", ["eager", "token"])
def test_dtypes(pair, form):
    pair.run(all_dtypes, form, DTYPES, False)
    pair.run(all_dtypes, form, WIDE, True)


@separate
def reduces(comm, form):
    """Each reduction, against numpy."""
    run, rank = FORMS[form], comm.rank
    floats, integers = inputs(comm, (7,)), inputs(comm, (7,), "int32")
    functions = {"max": np.maximum, "min": np.minimum, "prod": np.multiply}
    for name, function in functions.items():
        found = run(partial(xvjax.all_reduce, op=name, comm=comm), jnp.asarray(floats[rank]))
        equal(found, function.reduce(floats), name)
    for name, function in {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}.items():
        found = run(partial(xvjax.all_reduce, op=name, comm=comm), jnp.asarray(integers[rank]))
        equal(found, function.reduce(integers), name)
    found = run(partial(xvjax.all_reduce, op="avg", comm=comm), jnp.asarray(floats[rank]) * comm.size)
    equal(found, total(floats), "avg")
    premul = xvcomm.premul_sum(float(rank + 1))
    found = run(partial(xvjax.all_reduce, op=premul, comm=comm), jnp.asarray(floats[rank]))
    equal(found, sum((r + 1) * a for r, a in enumerate(floats)).astype(np.float32), "premul_sum")
    found = run(partial(xvjax.all_reduce, op=xvcomm.ReduceOp.SUM, comm=comm), jnp.asarray(floats[rank]))
    equal(found, total(floats), "by number")


@pytest.mark.parametrize("form", ["eager", "token"])
def test_each_reduction(world, form):
    world.run(reduces, form)


@separate
def uneven_rows(comm, form):
    """Numbers of rows that differ between ranks; rank 0 has none."""
    run, rank, size = FORMS[form], comm.rank, comm.size
    counts = list(range(size))
    everything = np.arange(sum(counts) * 2, dtype=np.float32).reshape(-1, 2)
    start = sum(counts[:rank])
    mine = everything[start : start + rank]
    equal(run(partial(xvjax.all_gather, counts=counts, comm=comm), jnp.asarray(mine)), everything, "all_gather")
    found = run(partial(xvjax.reduce_scatter, counts=counts, comm=comm), jnp.asarray(everything))
    equal(found, mine * size, "reduce_scatter")
    found = run(partial(xvjax.gather, counts=np.array(counts), comm=comm), jnp.asarray(mine))
    if rank == 0:
        equal(found, everything, "gather")
    equal(run(partial(xvjax.scatter, counts=counts, comm=comm), jnp.asarray(everything)), mine, "scatter")
    out = [rank + other for other in range(size)]
    x = np.full((sum(out), 2), rank, np.float32)
    found = run(partial(xvjax.all_to_all, send_counts=out, recv_counts=out, comm=comm), jnp.asarray(x))
    equal(found, np.repeat(np.arange(size, dtype=np.float32), out)[:, None] * np.ones((1, 2), np.float32), "all_to_all")


@pytest.mark.parametrize("form", ["eager", "jit", "token"])
def test_uneven_rows(uneven, form):
    uneven.run(uneven_rows, form)


@separate
def shapes(comm, form):
    """Scalars, empty arrays, and arrays larger than a ring."""
    run, size = FORMS[form], comm.size
    equal(run(partial(xvjax.all_reduce, comm=comm), jnp.float32(comm.rank)), np.float32(sum(range(size))), "scalar")
    equal(run(partial(xvjax.all_gather, comm=comm), jnp.int32(comm.rank)), np.arange(size, dtype=np.int32), "rows")
    equal(run(partial(xvjax.all_reduce, comm=comm), jnp.zeros((0, 3))), np.zeros((0, 3), np.float32), "nothing")
    equal(run(partial(xvjax.all_gather, comm=comm), jnp.zeros((0, 3))), np.zeros((0, 3), np.float32), "no rows")
    large = jnp.full(3_000_001, comm.rank + 1, jnp.float32)
    equal(run(partial(xvjax.all_reduce, comm=comm), large), np.full(3_000_001, size * (size + 1) / 2, np.float32))


@pytest.mark.parametrize("form", ["eager", "jit", "token"])
def test_shapes(world, form):
    world.run(shapes, form)


@separate
def subgroup(comm):
    """A subgroup and the default communicator together."""
    sub = comm.split(color=int(comm.rank == 0))
    xvjax.use(comm)

    def both(x):
        return xvjax.all_reduce(x, comm=sub), xvjax.all_reduce(x)

    few, all_ = jax.jit(both)(jnp.ones(3))
    equal(few, np.full(3, sub.size, np.float32))
    equal(all_, np.full(3, comm.size, np.float32))
    sub.close()
    xvjax.use(None)


def test_communicators(uneven):
    uneven.run(subgroup)
