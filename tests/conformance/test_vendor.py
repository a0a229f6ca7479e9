"""A vendor unknown to xvcomm: one package with one entry point, over libraries that simulate AMD's on host memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xvcomm.abc.launch import SupportsEnqueuedEvents
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import ArrayError
from xvcomm.testing import World
from xvcomm.testing.arrays import arrays
from xvcomm.testing.cases import SMALL_GPU_RINGS
from xvcomm.testing.inside import context

pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install hip-python")

PACKAGE = '''
"""Devices of Acme, whose runtime and collective library have HIP's and RCCL's shape."""

import ctypes
import os

from xvcomm.abc.device import Device
from xvcomm.backends.ccl.backend import GpuBackend
from xvcomm.memory.dlpack import Managed, capsule

EXT_DEV = 12


class AcmeBackend(GpuBackend):
    kind, native = "acme", "accl"
    dlpack_device = EXT_DEV

    def refusal(self):
        return None

    def device(self, config):
        device = super().device(config)
        return Plain(device) if os.environ.get("ACME_PLAIN") else device

    def runtime(self):
        from xvcomm.backends.rocm.runtime import HipRuntime

        class AcmeRuntime(HipRuntime):
            kind, visible = "acme", "ACME_DEVICES"

        return AcmeRuntime()

    def library(self, architecture):
        from xvcomm.backends.rocm.library import RcclLibrary

        class AcmeLibrary(RcclLibrary):
            name, debug_hint = "ACCL", "ACCL_LOG=1 tells more"

        return AcmeLibrary()


def _passed_on(name):
    return lambda self, *args, **keywords: getattr(self.device, name)(*args, **keywords)


class Plain(Device):
    """A device with what every one must have, and no more."""

    for _name in Device.__abstractmethods__:
        locals()[_name] = _passed_on(_name)

    def __init__(self, device):
        self.device = device


class Array:
    """Float32 elements in a device's memory, shown by DLPack alone."""

    def __init__(self, address, count, owner, index):
        self.address, self.count, self.owner, self.index = address, count, owner, index

    def __dlpack_device__(self):
        return EXT_DEV, self.index

    def __dlpack__(self, **_):
        self.extents, self.managed = (ctypes.c_int64 * 1)(self.count), Managed()
        tensor = self.managed.tensor
        tensor.data, tensor.device_type, tensor.device_id = self.address, EXT_DEV, self.index
        tensor.ndim, tensor.code, tensor.bits, tensor.lanes = 1, 2, 32, 1
        tensor.shape = ctypes.cast(self.extents, ctypes.POINTER(ctypes.c_int64))
        return capsule(self.managed)
'''
FILES = {
    "acme.py": PACKAGE,
    "acme-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n",
    "acme-1.0.dist-info/entry_points.txt": "[xvcomm.backends]\nacme = acme:AcmeBackend\n",
}


@pytest.fixture(scope="module")
def world(rocm_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two ranks with Acme's devices, which are one island, one ROCm rank and one host rank. On the first, compiled code
    enqueues nothing.
    """
    folder = tmp_path_factory.mktemp("acme")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    env = {"ROCM_PATH": str(rocm_path), "HIPHOST_DEVICES": "4", "PYTHONPATH": str(folder), **SMALL_GPU_RINGS}
    with World(devices="acme:2,rocm:1,host:1", env=[env | {"ACME_PLAIN": "1"}, env, env, env]) as ranks:
        yield ranks


class Own:
    """Arrays of Acme's on the ranks that have its devices, and of the others' kinds on theirs."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._arrays = comm, arrays(comm)

    def put(self, x: np.ndarray) -> Any:
        found = self._arrays.put(x)
        self._arrays.synchronize()
        if self._comm.device != "acme":
            return found
        import acme

        return acme.Array(found.address, x.size, found, self._comm.device_index)

    def get(self, x: Any) -> np.ndarray:
        return self._arrays.get(getattr(x, "owner", x))


def check_kinds(comm: Communicator) -> tuple[str, ...]:
    islands = [sorted(island.ranks) for island in comm.topology.islands]
    assert islands == [[0, 1], [2], [3]]
    assert isinstance(context(comm).device, SupportsEnqueuedEvents) == (comm.rank in (1, 2))
    return comm.devices


def check_collectives(comm: Communicator, count: int) -> None:
    """In place, repeated with the same shape, asynchronous, and with every root."""
    own, mine = Own(comm), np.arange(count, dtype=np.float32)
    for turn in range(4):
        x = own.put(mine + comm.rank + turn)
        comm.all_reduce(x)
        np.testing.assert_array_equal(own.get(x), comm.size * (mine + turn) + sum(range(comm.size)))
        x = own.put(mine + comm.rank)
        comm.all_reduce(x, "max", async_op=True).synchronize()
        np.testing.assert_array_equal(own.get(x), mine + comm.size - 1)
        y = own.put(mine * (comm.rank == turn))
        comm.broadcast(y, turn)
        np.testing.assert_array_equal(own.get(y), mine)


def check_messages(comm: Communicator, count: int) -> None:
    """From every rank to every other, blocking and asynchronous."""
    own, mine = Own(comm), np.arange(count, dtype=np.float32)
    for turn in range(1, comm.size):
        after, before = (comm.rank + turn) % comm.size, (comm.rank - turn) % comm.size
        x, y = own.put(mine * comm.rank), own.put(np.zeros_like(mine))
        sent = comm.isend(x, after, tag=turn)
        comm.recv(y, before, tag=turn)
        sent.synchronize()
        np.testing.assert_array_equal(own.get(y), mine * before)


def check_others_are_told(comm: Communicator) -> None:
    """A rank of another kind raises with the name of the array's vendor."""
    if comm.device != "acme":
        import acme

        with pytest.raises(ArrayError, match=f"lies in acme memory but this rank's device is {comm.device}"):
            comm.all_reduce(acme.Array(4096, 4, None, 0))


def test_ranks_use_the_requested_devices(world: World) -> None:
    assert world.run(check_kinds) == [("acme", "acme", "rocm", "host")] * 4


@pytest.mark.parametrize("count", [1, 70_001])
def test_collectives(world: World, count: int) -> None:
    world.run(check_collectives, count)


@pytest.mark.parametrize("count", [1, 70_001])
def test_messages(world: World, count: int) -> None:
    world.run(check_messages, count)


def test_errors_name_the_vendor(world: World) -> None:
    world.run(check_others_are_told)


def test_nothing_of_xvcomm_knows_the_vendor(root: Path) -> None:
    for folder in ("xvcomm", "backends", "adapters"):
        named = [path for path in (root / folder).rglob("*.py") if "acme" in path.read_text().lower()]
        assert not named
