"""Tries whether an RDMA device reaches the memory of a GPU.

That memory can be registered proves nothing: on some systems what a device writes there then lands elsewhere. So the device is
tried in both directions: it writes a pattern that the GPU must read, and reads one that the GPU has written; then its speed is
compared with host memory's.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from xvcomm.abc.cards import Keys
from xvcomm.abc.device import Device
from xvcomm.abc.nic_memory import SupportsNicMemory
from xvcomm.backends.rdma.devices import Gid, Port
from xvcomm.backends.rdma.pairs import Domain
from xvcomm.backends.rdma.plain import write_all
from xvcomm.backends.rdma.selfpair import SelfPair
from xvcomm.backends.rdma.slots import DirectSlots
from xvcomm.errors import ResourceError, XvcommError
from xvcomm.jit.compile import compiling, kernel
from xvcomm.types.deadline import Deadline
from xvcomm.wire.verbs import completions_at, queue_at
from xvcomm.wire.visibility import reach

GRADES = ("memory", "exported", "registered", "bytes", "direct")
"""How far a trial came: memory was allocated; the driver has given a dma-buf; a device has registered the memory, perhaps
without; the bytes were right; the speed is, too."""
_MEMORY, _EXPORTED, _REGISTERED, _RIGHT, DIRECT = GRADES
WRITES, READS = "writes", "reads"
"""What a device does with the GPU's memory."""

_BYTES = 1 << 20
_ROUNDS, _TIMES = 4, 5
_LEAST_SPEED = 0.25
"""Of the speed with host memory, below which that serves better."""
_SECONDS, _LONGEST_NS = 30.0, 5_000_000_000


@dataclass(frozen=True, slots=True)
class Trial:
    """How far a device came with the GPU's memory in one direction.

    Attributes:
        device: name of the RDMA device.
        direction: WRITES or READS.
        grade: the last of GRADES that was reached; empty if none.
        reason: why no further; of the last grade how the memory was registered, and how fast it is.
    """

    device: str
    direction: str
    grade: str
    reason: str


def try_export(device: SupportsNicMemory) -> tuple[str, str]:
    """The grade that the device's driver reaches without any RDMA device, and why no further."""
    try:
        address = device.nic_memory(_BYTES)
    except XvcommError as error:
        return "", str(error)
    try:
        os.close(device.dma_buf(address, _BYTES))
    except XvcommError as error:
        return _MEMORY, str(error)
    finally:
        device.return_nic_memory(address, _BYTES)
    return _EXPORTED, "no RDMA device has registered it"


def try_device(device: Device, domain: Domain, way: tuple[Port, Gid] | None, options: Mapping[str, Any]) -> list[Trial]:
    """Try one device in both directions."""
    assert isinstance(device, SupportsNicMemory)
    grade, _ = try_export(device)
    try:
        if way is None:
            raise ResourceError("it has no active port")
        with contextlib.ExitStack() as cleanup:
            slots = DirectSlots(device, [domain], _BYTES)
            cleanup.callback(slots.close)
            grade = _REGISTERED
            pair = SelfPair(domain, *way, options)
            cleanup.callback(pair.close)
            stage = _Stage(device, domain, pair, slots)
            cleanup.callback(stage.close)
            return [stage.judge(direction) for direction in (WRITES, READS)]
    except XvcommError as error:
        return [Trial(domain.name, direction, grade, str(error)) for direction in (WRITES, READS)]


class _Stage:
    """Registered host memory, and the GPU's, between which a device copies."""

    def __init__(self, device: Device, domain: Domain, pair: SelfPair, slots: DirectSlots) -> None:
        self._device, self._domain, self._pair, self._slots = device, domain, pair, slots
        (self._stream,) = device.streams(1)
        self._stream.deadline = Deadline.after(_SECONDS)
        self._host = np.zeros((2, _BYTES), np.uint8)
        self._region = domain.register(self._host.ctypes.data, self._host.nbytes)
        self._ours, self._theirs = (
            (half.ctypes.data, Keys(self._region.lkey, self._region.rkey)) for half in self._host
        )
        self._gpu = slots.address, slots.keys[0]

    def judge(self, direction: str) -> Trial:
        """Try one direction, once memory is registered."""
        name, grade = self._domain.name, _REGISTERED
        try:
            if before := self._pair.failure():
                raise ResourceError(f"the other direction has failed: {before}")
            {WRITES: self._try_writes, READS: self._try_reads}[direction]()
            grade = _RIGHT
            between = self._speed(self._ours, self._theirs)
            ends = (self._ours, self._gpu) if direction == WRITES else (self._gpu, self._ours)
            speed = self._speed(*ends)
        except XvcommError as error:
            return Trial(name, direction, grade, str(error))
        rate = f"{speed / 1e9:.2f} GB/s, host memory {between / 1e9:.2f}"
        if speed < _LEAST_SPEED * between:
            return Trial(name, direction, grade, f"it is slow: {rate}")
        return Trial(name, direction, DIRECT, f"registered {self._slots.how[0]}; {rate}")

    def _try_writes(self) -> None:
        """Let the device write a pattern, and the GPU read it."""
        pattern = np.random.default_rng().integers(0, 256, _BYTES, np.uint8)
        self._host[0], self._host[1] = pattern, ~pattern
        self._copy(self._gpu[0], self._theirs[0])  # what is there before is wrong in every byte
        self._write(self._ours, self._gpu, 1)
        records, slots = self._pair.records, self._slots
        if not _reach(*records, slots.address, slots.keys[0].remote, slots.scratch):
            raise ResourceError(self._pair.failure() or "the device does not answer")
        self._copy(self._theirs[0], self._gpu[0])
        if not np.array_equal(self._host[1], pattern):
            raise ResourceError("the GPU does not see what the device has written")

    def _try_reads(self) -> None:
        """Let the GPU write a pattern, and the device read it."""
        pattern = np.random.default_rng().integers(0, 256, _BYTES, np.uint8)
        self._host[0], self._host[1] = pattern, ~pattern
        self._copy(self._gpu[0], self._ours[0])
        self._write(self._gpu, self._theirs, 1)
        if not np.array_equal(self._host[1], pattern):
            raise ResourceError("the device does not read what the GPU has written")

    def _copy(self, dst: int, src: int) -> None:
        self._device.copy(dst, src, _BYTES, self._stream)
        self._stream.synchronize()

    def _write(self, source: tuple[int, Keys], target: tuple[int, Keys], count: int) -> None:
        records = self._pair.records
        ends = source[0], source[1].local, target[0], target[1].remote
        if not write_all(records.loopback, records.loopback_completions, *ends, _BYTES, count, _LONGEST_NS):
            raise ResourceError(self._pair.failure() or "the device does not answer")

    def _speed(self, source: tuple[int, Keys], target: tuple[int, Keys]) -> float:
        """Bytes a second; of several times the best, because ranks of one host try at the same time."""
        best = math.inf
        for _ in range(_TIMES):
            begun = time.perf_counter()
            self._write(source, target, _ROUNDS)
            best = min(best, time.perf_counter() - begun)
        return _ROUNDS * _BYTES / best

    def close(self) -> None:
        """Give the host memory back."""
        self._domain.release(self._region)


def _reach_once(
    loopback: int, completions: int, word: int, key: int, there: int, there_key: int, scratch: int
) -> int:  # fmt: skip
    found = reach(queue_at(loopback), completions_at(completions), word, key, there, there_key, scratch)
    return 1 if found else 0


with compiling():
    _reach = kernel("int64(int64, int64, int64, int64, int64, int64, int64)")(_reach_once)
