"""Processes with several devices in `jax.shard_map`: reduction within the process, and one device
communicates across islands.
"""

from __future__ import annotations

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxchecks import close, equal, separate, started

from xvcomm.adapters import jax as xvjax
from xvcomm.errors import ArgumentError, ArrayError
from xvcomm.trace import recorder

P = jax.sharding.PartitionSpec


def mesh_of(count):
    return jax.make_mesh((count,), ("d",), devices=jax.devices()[:count])


def mapped(function, mesh, given, back, check=True):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=back, check_vma=check))


def blocks_of(comm, devices, shape, dtype="float32"):
    """Every device's block on every rank; and this rank's blocks as one array over its devices."""
    count = comm.size * devices
    blocks = [(np.arange(np.prod(shape)) % 5 + number).astype(dtype).reshape(shape) for number in range(count)]
    mine = np.concatenate(blocks[comm.rank * devices : (comm.rank + 1) * devices])
    return blocks, mine


@separate
def operations(comm, devices, check):
    mesh = mesh_of(devices)
    blocks, mine = blocks_of(comm, devices, (2 * comm.size * devices, 3))
    x = jax.device_put(mine, jax.sharding.NamedSharding(mesh, P("d")))
    calls = []
    recorder.hooks.append(calls.append)
    try:
        for op, function in {"sum": np.add, "max": np.maximum, "min": np.minimum}.items():
            reduce = mapped(partial(xvjax.all_reduce, op=op, comm=comm, axis_name="d"), mesh, P("d"), P(), check)
            equal(reduce(x), function.reduce(blocks), op)
        jax.effects_barrier()
        assert len(calls) == 3  # one for all devices of the process
    finally:
        recorder.hooks.remove(calls.append)
    average = mapped(partial(xvjax.all_reduce, op="avg", comm=comm, axis_name="d"), mesh, P("d"), P(), check)
    close(average(x), sum(blocks) / len(blocks))
    gathered = mapped(partial(xvjax.all_gather, comm=comm, axis_name="d"), mesh, P("d"), P(), check)
    equal(gathered(x), np.concatenate(blocks))
    scattered = mapped(partial(xvjax.reduce_scatter, comm=comm, axis_name="d"), mesh, P("d"), P("d"), check)
    rows = 2 * devices
    equal(scattered(x), sum(blocks)[comm.rank * rows : (comm.rank + 1) * rows])
    for dtype in ("int32", "bool", "bfloat16"):
        bits, part = blocks_of(comm, devices, (4,), jnp.dtype(dtype))
        y = jax.device_put(part, jax.sharding.NamedSharding(mesh, P("d")))
        found = mapped(partial(xvjax.all_reduce, op="max", comm=comm, axis_name="d"), mesh, P("d"), P(), check)(y)
        equal(found, np.maximum.reduce(bits), dtype)
    whole = jnp.full(4, comm.rank, jnp.float32)
    sent = mapped(partial(xvjax.broadcast, root=comm.size - 1, comm=comm, axis_name="d"), mesh, P(), P(), check)
    equal(sent(whole), np.full(4, comm.size - 1, np.float32))


@separate
def dtypes(comm, devices):
    """Results have the input's dtype, also where JAX's own functions return another; integer averages round towards zero."""
    for dtype, op, given in (("int32", "avg", [-7, 3, 5, 2**30]), ("bool", "sum", [True, False, False, True])):
        blocks = [np.roll(np.array(given, dtype), number) for number in range(comm.size * devices)]
        mine = np.concatenate(blocks[comm.rank * devices : (comm.rank + 1) * devices])
        x = jax.device_put(mine, jax.sharding.NamedSharding(mesh_of(devices), P("d")))
        found = mapped(partial(xvjax.all_reduce, op=op, comm=comm, axis_name="d"), mesh_of(devices), P("d"), P())(x)
        total = np.sum(blocks, axis=0, dtype=dtype)
        want = np.trunc(total / len(blocks)).astype(dtype) if op == "avg" else total
        assert found.dtype == dtype
        equal(found, want, op)


def test_dtypes(hosts):
    hosts.run(dtypes, 2)


@pytest.mark.parametrize("check", [True, False])
def test_operations(hosts, check):
    hosts.run(operations, 2, check)


@separate
def training(comm, devices):
    """Data-parallel training steps over the devices of all processes against one process; ordered, and in loops."""
    mesh = mesh_of(devices)
    count = comm.size * devices
    data = np.random.default_rng(1).normal(size=(8 * count, 4)).astype(np.float32)
    mine = data[comm.rank * 8 * devices : (comm.rank + 1) * 8 * devices]
    w = jnp.ones((4, 4), jnp.float32)

    def loss(w, x):
        return (jnp.tanh(x @ w) ** 2).mean()

    def local(w, x):
        def step(w, _):
            gradient = jax.grad(loss)(xvary(w), x)
            return w - 0.1 * xvjax.all_reduce(gradient, "avg", comm=comm, axis_name="d"), None

        return jax.lax.scan(step, w, None, length=3)[0]

    from xvcomm.adapters.jax.versions import varying

    def xvary(w):
        return varying(w, "d")

    x = jax.device_put(mine, jax.sharding.NamedSharding(mesh, P("d")))
    found = mapped(local, mesh, (P(), P("d")), P())(w, x)
    expected = w
    for _ in range(3):
        expected = expected - 0.1 * jax.grad(loss)(expected, data)
    close(found, expected)


def test_training(hosts):
    hosts.run(training, 2)


@separate
def derivatives(comm, devices):
    """The derivative over all devices of all processes is that of the sum of all their losses."""
    mesh = mesh_of(devices)
    blocks, mine = blocks_of(comm, devices, (3,))
    x = jax.device_put(mine, jax.sharding.NamedSharding(mesh, P("d")))

    def local(x):
        y = xvjax.all_reduce(x * x, comm=comm, axis_name="d")
        return jax.lax.psum((jnp.sin(y) * (comm.rank + 1) + 0 * x).sum(), "d")

    found = jax.jit(jax.grad(lambda x: mapped(local, mesh, P("d"), P())(x)))(x)

    def everybody(xs):
        y = sum(x * x for x in xs)
        return sum((jnp.sin(y) * (rank + 1)).sum() * devices for rank in range(comm.size))

    expected = jax.grad(everybody)([jnp.asarray(b) for b in blocks])
    close(found, np.concatenate(expected[comm.rank * devices : (comm.rank + 1) * devices]))


def test_derivatives(hosts):
    hosts.run(derivatives, 2)


@separate
def one_device_each(comm):
    """With one device per process, operations in shard_map are those of the ranks, without further setup."""
    mesh = mesh_of(1)
    x = jax.device_put(jnp.full(4, comm.rank + 1, jnp.float32), jax.sharding.NamedSharding(mesh, P("d")))
    equal(mapped(partial(xvjax.all_reduce, comm=comm), mesh, P("d"), P("d"))(x), np.full(4, 3, np.float32))

    def by_token(x, token):
        return xvjax.all_reduce(x, comm=comm, token=token)

    y, _ = mapped(by_token, mesh, (P("d"), P()), (P("d"), P()))(x, xvjax.make_token())
    equal(y, np.full(4, 3, np.float32))
    found = mapped(partial(xvjax.all_reduce, comm=comm, axis_name="d"), mesh, P("d"), P())(x)
    equal(found, np.full(4, 3, np.float32))


def test_one_device_each(pair):
    pair.run(one_device_each)


@separate
def refusals(comm):
    """Programs in which several devices would call an operation of one rank raise with a remedy."""
    mesh = mesh_of(2)
    x = jax.device_put(jnp.ones((4, 2)), jax.sharding.NamedSharding(mesh, P("d")))
    with pytest.raises(ArrayError, match=r"divides this program among 2 devices.*jax.shard_map.*axis_name="):
        jax.jit(partial(xvjax.all_reduce, comm=comm))(x)
    with pytest.raises(ArrayError, match=r"2 devices of this process would call it.*axis_name="):
        mapped(partial(xvjax.all_reduce, comm=comm), mesh, P("d"), P("d"))(x)
    with pytest.raises(ArgumentError, match="JAX does not reduce by prod"):
        mapped(partial(xvjax.all_reduce, op="prod", comm=comm, axis_name="d"), mesh, P("d"), P("d"))(x)
    with pytest.raises(ArgumentError, match="axis_name= and token= cannot be combined"):
        by_token = partial(xvjax.all_reduce, comm=comm, axis_name="d", token=xvjax.make_token())
        mapped(by_token, mesh, P("d"), P())(x)
    with pytest.raises(ArgumentError, match="1 rows are not a multiple of its 2 devices"):
        mapped(partial(xvjax.reduce_scatter, comm=comm, axis_name="d"), mesh, P("d"), P("d"))(x)
    square = jax.make_mesh((2, 1), ("d", "e"))
    with pytest.raises(ArrayError, match="over all axes of the mesh"):
        partly = jax.shard_map(
            partial(xvjax.all_reduce, comm=comm, axis_name="e"), mesh=square, in_specs=P("e"), out_specs=P(),
            axis_names={"e"},
        )  # fmt: skip
        jax.jit(partly)(jax.device_put(jnp.ones((4, 2)), jax.sharding.NamedSharding(square, P("e"))))
    xvjax.barrier(comm=comm)  # nothing was sent: the communicator is as it was


def test_refusals(hosts):
    hosts.run(refusals)


def threads(comm):
    """Whatever runs on XLA's threads, they do not deadlock."""
    devices = len(jax.devices())
    operations.__wrapped__(comm, devices, True)
    mesh = mesh_of(devices)
    x = jax.device_put(jnp.ones((devices, 1000)), jax.sharding.NamedSharding(mesh, P("d")))

    def local(x):
        for _ in range(3):
            x = jax.lax.psum(xvjax.all_reduce(jnp.sin(x), "avg", comm=comm, axis_name="d"), "d") * 0 + x
        return x

    program = mapped(local, mesh, P("d"), P("d"))
    for _ in range(5):
        results = [program(x) for _ in range(3)]
    jax.block_until_ready(results)
    lone = jax.jit(partial(xvjax.all_reduce, comm=comm))
    many = [jax.device_put(jnp.ones(3), device) for device in jax.devices()]
    for _ in range(5):
        for y in jax.block_until_ready([lone(x) for x in many]):
            equal(y, np.full(3, comm.size, np.float32))
    return devices, len(os.sched_getaffinity(0))


@pytest.mark.parametrize("devices", [4, 8])
def test_many_devices_on_one_core(devices):
    """More devices than XLA's single compute thread."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with started("a,b", devices=devices, env={"NPROC": "1"}) as ranks:
            for process in ranks.pids():
                os.sched_setaffinity(process, {min(allowed)})
            assert ranks.run(threads) == [(devices, 1)] * 2
    finally:
        os.sched_setaffinity(0, allowed)


def stays(comm):
    """Results of the core's own operations are on the operands' device, and committed to it if the operands are."""
    for home in jax.local_devices():
        y = comm.all_reduce(jax.device_put(np.ones(3, np.float32), home))
        equal(y, np.full(3, comm.size, np.float32))
        assert y.devices() == {home} and y.committed
    assert not comm.all_reduce(jnp.ones(3, jnp.float32)).committed


def test_results_stay_on_their_device(hosts):
    hosts.run(stays)
