"""A network of verbs in memory, for tests: devices, completion queues and queue pairs of the fake provider beside this module.

Their structures lie in memory as libibverbs' do, so that `xvcomm.wire.verbs` works on them as on real ones.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

from xvcomm.backends.rdma.events import NAMES, Events
from xvcomm.backends.rdma.queues import CompletionQueue, PostedQueue

SOURCES = Path(__file__).resolve().parent
FLAGS = (
    "-std=gnu11",
    "-O2",
    "-g",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fno-strict-aliasing",
    "-fPIC",
    "-shared",
    "-pthread",
)
NAME = "fake0"
RESET, ERROR = 0, 6
STATUS, DROP, REFUSE = 0, 1, 2
"""Faults of a request: it ends with a status, its completion is lost, it is refused when it is posted."""


class NoCompiler(Exception):
    """There is no gcc on this machine."""


def build(folder: Path) -> Path:
    """Compile the provider into a folder, in a second.

    Raises:
        NoCompiler: no compiler; says how to install one.
    """
    compiler = shutil.which(os.environ.get("CC") or "gcc")
    if not compiler:
        raise NoCompiler("gcc compiles the fake provider: apt-get install gcc libc6-dev, or set CC")
    library = folder / "libfakeverbs.so"
    files = [str(SOURCES / name) for name in ("provider.c", "fabric.c")]
    subprocess.run([compiler, *FLAGS, *files, "-o", str(library)], check=True)
    return library


def _load(library: Path) -> Any:
    found = ctypes.CDLL(str(library), use_errno=True)
    pointer, word, half, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int
    for name, result, arguments in (
        ("fabric_open", pointer, [ctypes.c_char_p]),
        ("fabric_close", None, [pointer]),
        ("fabric_register", half, [pointer, word, word, word, ctypes.c_char_p, word, half, half]),
        ("fabric_deregister", None, [pointer, half]),
        ("fabric_use_cuda", number, [pointer]),
        ("fake_open", pointer, [pointer, word, word]),
        ("fake_close", None, [pointer]),
        ("fake_create_cq", pointer, [pointer, number]),
        ("fake_destroy_cq", number, [pointer]),
        ("fake_create_qp", pointer, [pointer, pointer, word, word]),
        ("fake_connect", None, [pointer, half]),
        ("fake_leave", None, [pointer, half]),
        ("fake_destroy_qp", number, [pointer]),
        ("fake_report", None, [pointer, half, number]),
        ("fake_report_qp", None, [pointer, half]),
        ("fake_report_cq", None, [pointer]),
        ("fake_remove", None, [pointer]),
        ("fake_get_async_event", number, [pointer, pointer]),
        ("fake_ack_async_event", None, [pointer]),
        ("fake_cut", None, [pointer]),
        ("fake_set_late", None, [pointer]),
        ("fake_set_fault", None, [pointer, number, word, half]),
        ("fake_pass", None, [pointer, word]),
    ):
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


class Fabric:
    """What some processes have in common: a file in shared memory, with the pairs by number and the memory by key.

    Leaving its block closes it, with the devices that it has opened.
    """

    def __init__(self, library: Path, shared: Path) -> None:
        """Open the fabric of a file, which is made if it is not there."""
        self.calls = _load(library)
        self._fabric = self.calls.fabric_open(os.fsencode(shared))
        assert self._fabric, shared
        self._devices: list[FakeDevice] = []

    def device(self, seed: int = 0, delay: int = 0) -> FakeDevice:
        """Open a device.

        Args:
            seed: of the order in which things happen.
            delay: most ticks until a request is carried out, and again until its completion comes.
        """
        self._devices.append(FakeDevice(self.calls, self.calls.fake_open(self._fabric, seed, delay)))
        return self._devices[-1]

    def register(
        self, address: int, nbytes: int, file: Path | None = None, offset: int = 0, *, iova: int = 0, gpu: int = 0,
        needs_write: bool = False,
    ) -> int:  # fmt: skip
        """Permit that memory is sent and written; its key, most often the one that was given back last.

        Args:
            address, nbytes: of the memory.
            file: in shared memory, whose mapping it is, if other processes write to it.
            offset: in the file.
            iova: by which requests find its first byte; 0: by `address`.
            gpu: number of its GPU, from 1 on; 0: host memory. What a device has written there is seen only after a READ by the
                same device, over a pair that is joined with itself.
            needs_write: it is seen only after a WRITE over such a pair, and a READ behind that.
        """
        path = os.fsencode(file or "")
        key = self.calls.fabric_register(self._fabric, address, nbytes, iova or address, path, offset, gpu, needs_write)
        assert key, "the fabric has no room for more regions"
        return int(key)

    def use_cuda(self, context: int) -> None:
        """Copy by CUDA, in a context, because regions are in a GPU's memory."""
        assert self.calls.fabric_use_cuda(context) == 0, "libcuda.so.1 does not load"

    def deregister(self, key: int) -> None:
        """Permit it no more."""
        self.calls.fabric_deregister(self._fabric, key)

    def __enter__(self) -> Fabric:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for device in self._devices:
            device.close()
        self.calls.fabric_close(self._fabric)


class FakeDevice:
    """A device, used by one thread at a time.

    Attributes:
        address: of its struct ibv_context.
    """

    def __init__(self, calls: Any, address: int) -> None:
        self.calls, self.address = calls, address
        self._queues: list[FakeQueue] = []
        self.pairs: list[FakePair] = []

    def queue(self, entries: int = 256) -> FakeQueue:
        """Make a completion queue."""
        self._queues.append(FakeQueue(self.calls, self.calls.fake_create_cq(self.address, entries)))
        return self._queues[-1]

    def pair(self, completions: FakeQueue, depth: int = 16, receives: int = 16) -> FakePair:
        """Make a queue pair, with room for so many requests and receives."""
        made = self.calls.fake_create_qp(self.address, completions.record.queue, depth + 1, receives)
        assert made, "the device has no more queue pairs"
        return FakePair(self, completions, made, depth)

    def let_pass(self, ticks: int) -> None:
        """Let time pass."""
        self.calls.fake_pass(self.address, ticks)

    def events(self) -> Events:
        """What reads its events."""
        return Events(NAME, self.address, self.calls.fake_get_async_event, self.calls.fake_ack_async_event)

    def report(self, name: str, port: int = 0) -> None:
        """Let it report an event of itself, or of a port."""
        self.calls.fake_report(self.address, NAMES.index(name), port)

    def remove(self) -> None:
        """Let it be removed: it reports nothing any more."""
        self.calls.fake_remove(self.address)

    def close(self) -> None:
        """Close all that belongs to it."""
        for pair in list(self.pairs):
            pair.close()
        owed = [self.calls.fake_destroy_cq(queue.record.queue) for queue in self._queues]
        self.calls.fake_close(self.address)
        assert not any(owed), "events of completion queues were not acknowledged"


class FakeQueue(CompletionQueue):
    """A completion queue."""

    def __init__(self, calls: Any, address: int) -> None:
        names = ("fake_get_cq_event", "fake_ack_cq_events")
        get, ack = (ctypes.cast(getattr(calls, name), ctypes.c_void_p).value or 0 for name in names)
        super().__init__(address, get, ack, batch=16)
        self._calls = calls

    def report(self) -> None:
        """Let its device report that it has overflowed: CQ_ERR."""
        self._calls.fake_report_cq(self.record.queue)


class FakePair(PostedQueue):
    """A queue pair.

    Attributes:
        number: by which others know it.
    """

    def __init__(self, device: FakeDevice, completions: FakeQueue, address: int, depth: int) -> None:
        super().__init__(address, depth)
        self._device, self._completions, self._pair = device, completions, address
        self.number = int(self.record.number)
        completions.add(self)
        device.pairs.append(self)

    def connect(self, peer: int) -> None:
        """Join it with the pair of a number."""
        self._device.calls.fake_connect(self._pair, peer)

    def fail(self) -> None:
        """Let all that is posted end with WR_FLUSH_ERR, but for receives of what has come before."""
        self._device.calls.fake_leave(self._pair, ERROR)

    def reset(self) -> None:
        """Forget all that is posted."""
        self._device.calls.fake_leave(self._pair, RESET)

    def cut(self) -> None:
        """Let nothing through any more, in either direction."""
        self._device.calls.fake_cut(self._pair)

    def be_late(self) -> None:
        """Let what is under way at `fail` and `reset` arrive nevertheless, afterwards."""
        self._device.calls.fake_set_late(self._pair)

    def let_pass(self, ticks: int) -> None:
        """Let time pass for its device."""
        self._device.let_pass(ticks)

    def fault(self, fault: int, request: int, status: int = 0) -> None:
        """Let something happen to the request of a number, counted from 1: STATUS, DROP or REFUSE."""
        self._device.calls.fake_set_fault(self._pair, fault, request, status)

    def report(self, name: str) -> None:
        """Let the device report an event of this pair."""
        self._device.calls.fake_report_qp(self._pair, NAMES.index(name))

    def close(self) -> None:
        """Give it back."""
        self._completions.remove(self)
        self._device.pairs.remove(self)
        owed = self._device.calls.fake_destroy_qp(self._pair)
        assert not owed, "events of the queue pair were not acknowledged"
