"""Operations outside compiled functions: no unnecessary copies, no writes to JAX's arrays, arrays on several devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jaxchecks import equal, inputs, separate, total

from xvcomm.adapters import jax as xvjax
from xvcomm.adapters.jax import customcalls, eager
from xvcomm.errors import ArrayError

P = jax.sharding.PartitionSpec


class Addresses:
    """Records the addresses that the core reads and writes."""

    def __enter__(self):
        self.seen = []
        self._run = customcalls.CollectiveCall.run
        customcalls.CollectiveCall.run = lambda call, src, dst, stream: (
            self.seen.append((src, dst)), self._run(call, src, dst, stream)
        )[1]  # fmt: skip
        return self

    def __exit__(self, *exc):
        customcalls.CollectiveCall.run = self._run


@separate
def copies(comm):
    x = jnp.arange(5000, dtype=jnp.float32)
    with Addresses() as addresses:
        y = xvjax.all_reduce(x, comm=comm)
    ((src, dst),) = addresses.seen
    assert src == x.unsafe_buffer_pointer() and dst == y.unsafe_buffer_pointer() and dst % eager.ALIGNMENT == 0
    equal(x, np.arange(5000, dtype=np.float32))
    equal(y, np.arange(5000, dtype=np.float32) * comm.size)
    for dtype in ("bfloat16", "float8_e4m3fn", "bool"):
        with Addresses() as addresses:
            y = xvjax.all_reduce(jnp.ones(10_000, dtype), "max", comm=comm)
        assert addresses.seen[0][1] == y.unsafe_buffer_pointer(), dtype
    given = np.arange(5, dtype=np.float32)
    equal(xvjax.all_reduce(given, comm=comm), given * comm.size)
    equal(given, np.arange(5, dtype=np.float32))
    same = xvjax.broadcast(x, comm.rank, comm=comm.split(comm.rank) or comm) if comm.size == 1 else x
    assert same is x


@separate
def layouts(comm):
    """An array that JAX stores in column-major order."""
    by_columns = Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    y = jax.device_put(x, by_columns)
    assert not np.asarray(y).flags.c_contiguous
    equal(xvjax.all_reduce(y, comm=comm), x * comm.size)
    equal(xvjax.all_gather(y, comm=comm), np.concatenate([x] * comm.size))


def test_arrays_in_other_layouts(pair):
    pair.run(layouts)


def test_no_copies(pair):
    pair.run(copies)


@separate
def compiled_copies(comm):
    """A compiled program reads its argument in place and writes directly to the result's memory."""
    x = jnp.arange(5000, dtype=jnp.float32)
    program = jax.jit(lambda x: xvjax.all_reduce(x, comm=comm))
    with Addresses() as addresses:
        y = program(x).block_until_ready()
    ((src, dst),) = addresses.seen
    assert src == x.unsafe_buffer_pointer() and dst == y.unsafe_buffer_pointer() and src != dst
    equal(x, np.arange(5000, dtype=np.float32))


def test_no_copies_in_programs(pair):
    pair.run(compiled_copies)


@separate
def several_devices(comm):
    """Parts are exported one by one; operations that need them together raise."""
    mesh = jax.make_mesh((2,), ("d",))
    arrays = inputs(comm, (4, 3))
    parted = jax.device_put(arrays[comm.rank], jax.sharding.NamedSharding(mesh, P("d")))
    everywhere = jax.device_put(arrays[comm.rank], jax.sharding.NamedSharding(mesh, P()))
    for x in (parted, everywhere):
        y = xvjax.all_reduce(x, comm=comm)
        equal(y, total(arrays))
        assert y.sharding == x.sharding
        equal(xvjax.broadcast(x, 1, comm=comm), arrays[1])
    with Addresses() as addresses:
        xvjax.all_reduce(everywhere, comm=comm)
    assert len(addresses.seen) == 1  # equal parts are one
    with pytest.raises(ArrayError, match=r"spread over 2 devices; call it in jax.shard_map.*axis_name=.*device_put"):
        xvjax.all_gather(parted, comm=comm)
    with pytest.raises(ArrayError, match="spread over 2 devices"):
        xvjax.send(parted, 1 - comm.rank, comm=comm)
    second = jax.device_put(arrays[comm.rank], jax.devices()[1])
    y = xvjax.all_reduce(second, comm=comm)
    equal(y, total(arrays))
    assert y.devices() == {jax.devices()[1]}
    y = jax.jit(lambda x: xvjax.all_reduce(x, comm=comm))(second)
    equal(y, total(arrays))
    assert y.devices() == {jax.devices()[1]}


def test_arrays_on_several_devices(hosts):
    hosts.run(several_devices)
