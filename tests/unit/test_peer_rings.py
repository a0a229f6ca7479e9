"""Ring slots in GPU memory: who exports them, who maps them, and when the memory may be reused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest

from xvcomm.abc.device import RingStopped
from xvcomm.abc.peer_memory import PeerMemory, SupportsPeerMemory
from xvcomm.abc.transport import Capabilities
from xvcomm.backends.gpu.peer_memory import PeerPool, apart, reached
from xvcomm.backends.gpu.vendor import Runtime, VendorError
from xvcomm.backends.shm import ShmTransport
from xvcomm.config import Config
from xvcomm.engine.session.peer_rings import PeerRings
from xvcomm.engine.session.rings import Member, Rings, Use
from xvcomm.errors import DeadlineExceeded, ResourceError
from xvcomm.memory.ring import ABORT, CONSUMED, IMPORTER, TURNS, Reason, RingEnd, RingLayout
from xvcomm.memory.segment import Segment, sweep
from xvcomm.rendezvous.store.memory import MemoryStore
from xvcomm.types.deadline import NEVER, Deadline

WORD = 8
MEMORY = PeerMemory("counting", "here", "bus 0", ("bus 0",))
JOB = "exporting"
SOON = 60.0


class CountingRuntime:
    """Three devices, the last of which has no peer access; memory is a growing number."""

    kind, visible = "counting", "COUNTING_DEVICES"

    def __init__(self) -> None:
        self.made: list[int] = []
        self.opened: list[int] = []
        self.fails = False

    def count(self) -> int:
        return 3

    def bus(self, index: int) -> str:
        return f"bus {index}"

    def reaches(self, index: int, other: int) -> bool:
        if other == 2:
            raise VendorError("reaches", 1, "unknown", "")
        return index != 2

    def shareable(self, nbytes: int) -> int:
        self._fail()
        self.made.append((len(self.made) + 1) << 20)
        return self.made[-1]

    def export(self, address: int) -> bytes:
        return b"%d" % address

    def open(self, handle: bytes) -> int:
        self._fail()
        self.opened.append(int(handle) + 1)
        return self.opened[-1]

    def close(self, address: int) -> None:
        self.opened.remove(address)

    def _fail(self) -> None:
        if self.fails:
            raise VendorError("counting", 2, "outOfMemory", "no more")


class Pair:
    """Both ends of rings between two ranks of an island, in one process."""

    def __init__(self) -> None:
        self.runtimes = [CountingRuntime(), CountingRuntime()]
        self.pools = [PeerPool(cast(Runtime, runtime)) for runtime in self.runtimes]
        self.gone: set[int] = set()
        self.peer_rings = [PeerRings(cast(SupportsPeerMemory, pool), self.gone.__contains__) for pool in self.pools]
        self.renew()

    def _rings(self, rank: int) -> Rings:
        members = [
            Member(10 + n, [Capabilities("shm", "here", 0, shared=True)], "counting", "a", MEMORY) for n in range(2)
        ]
        transport = ShmTransport(Config(), "here")
        return Rings(Config(), JOB, 1, self.store, rank, [transport], self.peer_rings[rank], members)

    def renew(self) -> None:
        """Another communicator of the same ranks."""
        self.store = MemoryStore()
        self.rings = [self._rings(rank) for rank in range(2)]

    def end(self, rank: int, *, producer: bool, deadline: Deadline = NEVER) -> RingEnd:
        return self.rings[rank].end(1 - rank, Use.POINT_TO_POINT, deadline, producer=producer)

    def close(self) -> None:
        for links in self.rings:
            links.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Removes the names of rings that only one end has opened afterwards, as a session does."""
    yield Pair()
    sweep(Config().shm_dir, JOB)


def write(ring: Segment, offset: int, value: int) -> None:
    ring.view[offset : offset + WORD] = value.to_bytes(WORD, sys.byteorder, signed=True)


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_end_exports_and_the_second_maps(pair: Pair, first: int) -> None:
    """In either order of producer and consumer, without blocking."""
    exporter = pair.end(first, producer=first == 0)
    importer = pair.end(1 - first, producer=first != 0)
    assert exporter.made and not importer.made
    assert exporter.layout == importer.layout == RingLayout(16, 4, 256 << 10, apart=True)
    assert (exporter.slots, importer.slots) == (1 << 20, (1 << 20) + 1)
    assert [len(runtime.made) for runtime in pair.runtimes] == [1 - first, first]
    pair.close()
    assert not pair.runtimes[0].opened + pair.runtimes[1].opened


def test_memory_is_exported_again_when_the_other_end_is_closed(pair: Pair) -> None:
    for rank in (0, 1):
        pair.end(rank, producer=rank == 0)
    pair.rings[0].close()
    old = pair.rings[1]
    pair.renew()
    assert pair.end(0, producer=True).slots == 2 << 20  # the other one is still mapped
    old.close()
    pair.rings[0].close()
    pair.renew()
    assert {pair.end(0, producer=producer).slots for producer in (True, False)} == {1 << 20, 2 << 20}
    pair.close()
    assert len(pair.runtimes[0].made) == 2


def test_memory_is_exported_again_if_it_was_never_imported(pair: Pair) -> None:
    """An end that comes later learns that the other one has closed, and maps nothing."""
    word = Reason.LEFT.word(0)
    pair.end(0, producer=True)
    pair.rings[0].abort(word)
    pair.rings[0].close()
    with pytest.raises(RingStopped) as stopped:
        pair.end(1, producer=False)
    assert stopped.value.word == word and stopped.value.end.peer == 0
    assert not pair.runtimes[1].opened
    pair.renew()
    assert pair.end(0, producer=True).slots == 1 << 20
    pair.close()


def test_memory_is_exported_again_when_the_importer_is_dead(pair: Pair) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    write(pair.end(0, producer=True)._segment, IMPORTER, child.pid)
    pair.rings[0].close()
    pair.renew()
    assert pair.end(0, producer=True).slots == 1 << 20
    pair.close()


@pytest.mark.parametrize("stuck", [0, 1])
def test_memory_that_a_kernel_may_use_is_not_reused(pair: Pair, stuck: int) -> None:
    """Kernels of the exporter, or of the importer, which keeps it mapped."""
    ends = [pair.end(rank, producer=rank == 0) for rank in (0, 1)]
    ends[stuck].stuck = True
    pair.rings[1].close()
    pair.rings[0].close()
    assert len(pair.runtimes[1].opened) == stuck
    pair.renew()
    assert pair.end(0, producer=True).slots == 2 << 20
    pair.close()


def test_without_memory_says_what_to_do(pair: Pair) -> None:
    """It leaves neither an end nor a file behind."""
    pair.runtimes[0].fails = True
    with pytest.raises(ResourceError, match=r"outOfMemory.*16777216 bytes.*_RING_SLOTS.*XVCOMM_PEER_MEMORY=0"):
        pair.end(0, producer=True)
    with pytest.raises(DeadlineExceeded):
        pair.end(1, producer=False, deadline=Deadline.after(0.01))
    pair.renew()
    pair.runtimes[0].fails, pair.runtimes[1].fails = False, True
    pair.end(0, producer=True)
    with pytest.raises(ResourceError, match="cannot be mapped; set XVCOMM_PEER_MEMORY=0"):
        pair.end(1, producer=False)
    assert not pair.rings[1].ends()
    pair.close()
    pair.renew()
    assert pair.end(0, producer=True).slots == 1 << 20
    pair.close()


@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize("ends", ["received", "closed", "aborted", "gone"])
def test_sent_messages_are_kept_until_they_are_received(pair: Pair, imported: bool, ends: str) -> None:
    """Or can no longer be. At the end of the job the process waits for it."""
    end = pair.end(0, producer=True)
    ring = Segment.attach(Config().shm_dir, end._segment.name)
    write(ring, TURNS, 3)
    if imported:
        write(ring, IMPORTER, os.getpid())
    pair.rings[0].close()
    pair.renew()
    assert pair.end(0, producer=True).slots == 2 << 20
    waiting = threading.Thread(target=pair.peer_rings[0].linger)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    if ends == "gone":
        pair.gone.add(11)
    else:
        offset, value = {
            "received": (CONSUMED, 3),
            "closed": (IMPORTER, -1),
            "aborted": (ABORT, Reason.ABORTED.word(0)),
        }[ends]
        write(ring, offset, value)
    begun = time.monotonic()
    waiting.join()
    assert time.monotonic() - begun < SOON
    write(ring, IMPORTER, -1)
    pair.rings[0].close()
    pair.renew()
    assert {pair.end(0, producer=producer).slots for producer in (True, False)} == {1 << 20, 2 << 20}
    pair.close()
    ring.close()


def test_peer_access_of_a_device() -> None:
    """To itself and to others; unknown devices are not accessible."""
    runtime = cast(Runtime, CountingRuntime())
    first, last = reached(runtime, 0, True), reached(runtime, 2, True)
    assert (first.device, first.reaches) == ("bus 0", ("bus 0", "bus 1"))
    assert (last.device, last.reaches) == ("bus 2", ("bus 2",))
    assert first.processes == last.processes and first.runtime == "counting" and not first.refused
    assert reached(runtime, 0, False) == replace(first, refused="XVCOMM_PEER_MEMORY=0")
    assert apart(runtime) == [(0, 2), (1, 2)]
