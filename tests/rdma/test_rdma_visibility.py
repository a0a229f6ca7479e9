"""What the GPU sees of what a device has written, over the fake provider, which keeps it back as PCIe may do."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from errno import ETIMEDOUT
from pathlib import Path
from typing import Any

import driver
import numpy as np
import pytest
from fabric import DROP, Fabric, FakeDevice

SLOT = 64


class Card:
    """A device with a queue pair that others are joined with, and one that is joined with itself."""

    def __init__(self, fabric: Fabric) -> None:
        self.device: FakeDevice = fabric.device()
        self.pair, self.completions = self.device.pair(self.device.queue()), self.device.queue()
        self.mirror = self.device.pair(self.completions)
        self.mirror.connect(self.mirror.number)
        self.word = np.zeros(1, np.int64)
        self.key = fabric.register(self.word.ctypes.data, 8)

    def reach(self, memory: Gpu, *, scratch: bool) -> bool:
        """Let the GPU see what this device has written."""
        ends = self.mirror.address, self.completions.address, self.word.ctypes.data, self.key
        address = memory.slots.ctypes.data
        return bool(driver.reach(*ends, address, memory.key, address + memory.slots.nbytes - 8 if scratch else 0))


class Gpu:
    """Two slots of a ring in a GPU's memory, and a word behind them."""

    def __init__(self, fabric: Fabric, *, needs_write: bool) -> None:
        self.slots = np.zeros(2 * SLOT + 8, np.uint8)
        self.key = fabric.register(self.slots.ctypes.data, self.slots.nbytes, gpu=1, needs_write=needs_write)

    def seen(self) -> list[int]:
        """The first byte of each slot."""
        return [int(self.slots[place]) for place in (0, SLOT)]


class Host:
    """Two devices, and a peer of each at the other host, which writes to this one's GPU."""

    def __init__(self, fabric: Fabric) -> None:
        self.cards, self._peers = [Card(fabric) for _ in range(2)], [Card(fabric) for _ in range(2)]
        for card, peer in zip(self.cards, self._peers, strict=True):
            card.pair.connect(peer.pair.number)
            peer.pair.connect(card.pair.number)
        self._bytes = np.zeros(SLOT, np.uint8)
        self._key = fabric.register(self._bytes.ctypes.data, SLOT)
        self.gpu: Callable[[bool], Gpu] = lambda needs_write: Gpu(fabric, needs_write=needs_write)

    def receive(self, memory: Gpu, card: int, slot: int, value: int) -> None:
        """Let a device write a slot."""
        peer = self._peers[card]
        self._bytes[:] = value
        job = np.zeros(1, driver.JOB)
        job[0] = self._bytes.ctypes.data, self._key, memory.slots.ctypes.data + slot * SLOT, memory.key, SLOT
        here, there = peer.word.ctypes.data, self.cards[card]
        assert driver.send_chain(peer.pair.address, job.ctypes.data, 1, here, there.word.ctypes.data, there.key) == 1
        peer.device.let_pass(10)


@pytest.fixture
def host(fake_verbs: Path, fresh: Any) -> Iterator[Host]:
    with Fabric(fake_verbs, fresh()) as fabric:
        yield Host(fabric)


@pytest.mark.parametrize("needs_write", [False, True])
def test_only_the_device_that_has_written_makes_it_visible(host: Host, needs_write: bool) -> None:
    memory = host.gpu(needs_write)
    host.receive(memory, 0, 0, 7)
    host.receive(memory, 1, 1, 8)
    assert memory.seen() == [0, 0]
    assert host.cards[1].reach(memory, scratch=needs_write)
    assert memory.seen() == [0, 8]
    assert host.cards[0].reach(memory, scratch=needs_write)
    assert memory.seen() == [7, 8]


def test_a_gpu_that_needs_a_write(host: Host) -> None:
    """Payloads that follow do not take its place."""
    memory = host.gpu(True)
    host.receive(memory, 0, 0, 7)
    host.receive(memory, 0, 1, 8)
    assert host.cards[0].reach(memory, scratch=False)
    assert memory.seen() == [0, 0]
    assert host.cards[0].reach(memory, scratch=True)
    assert memory.seen() == [7, 8]


def test_what_was_overwritten_does_not_come_back(host: Host) -> None:
    """A slot that came over both devices, the second time with a later message."""
    memory = host.gpu(False)
    host.receive(memory, 0, 0, 7)
    host.receive(memory, 1, 0, 9)
    for card in reversed(host.cards):
        assert card.reach(memory, scratch=False)
        assert memory.seen() == [9, 0]


def test_a_device_that_does_not_answer_leaves_the_processor_to_others(host: Host) -> None:
    """It is given up after a second, in which whatever else is to run on the core may do so: Soft-RoCE, for one."""
    memory, card = host.gpu(False), host.cards[0]
    assert card.reach(memory, scratch=False)  # compiled
    card.mirror.fault(DROP, int(card.mirror.record.posted) + 1)
    before = resource.getrusage(resource.RUSAGE_THREAD)
    assert not card.reach(memory, scratch=False)
    after = resource.getrusage(resource.RUSAGE_THREAD)
    assert card.mirror.record.error == ETIMEDOUT
    assert after.ru_stime - before.ru_stime > 0.1 * (after.ru_utime - before.ru_utime)  # in the kernel: it yields
