"""RDMA devices of the fake provider, as the wire takes them: the ranks are networks of one process."""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from fabric import Fabric, FakeDevice
from numba import njit

from xvcomm.abc.cards import Keys, Loopback, QueueEnd
from xvcomm.errors import ResourceError
from xvcomm.types.subnets import SubnetPort
from xvcomm.wire import verbs
from xvcomm.wire.frames import BUFFER_BYTES, BUFFERS

_HALF = struct.Struct("q")


@njit(nogil=True)
def _offer(queue, count):
    return verbs.offer(verbs.queue_at(queue), count)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
def _nothing(queue: int, most: int, batch: int) -> int:
    """Of a completion queue that is polled, or armed."""
    return 0


def _address(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


class _Registered:
    """Memory that all fake devices reach.

    Attributes:
        closed: whether they do so no more.
    """

    scratch, closed = 0, False

    def __init__(self, fabric: Fabric, address: int, nbytes: int, iova: int = 0) -> None:
        self._fabric, self._key, self.address = fabric, fabric.register(address, nbytes, iova=iova), iova or address
        self.keys = [Keys(self._key, self._key)]

    def close(self, *, in_use: bool = False) -> None:
        """See `abc.cards.Registered`. Idempotent."""
        if not self.closed:
            self.closed = True
            self._fabric.deregister(self._key)


class _GpuMemory:
    """A GPU's memory that all fake devices reach: CUDA's by copies, and the stand-in's by a dma-buf that is a file."""

    def __init__(self, fabric: Fabric, device: Any, nbytes: int) -> None:
        self._fabric, self._device = fabric, device
        self._bytes = nbytes + (8 if device.needs_write else 0)
        self.address = device.nic_memory(self._bytes)
        self.scratch = self.address + nbytes if device.needs_write else 0
        self._descriptor = device.dma_buf(self.address, self._bytes)
        by_file = device.capabilities().kind == "rocm"
        file = Path(f"/proc/self/fd/{self._descriptor}") if by_file else None
        self._key = fabric.register(
            self.address, self._bytes, file, gpu=1 + device.index, needs_write=device.needs_write
        )
        self.keys = [Keys(self._key, self._key)]

    def close(self, *, in_use: bool = False) -> None:
        """See `abc.cards.Registered`."""
        self._fabric.deregister(self._key)
        os.close(self._descriptor)
        if not in_use:
            self._device.return_nic_memory(self.address, self._bytes)


class FakeCardPair:
    """A queue pair with a device of its own, so that two carriers' threads may use theirs at the same time."""

    device = there = 0
    hung = failed = False

    def __init__(self, fabric: Fabric, device: FakeDevice, inline: int, *, direct: bool) -> None:
        self._buffers = np.zeros((2, BUFFERS, BUFFER_BYTES), np.uint8)
        self._registered = _Registered(fabric, self._buffers.ctypes.data, self._buffers.nbytes)
        self.inbox, self.outbox = (half.ctypes.data for half in self._buffers)
        self.outbox_key, self.inline = self._registered.keys[0].local, inline
        completions = self._completions = device.queue(4 * BUFFERS)
        self.fake = device.pair(completions, 2 * BUFFERS, BUFFERS)
        self.fake.receive_into(self.inbox, self.outbox_key, BUFFER_BYTES, BUFFERS)
        self.number, self.queue, self.completions = self.fake.number, self.fake.address, completions.address
        self.fd, self.peer, self.closed = completions.fd, 0, False
        self._calls = completions.record.poll, completions.record.notify
        self.loopback = Loopback(*self._join_with_itself(fabric, device)) if direct else Loopback()
        self.description = _HALF.pack(self.number)
        self.where = f"fake queue pair {self.number}"

    def _join_with_itself(self, fabric: Fabric, device: FakeDevice) -> tuple[int, int, int, int]:
        self._word, completions = np.zeros(1, np.int64), device.queue(16)
        self._of_word = _Registered(fabric, self._word.ctypes.data, self._word.nbytes)
        self.mirror = device.pair(completions)
        self.mirror.connect(self.mirror.number)
        return self.mirror.address, completions.address, self._word.ctypes.data, self._of_word.keys[0].local

    def connect(self, theirs: bytes) -> None:
        """See `abc.cards.Pair`."""
        (self.peer,) = _HALF.unpack(theirs)
        self.fake.connect(self.peer)
        assert _offer(self.queue, BUFFERS) == 0

    def fail(self) -> None:
        """See `abc.cards.Pair`."""
        self.failed = True
        if not self.hung:
            self.fake.fail()

    def hang(self) -> None:
        """Let the device answer nothing any more."""
        self.hung, record = True, self._completions.record
        record.poll = record.notify = _address(_nothing)

    def answer(self) -> None:
        """Let it answer again, also what it was asked meanwhile."""
        self.hung, record = False, self._completions.record
        record.poll, record.notify = self._calls
        if self.failed:
            self.fake.fail()

    def failure(self) -> str:
        """See `abc.cards.Pair`."""
        return self.fake.failure() or (self.loopback.loopback and self.mirror.failure()) or ""

    def close(self) -> None:
        """See `abc.cards.Pair`."""
        if not self.closed:
            self.closed = True
            if self.loopback.loopback:
                self.mirror.close()
                self._of_word.close()
            self.fake.close()
            self._registered.close()


class FakeCards:
    """Devices of one network.

    Attributes:
        fabric: between them.
        pairs: all that were made.
        lost: what `watch` was given, to report failures by.
        gpu: whose memory they reach, if any.
        rings: how many lie in it, as producers' and as consumers' ends.
    """

    def __init__(
        self, library: Path, shared: Path, seed: int = 0, delay: int = 0, inline: int = 64, gpu: Any = None,
        reads: bool = True, writes: bool = True,
    ) -> None:  # fmt: skip
        self.gpu, self.rings, self._works = gpu, [0, 0], (writes, reads)
        self.fabric, self._seed, self._delay, self._inline = Fabric(library, shared), seed, delay, inline
        self.pairs: list[FakeCardPair] = []
        self.refusal = ""
        self.lost: Any = None

    def reaches(self, address: str) -> bool:
        """See `abc.cards.Cards`."""
        return True

    def ports(self) -> list[SubnetPort]:
        """See `abc.cards.Cards`."""
        return []

    def end(self, address: str) -> QueueEnd:
        """See `abc.cards.Cards`."""
        return QueueEnd(f"fake{self._seed}", 1, address)

    def register(self, address: int, nbytes: int, iova: int = 0) -> _Registered:
        """See `abc.cards.Cards`."""
        return _Registered(self.fabric, address, nbytes, iova)

    @property
    def has_direct(self) -> bool:
        """See `abc.cards.Cards`."""
        return self.gpu is not None

    def direct(self, nbytes: int, *, producer: bool) -> _GpuMemory | None:
        """See `abc.cards.Cards`."""
        if self.gpu is None or not self._works[producer]:
            return None
        self.rings[producer] += 1
        return _GpuMemory(self.fabric, self.gpu, nbytes)

    def pair(self, address: str) -> FakeCardPair:
        """See `abc.cards.Cards`."""
        if self.refusal:
            raise ResourceError(self.refusal)
        device = self.fabric.device(self._seed + len(self.pairs), self._delay)
        self.pairs.append(FakeCardPair(self.fabric, device, self._inline, direct=self.has_direct))
        return self.pairs[-1]

    def watch(self, add: Any, lost: Any) -> None:
        """See `abc.cards.Cards`."""
        self.lost, self.loop = lost, asyncio.get_running_loop()

    def report(self, what: str, pairs: list[FakeCardPair]) -> None:
        """Let a device report that queue pairs are of no use any more. Any thread."""
        self.loop.call_soon_threadsafe(self.lost, what, pairs)

    def close(self) -> None:
        """Close the devices; the queue pairs must be closed."""
        assert all(pair.closed for pair in self.pairs)
        self.fabric.__exit__(None, None, None)
