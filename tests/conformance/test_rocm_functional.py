"""A framework with immutable arrays, such as JAX, on ROCm with libraries that simulate AMD's on host memory.

JAX does not support this device; what xvcomm uses of JAX is reimplemented here: an array exposes its memory once it is
filled, and arrays are created from memory by DLPack.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xvcomm.comm.communicator import Communicator
from xvcomm.memory import array
from xvcomm.testing import World, adapter
from xvcomm.testing.arrays import Array, DeviceArrays
from xvcomm.testing.cases import SMALL_GPU_RINGS
from xvcomm.testing.frameworks import Framework
from xvcomm.testing.inside import context

pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install hip-python")


class Fixed:
    """An array of that framework; does not expose its stream."""

    committed = True

    def __init__(self, arrays: DeviceArrays, memory: Any) -> None:
        self.arrays, self.memory = arrays, memory

    def __array_namespace__(self) -> Fixed:
        return self

    def __dlpack__(self, **_: Any) -> Any:
        return self.memory.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self.memory.__dlpack_device__()

    def block_until_ready(self) -> Fixed:
        """Wait until it is filled."""
        self.arrays.synchronize()
        return self

    def from_dlpack(self, x: Any) -> Fixed:
        """Function of the namespace: an array over the same memory."""
        assert x.__dlpack_device__() == self.__dlpack_device__()
        return Fixed(self.arrays, x)

    def asarray(self, x: Fixed, *, copy: bool) -> Fixed:
        """Function of the namespace: a copy, made asynchronously."""
        seen = array.view(x.memory)
        made = self.arrays.empty(seen.shape, seen.dtype)
        if copy and seen.nbytes:
            self.arrays.device.copy(made.address, seen.address, seen.nbytes, self.arrays.stream)
        return Fixed(self.arrays, made)


Fixed.__module__ = "jax.standin"  # by which xvcomm knows arrays that never change


def functional(comm: Communicator) -> Framework:
    """The framework's namespace."""
    arrays = DeviceArrays(context(comm).device)

    def make(x: Array) -> Fixed:
        return Fixed(arrays, arrays.put(x))

    def read(y: Fixed) -> Array:
        return arrays.get(y.memory)

    return Framework(make, read, ("float32", "bfloat16", "int64", "bool"), False)


def conformance(comm: Communicator) -> None:
    """The checks of `xvcomm.testing.adapter`."""
    for check in adapter.CHECKS:
        check(comm, [f"{__name__}:functional"])


def late(comm: Communicator) -> None:
    """Results of asynchronous operations, for which the host must wait because the framework's stream is unknown."""
    f, n = functional(comm), 300_001
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x = f.make(np.full(n, comm.rank, np.float32))
    total, incoming = comm.all_reduce(x, async_op=True), comm.irecv(x, before)
    outgoing = comm.isend(x, after)
    assert (f.read(total.wait()) == sum(range(comm.size))).all()
    assert (f.read(incoming.wait()) == before).all()
    outgoing.wait()
    assert (f.read(comm.sendrecv(x, after, x, before)) == before).all()
    assert (f.read(x) == comm.rank).all()


@pytest.mark.parametrize("islands", ["a:2", "a,b"])
def test_immutable_arrays(root: Path, islands: str) -> None:
    """In one island and across islands."""
    builder = runpy.run_path(str(root / "tests" / "shims" / "hip" / "build.py"))
    try:
        environment = {"ROCM_PATH": str(builder["build"]()), "HIPHOST_DEVICES": "2", **SMALL_GPU_RINGS}
    except builder["NoCompiler"] as missing:
        pytest.skip(str(missing))
    with World(devices="rocm:2", islands=islands, env=environment) as ranks:
        ranks.run(conformance)
        ranks.run(late)
