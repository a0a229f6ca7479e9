"""The compiled hot path over the fake provider: any order of events and any fault ends in right bytes or a named status."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import driver
import numpy as np
import pytest
from fabric import DROP, REFUSE, STATUS, Fabric, FakeDevice, FakePair, FakeQueue
from hypothesis import given, settings
from hypothesis import strategies as st

from xvcomm.backends.rdma import layout
from xvcomm.backends.rdma.queues import STATUSES
from xvcomm.errors import BackendUnavailable
from xvcomm.wire.verbs import FLUSHED

TURNS = 100_000
NAMES = {"drop": DROP, "refuse": REFUSE, "status": STATUS}


@dataclass
class Way:
    """A queue pair that sends, its peer, the memory at both ends, and what was sent."""

    pair: FakePair
    peer: FakePair
    source: np.ndarray[Any, Any]
    target: np.ndarray[Any, Any]
    words: np.ndarray[Any, Any]
    """The counter as it is sent, and as it arrives."""
    keys: tuple[int, int, int]
    """Of source, target and words."""
    used: int = 0
    chains: list[tuple[int, int]] = field(default_factory=list)
    """Of each posted chain the number of its last request, and where its bytes end."""

    def send(self, sizes: list[int]) -> int:
        """Post a chain of WRITEs of these sizes, one behind the other, and its counter; see `driver.send_chain`."""
        jobs = np.zeros(max(1, len(sizes)), driver.JOB)
        at = self.used
        for i, nbytes in enumerate(sizes):
            here, there = self.source.ctypes.data + at, self.target.ctypes.data + at
            jobs[i] = (here, self.keys[0], there, self.keys[1], nbytes)
            at += nbytes
        counter = self.words.ctypes.data
        posted = driver.send_chain(self.pair.address, jobs.ctypes.data, len(sizes), counter, counter + 8, self.keys[2])
        if posted == 1:
            self.used = at
            self.chains.append((self.pair.record.posted, at))
        return int(posted)

    def check(self) -> None:
        """What must hold at any time: all of a chain is there once its counter is, or once it is written; nothing else is."""
        arrived = int(self.words[1])
        assert arrived <= int(self.words[0])
        there = max((end for _, end in self.chains[:arrived]), default=0)
        there = max([there, *(end for last, end in self.chains if last <= self.pair.record.written)])
        assert (self.target[:there] == self.source[:there]).all()
        others = self.target[there:]
        assert ((others == 0) | (others == self.source[there:])).all()


class World:
    """A device that sends, one that is written to, and ways between them."""

    def __init__(self, fabric: Fabric, seed: int, delay: int) -> None:
        self.fabric = fabric
        self.device, self.remote = fabric.device(seed, delay), fabric.device()
        self.completions, self.others = self.device.queue(), self.remote.queue()

    def way(self, nbytes: int, depth: int) -> Way:
        """A connected way for so many bytes."""
        pair, peer = self.device.pair(self.completions, depth), self.remote.pair(self.others)
        pair.connect(peer.number)
        peer.connect(pair.number)
        source = np.random.default_rng(pair.number).integers(1, 256, nbytes + 1, np.uint8)
        target, words = np.zeros_like(source), np.zeros(2, np.int64)
        keys = [self.fabric.register(part.ctypes.data, part.nbytes) for part in (source, target, words)]
        return Way(pair, peer, source, target, words, (keys[0], keys[1], keys[2]))

    def drain(self, way: Way) -> None:
        """Wait until all that was posted has ended; a completion that was lost is made up for by a later one."""
        for turn in range(TURNS):
            if way.pair.drained:
                return
            driver.take(self.completions.address)
            if turn % 1000 == 999:
                assert driver.flush(way.pair.address) == 0
        raise AssertionError(f"{way.pair.record.posted - way.pair.record.ended} requests have not ended")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "fabric"


@pytest.fixture
def world(fake_verbs: Path, shared: Path) -> Iterator[World]:
    with Fabric(fake_verbs, shared) as fabric:
        yield World(fabric, 1, 5)


faults = st.one_of(
    st.none(),
    st.tuples(st.just("status"), st.integers(1, 30), st.integers(1, len(STATUSES) - 1)),
    st.tuples(st.sampled_from(["drop", "refuse", "cut"]), st.integers(1, 30), st.just(0)),
)
programs = st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 300), max_size=3)), max_size=40)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(faults, min_size=1, max_size=4), programs, st.integers(4, 20), st.integers(0, 2**32), st.integers(0, 20)
)
def test_any_order_and_any_fault(
    fake_verbs: Path, fresh: Any, fault: list[Any], program: Any, depth: int, seed: int, delay: int
) -> None:
    with Fabric(fake_verbs, fresh()) as fabric:
        world = World(fabric, seed, delay)
        room = sum(sum(sizes) for _, sizes in program)
        ways = [world.way(room, depth) for _ in fault]
        for way, one in zip(ways, fault, strict=True):
            if one and one[0] != "cut":
                way.pair.fault(NAMES[one[0]], one[1], one[2])
        for number, (choice, sizes) in enumerate(program):
            way, one = ways[choice % len(ways)], fault[choice % len(ways)]
            if one and one[0] == "cut" and one[1] <= number:
                way.pair.cut()
            transmit(world, way, sizes)
            for each in ways:
                each.check()
        for way, one in zip(ways, fault, strict=True):
            if way.pair.failure():
                way.pair.fail()
                assert driver.flush(way.pair.address) == 0
            world.drain(way)
            way.check()
            judge(way, one, program)


def transmit(world: World, way: Way, sizes: list[int]) -> None:
    """Post a chain as soon as there is room, unless the way has failed."""
    for turn in range(TURNS):
        if way.pair.failure() or way.send(sizes):
            return
        if not driver.take(world.completions.address) and turn % 1000 == 999:  # no room, since a completion was lost
            return
    raise AssertionError("neither room nor a failure")


def judge(way: Way, fault: Any, program: Any) -> None:
    """Whether a way has ended as its fault says; one that came after the last request changes nothing."""
    failure, kind = way.pair.failure(), fault[0] if fault else None
    if failure is None:
        assert kind in (None, "drop") or fault[1] > way.pair.record.posted or kind == "cut"
        assert way.pair.record.written == way.pair.record.posted
        assert int(way.words[1]) == len(way.chains)
    elif kind == "status":
        assert failure.partition(":")[0] == STATUSES[fault[2]]
    elif kind == "refuse":
        assert failure == "the device refused a request: Cannot allocate memory"
    else:
        assert kind == "cut"
        assert failure.startswith("RETRY_EXC_ERR: the other side does not answer")


@pytest.mark.parametrize("status", range(1, len(STATUSES)))
def test_each_status_is_named(world: World, status: int) -> None:
    way = world.way(100, depth=16)
    way.pair.fault(STATUS, 3, status)
    assert way.send([10]) == way.send([10, 10]) == 1
    world.drain(way)
    assert str(way.pair.failure()).partition(":")[0] == STATUSES[status]
    assert way.pair.record.written == 2
    way.check()


def test_a_chain_that_is_refused_in_its_middle(world: World) -> None:
    way = world.way(100, depth=16)
    way.pair.fault(REFUSE, 3)
    assert way.send([10, 10, 10]) == driver.REFUSED
    assert way.pair.record.posted == 2
    assert way.pair.failure() == "the device refused a request: Cannot allocate memory"
    way.pair.fail()
    assert driver.flush(way.pair.address) == 0
    world.drain(way)
    assert way.pair.record.ended == 3
    assert int(way.words[1]) == 0


@pytest.mark.parametrize(("fault", "told"), [
    (STATUS, "LOC_LEN_ERR"), (REFUSE, "the device refused a request: Cannot allocate memory"),
])  # fmt: skip
def test_what_failed_first_is_told(world: World, fault: int, told: str) -> None:
    way = world.way(100, depth=16)
    way.pair.fault(fault, 1, STATUSES.index("LOC_LEN_ERR"))
    assert way.send([10]) == (driver.REFUSED if fault == REFUSE else 1)
    world.drain(way)
    assert way.pair.failure() == told
    way.pair.reset()  # where nothing may be posted: EINVAL
    assert way.send([10]) == driver.REFUSED
    assert way.pair.failure() == told


def test_a_cause_that_is_told_after_a_flush_is_kept(world: World) -> None:
    way = world.way(100, depth=16)
    way.pair.fault(STATUS, 1, STATUSES.index("FATAL_ERR"))
    way.pair.record.status = FLUSHED  # of a receive
    assert way.send([10]) == 1
    world.drain(way)
    assert way.pair.failure() == "FATAL_ERR: the device failed"


def test_pairs_end_in_another_order_than_they_began(world: World) -> None:
    ways = [world.way(100, depth=16) for _ in range(8)]
    for way in ways:
        assert way.send([100]) == 1
    order: list[int] = []
    while len(order) < len(ways):
        driver.take(world.completions.address)
        order += [i for i, way in enumerate(ways) if way.pair.drained and i not in order]
    assert order != sorted(order)
    for way in ways:
        way.check()


def test_memory_that_is_not_registered_any_more(world: World) -> None:
    far, near = world.way(100, depth=16), world.way(100, depth=16)
    world.fabric.deregister(far.keys[1])
    world.fabric.deregister(near.keys[0])
    assert far.send([50]) == near.send([50]) == 1
    for way, name in ((far, "REM_ACCESS_ERR"), (near, "LOC_PROT_ERR")):
        world.drain(way)
        assert str(way.pair.failure()).startswith(name)
        assert not way.target.any()
        assert int(way.words[1]) == 0


@pytest.mark.parametrize("both", [False, True])
def test_a_late_write_arrives_unless_both_ends_have_failed(world: World, both: bool) -> None:
    """Why a slot is used again only after the queue pairs of both ends were put into the error state."""
    way = world.way(100, depth=16)
    way.pair.be_late()
    assert way.send([100]) == 1
    way.pair.fail()
    if both:
        way.peer.fail()
    world.drain(way)
    assert str(way.pair.failure()).startswith("WR_FLUSH_ERR")
    assert not way.target.any()
    world.device.let_pass(200)
    assert bool(way.target.any()) is not both


def test_completions_of_a_closed_pair_do_not_count_for_the_next_one(world: World) -> None:
    old = world.way(100, depth=16)
    assert old.send([100]) == 1
    world.device.let_pass(100)  # its completion is in the queue
    old.pair.close()
    new = world.way(100, depth=16)
    assert new.pair.record.place == old.pair.record.place
    driver.take(world.completions.address)
    assert world.completions.record.stray == 1
    assert (new.pair.record.ended, new.pair.record.written) == (0, 0)


def test_chains_fit_into_the_depth(world: World) -> None:
    way = world.way(100, depth=4)
    assert [way.send([1, 1, 1]), way.send([1])] == [1, 0]
    world.drain(way)
    assert way.send([1]) == 1
    world.drain(way)
    assert int(way.words[1]) == 2


def test_a_sleeping_thread_is_woken_by_completions(world: World) -> None:
    way, queue = world.way(100, depth=16), world.completions
    assert driver.take_events(queue.address) == 0
    assert way.send([100]) == 1
    assert driver.arm(queue.address) == 0
    assert select.select([queue.fd], [], [], 10)[0]
    assert driver.take_events(queue.address) == 1
    assert not select.select([queue.fd], [], [], 0)[0]
    while not way.pair.drained:
        assert driver.take(queue.address)
    way.check()


RECEIVER = """
import mmap, sys
from pathlib import Path
import numpy as np
from fabric import Fabric
library, shared, file = map(Path, sys.argv[1:4])
with file.open("r+b") as opened:
    memory = np.frombuffer(mmap.mmap(opened.fileno(), 0), np.int64)
with Fabric(library, shared) as fabric:
    device = fabric.device()
    pair = device.pair(device.queue())
    pair.connect(int(sys.argv[4]))
    print(pair.number, memory.ctypes.data, fabric.register(memory.ctypes.data, memory.nbytes, file), flush=True)
    sys.stdin.readline()
    print(*memory[:3], flush=True)
"""


def test_between_two_processes(fake_verbs: Path, shared: Path, tmp_path: Path, shim: Path) -> None:
    file = tmp_path / "ring"
    file.write_bytes(bytes(4096))
    with Fabric(fake_verbs, shared) as fabric:
        device = fabric.device(seed=3, delay=4)
        completions: FakeQueue = device.queue()
        pair = device.pair(completions)
        command = [sys.executable, "-c", RECEIVER, str(fake_verbs), str(shared), str(file), str(pair.number)]
        with subprocess.Popen(command, cwd=shim, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdin and receiver.stdout
            number, address, key = map(int, receiver.stdout.readline().split())
            pair.connect(number)
            source = np.array([5, 6, 7], np.int64)
            here, counter = fabric.register(source.ctypes.data, source.nbytes), np.array([8], np.int64)
            jobs = np.array([(source.ctypes.data, here, address, key, 16)], driver.JOB)
            assert driver.send_chain(pair.address, jobs.ctypes.data, 1, counter.ctypes.data, address + 16, key) == 1
            while not pair.drained:
                driver.take(completions.address)
            assert pair.failure() is None
            assert receiver.communicate("\n", timeout=60)[0].split() == ["5", "6", "9"]


def _spoil(device: FakeDevice, field: str, value: int) -> None:
    layout.at(device.address, layout.CONTEXT)[field] = value


@pytest.mark.parametrize(("field", "reason"), [
    ("abi_compat", "has not got the extended ABI"), ("num_comp_vectors", "1 completion vectors"), ("cmd_fd", "no descriptor"),
])  # fmt: skip
def test_another_layout_is_refused(world: World, field: str, reason: str) -> None:
    _spoil(world.device, field, 12345)
    with pytest.raises(BackendUnavailable, match=reason):
        layout.check_context(world.device.address, "mlx5_0", 1)
