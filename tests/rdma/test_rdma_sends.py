"""SENDs and posted receives over the fake provider: in order, behind the WRITEs before them, right or named in any failure."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import driver
import numpy as np
import pytest
from fabric import DROP, REFUSE, STATUS, Fabric, FakeDevice, FakePair
from hypothesis import given, settings
from hypothesis import strategies as st

from xvcomm.backends.rdma.queues import STATUSES

TURNS = 100_000
SHORT, LONG = 32, 1152
"""Bytes of frames that go inline, and of those that do not."""
NAMES = {"drop": DROP, "refuse": REFUSE, "status": STATUS}


class End:
    """A queue pair with buffers to receive into, and memory that its peer writes to.

    Attributes:
        handled: frames that have been received and looked at.
        written: how many bytes were written before each frame that was sent, and before the next one.
    """

    def __init__(
        self, fabric: Fabric, device: FakeDevice, frames: int, nbytes: int, depth: int = 16, buffers: int = 16
    ) -> None:
        self.device, self.completions = device, device.queue()
        self.pair: FakePair = device.pair(self.completions, depth, buffers)
        self.inbox, self.outbox = np.zeros((buffers, LONG), np.uint8), np.zeros((frames, LONG), np.uint8)
        self.source = np.random.default_rng(self.pair.number).integers(1, 256, nbytes + 1, np.uint8)
        self.target = np.zeros_like(self.source)
        parts = (self.inbox, self.outbox, self.source, self.target)
        keys = [fabric.register(part.ctypes.data, part.nbytes) for part in parts]
        self.outbox_key, self.source_key, self.target_key = keys[1:]
        self.pair.receive_into(self.inbox.ctypes.data, keys[0], LONG, buffers)
        self.handled, self.written = 0, [0]

    def send(self, other: End, nbytes: int, size: int) -> int:
        """Post the WRITE of the next bytes and the SEND of a frame; 0 if there is no room, 1 if posted, REFUSED."""
        number, at = len(self.written) - 1, self.written[-1]
        frame = self.outbox[number]
        frame[:] = number % 251 + 1
        frame[:8].view(np.int64)[0] = number
        job = np.array(
            [(self.source.ctypes.data + at, self.source_key, other.target.ctypes.data + at, other.target_key, nbytes)],
            driver.JOB,
        )
        key = 0 if size == SHORT else self.outbox_key
        posted = driver.send_frame(self.pair.address, job.ctypes.data, 1, frame.ctypes.data, key, size)
        if posted == 1:
            self.written.append(at + nbytes)
            if size == SHORT:
                frame[:SHORT] = 0
        return int(posted)

    def take(self) -> int:
        """Take a batch of completions."""
        return int(driver.take(self.completions.address))

    def offer(self, count: int) -> int:
        """Post the next receives."""
        return int(driver.offer(self.pair.address, count))

    def handle(self, other: End, most: int = TURNS) -> int:
        """Look at frames that have come from the other end; how many."""
        count = min(self.pair.record.received - self.handled, most)
        for _ in range(count):
            frame = self.inbox[self.handled % len(self.inbox)]
            assert frame[:8].view(np.int64)[0] == self.handled
            assert (frame[8:SHORT] == self.handled % 251 + 1).all()
            there = other.written[self.handled + 1]
            assert (self.target[:there] == other.source[:there]).all()
            frame[:] = 0
            self.handled += 1
        return count

    def drain(self) -> None:
        """Wait until all its requests have ended; a completion that was lost is made up for by a later one."""
        for turn in range(TURNS):
            if self.pair.drained:
                return
            self.take()
            if turn % 1000 == 999:
                assert driver.flush(self.pair.address) == 0
        raise AssertionError(f"{self.pair.record.posted - self.pair.record.ended} requests have not ended")


def ends(fabric: Fabric, seed: int = 1, delay: int = 5, **options: Any) -> tuple[End, End]:
    """Two connected ends, each of a device of its own."""
    options = {"frames": 64, "nbytes": 4096} | options
    one, other = (End(fabric, fabric.device(seed + i, delay), **options) for i in range(2))
    one.pair.connect(other.pair.number)
    other.pair.connect(one.pair.number)
    return one, other


@pytest.fixture
def fabric(fake_verbs: Path, tmp_path: Path) -> Iterator[Fabric]:
    with Fabric(fake_verbs, tmp_path / "fabric") as opened:
        yield opened


faults = st.one_of(
    st.none(),
    st.tuples(st.just("status"), st.integers(1, 30), st.integers(1, len(STATUSES) - 1)),
    st.tuples(st.sampled_from(["drop", "refuse", "cut", "late"]), st.integers(1, 30), st.just(0)),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 100), st.sampled_from([SHORT, LONG])),
        st.tuples(st.just("receive"), st.integers(0, 6), st.booleans()),
        st.tuples(st.just("take"), st.just(0), st.just(0)),
    ),
    max_size=50,
)


@settings(max_examples=200, deadline=None)
@given(faults, steps, st.integers(1, 9), st.integers(4, 20), st.integers(0, 2**32), st.integers(0, 20))
def test_any_order_and_any_fault(
    fake_verbs: Path, fresh: Any, fault: Any, program: Any, buffers: int, depth: int, seed: int, delay: int
) -> None:
    with Fabric(fake_verbs, fresh()) as fabric:
        one, other = ends(fabric, seed, delay, nbytes=100 * len(program), depth=depth, buffers=buffers)
        kind, at, status = fault or (None, 0, 0)
        if kind in NAMES:
            one.pair.fault(NAMES[kind], at, status)
        assert other.offer(buffers) == 0
        for number, (step, amount, option) in enumerate(program):
            if number == at and kind == "cut":
                one.pair.cut()
            elif number == at and kind == "late":
                one.pair.be_late()
                one.pair.fail()
            if step == "send" and not one.pair.failure():
                one.send(other, amount, option)
            elif step == "receive":
                other.take()
                assert other.offer(other.handle(one, amount)) == 0
            else:
                one.take()
        finish(one, other)
        judge(one, other, fault)


def finish(one: End, other: End) -> None:
    """Let all that was sent arrive, or one end fail and what is late arrive."""
    for turn in range(TURNS):
        if one.pair.drained or one.pair.failure():
            break
        one.take()
        other.take()
        assert other.offer(other.handle(one)) == 0
        if turn % 1000 == 999:
            assert driver.flush(one.pair.address) == 0
    if one.pair.failure():
        one.pair.fail()
        assert driver.flush(one.pair.address) == 0
    one.drain()
    one.device.let_pass(1000)
    for _ in range(300):
        other.take()
        assert other.offer(other.handle(one)) == 0


def judge(one: End, other: End, fault: Any) -> None:
    """Whether both ends have ended as the fault says; one that came after the last request changes nothing."""
    failure, kind, sent = one.pair.failure(), fault[0] if fault else None, len(one.written) - 1
    assert other.pair.failure() is None
    assert min(one.pair.record.written // 2, sent) <= other.handled <= sent
    if failure is None:
        assert one.pair.record.written == one.pair.record.posted
        assert other.handled == sent
    elif kind == "status":
        assert failure.partition(":")[0] == STATUSES[fault[2]]
    elif kind == "refuse":
        assert failure == "the device refused a request: Cannot allocate memory"
    elif kind == "late":
        assert failure.startswith("WR_FLUSH_ERR")
    else:
        assert kind == "cut"
        assert failure.startswith("RETRY_EXC_ERR: the other side does not answer")


def settle(*both: End) -> None:
    """Let everything happen that can."""
    for _ in range(300):
        for end in both:
            end.take()


@pytest.mark.parametrize("size", [SHORT, LONG])
def test_more_frames_than_buffers_wait_and_then_arrive(fabric: Fabric, size: int) -> None:
    one, other = ends(fabric, buffers=4)
    assert other.offer(2) == 0
    assert [one.send(other, 100, size) for _ in range(5)] == [1] * 5
    settle(one, other)
    assert other.handle(one) == 2
    assert not one.pair.drained
    assert one.pair.failure() is None
    assert other.offer(3) == 0
    settle(one, other)
    assert other.handle(one) == 3
    assert one.pair.record.written == 10


def test_receives_go_round_the_ring_of_buffers(fabric: Fabric) -> None:
    one, other = ends(fabric, buffers=5)
    total = 0
    for count in (3, 5, 1, 4, 5, 2, 5):
        assert other.offer(count) == 0
        assert [one.send(other, 10, LONG) for _ in range(count)] == [1] * count
        settle(one, other)
        total += count
        assert other.handle(one) == count
        assert (other.pair.record.offered, other.pair.record.received) == (total, total)


def test_more_receives_than_the_queue_pair_has_room_for(fabric: Fabric) -> None:
    one, other = ends(fabric, buffers=4)
    assert other.offer(3) == 0
    assert other.offer(3) > 0
    assert other.pair.record.offered == 4
    assert other.pair.failure() == "the device refused a request: Cannot allocate memory"
    assert [one.send(other, 10, SHORT) for _ in range(4)] == [1] * 4
    settle(one, other)
    assert other.handle(one) == 4


@pytest.mark.parametrize("arrived", [0, 2])
def test_receives_are_flushed_when_their_pair_fails(fabric: Fabric, arrived: int) -> None:
    one, other = ends(fabric)
    assert other.offer(5) == 0
    for _ in range(arrived):
        assert one.send(other, 10, LONG) == 1
    one.drain()
    other.pair.fail()  # what has come before is received all the same
    assert sum(other.take() for _ in range(300)) == 5
    assert other.handle(one) == arrived
    assert other.pair.record.offered - other.pair.record.received == 5 - arrived
    assert str(other.pair.failure()).startswith("WR_FLUSH_ERR")


def test_what_failed_first_is_told_although_receives_are_flushed(fabric: Fabric) -> None:
    one, other = ends(fabric)
    assert one.offer(5) == other.offer(5) == 0
    one.pair.fault(STATUS, 2, STATUSES.index("FATAL_ERR"))
    assert one.send(other, 10, LONG) == 1
    assert sum(one.take() for _ in range(300)) == 6
    assert one.pair.failure() == "FATAL_ERR: the device failed"
    assert one.pair.record.received == 0


def test_a_write_that_is_not_permitted_flushes_the_receives_there(fabric: Fabric) -> None:
    one, other = ends(fabric)
    assert other.offer(5) == 0
    assert driver.arm(other.completions.address) == 0
    fabric.deregister(other.target_key)
    assert one.send(other, 10, LONG) == 1
    one.drain()
    assert str(one.pair.failure()).startswith("REM_ACCESS_ERR")
    assert select.select([other.completions.fd], [], [], 0)[0]
    assert driver.take_events(other.completions.address) == 1
    assert sum(other.take() for _ in range(300)) == 5
    assert other.pair.record.received == 0
    assert str(other.pair.failure()).startswith("WR_FLUSH_ERR")


@pytest.mark.parametrize("fate", ["stays", "fails", "is reset", "has no buffer"])
def test_a_late_frame_arrives_only_at_a_pair_that_can_receive(fabric: Fabric, fate: str) -> None:
    one, other = ends(fabric)
    assert other.offer(0 if fate == "has no buffer" else 7) == 0
    one.pair.be_late()
    assert [one.send(other, 10, SHORT) for _ in range(7)] == [1] * 7
    one.pair.fail()
    if fate == "fails":
        other.pair.fail()
    elif fate == "is reset":
        other.pair.reset()
    one.drain()
    one.device.let_pass(105)
    if fate == "has no buffer":  # one of them has come too early, and those behind it come in vain
        assert other.offer(7) == 0
    settle(one, other)
    assert str(one.pair.failure()).startswith("WR_FLUSH_ERR")
    assert other.handle(one) == (7 if fate == "stays" else 0)
    assert not other.inbox.any()


def test_a_pair_that_is_reset_forgets_frames_and_receives(fabric: Fabric) -> None:
    one, other = ends(fabric, delay=0)
    assert other.offer(3) == 0
    assert one.send(other, 10, LONG) == 1
    one.drain()
    for end in (one, other):
        end.pair.reset()
    one.pair.connect(other.pair.number)
    other.pair.connect(one.pair.number)
    settle(one, other)
    assert other.pair.record.received == 0
    assert one.send(other, 10, LONG) == 1
    settle(one, other)
    assert other.pair.record.received == 0
    assert not one.pair.drained


@pytest.mark.parametrize("ends_with", [None, "RETRY_EXC_ERR"])
def test_a_sender_that_sleeps_is_woken_by_a_receive_or_the_end_of_its_peer(
    fabric: Fabric, ends_with: str | None
) -> None:
    one, other = ends(fabric)
    assert one.send(other, 10, LONG) == 1
    assert driver.arm(one.completions.address) == 0
    assert not select.select([one.completions.fd], [], [], 0)[0]
    if ends_with:
        other.pair.fail()
    else:
        assert other.offer(1) == 0
    assert select.select([one.completions.fd], [], [], 0)[0]
    assert driver.take_events(one.completions.address) == 1
    settle(one, other)
    assert other.handle(one) == (0 if ends_with else 1)
    assert one.pair.drained
    assert str(one.pair.failure()).partition(":")[0] == str(ends_with)


def take_by_event(end: End) -> None:
    """Take completions, and sleep on the channel where there are none."""
    if end.take():
        return
    assert driver.arm(end.completions.address) == 0
    if not end.take():
        assert select.select([end.completions.fd], [], [], 10)[0], "nothing has woken it"
        assert driver.take_events(end.completions.address) >= 1


def test_a_thread_that_sleeps_is_woken_by_a_frame(fabric: Fabric) -> None:
    one, other = ends(fabric)
    assert other.offer(1) == 0
    assert driver.arm(other.completions.address) == 0
    assert other.take() == 0
    woken = threading.Event()

    def sleep() -> None:
        if select.select([other.completions.fd], [], [], 60)[0]:
            woken.set()

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    assert one.send(other, 100, LONG) == 1
    one.drain()
    sleeper.join()
    assert woken.is_set()
    assert driver.take_events(other.completions.address) == 1
    settle(other)
    assert other.handle(one) == 1


@pytest.mark.parametrize("delay", [0, 3])
def test_two_threads_send_to_each_other_and_sleep(fabric: Fabric, delay: int) -> None:
    """No wake-up is lost, and no byte: each thread has a device of its own, and sleeps whenever nothing has come."""
    frames = 2000
    both = ends(fabric, delay=delay, frames=frames, nbytes=10 * frames, buffers=7)
    for end in both:
        assert end.offer(7) == 0
    wrong: list[BaseException] = []

    def work(mine: End, theirs: End) -> None:
        try:
            while not (mine.pair.drained and len(mine.written) - 1 == mine.handled == frames):
                while len(mine.written) <= frames and mine.send(theirs, 10, SHORT if len(mine.written) % 3 else LONG):
                    pass
                take_by_event(mine)
                assert mine.offer(mine.handle(theirs)) == 0
                assert mine.pair.failure() is None
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=order) for order in (both, both[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    assert [end.handled for end in both] == [frames, frames]


RECEIVER = """
import sys
from pathlib import Path
import driver
import numpy as np
from fabric import Fabric
library, shared = map(Path, sys.argv[1:3])
with Fabric(library, shared) as fabric:
    device = fabric.device()
    completions = device.queue()
    pair = device.pair(completions)
    buffers = np.zeros((2, 1152), np.uint8)
    pair.receive_into(buffers.ctypes.data, fabric.register(buffers.ctypes.data, buffers.nbytes), 1152, 2)
    pair.connect(int(sys.argv[3]))
    print(pair.number, flush=True)
    sys.stdin.readline()
    seen = []
    driver.offer(pair.address, 2)
    while len(seen) < 5:
        driver.take(completions.address)
        while len(seen) < pair.record.received:
            seen.append(int(buffers[len(seen) % 2].view(np.int64)[0]))
            driver.offer(pair.address, 1)
    print(*seen, flush=True)
"""


def test_between_two_processes(fake_verbs: Path, fabric: Fabric, tmp_path: Path, shim: Path) -> None:
    one = End(fabric, fabric.device(seed=3, delay=4), frames=5, nbytes=0)
    command = [sys.executable, "-c", RECEIVER, str(fake_verbs), str(tmp_path / "fabric"), str(one.pair.number)]
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with subprocess.Popen(
        command, cwd=shim, env=os.environ | {"PYTHONPATH": paths}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    ) as receiver:  # fmt: skip
        assert receiver.stdin and receiver.stdout
        one.pair.connect(int(receiver.stdout.readline()))
        receiver.stdin.write("\n")
        receiver.stdin.flush()
        for size in (LONG, SHORT, LONG, SHORT, LONG):
            assert one.send(one, 0, size) == 1  # the WRITE before it is of no bytes
        deadline = time.monotonic() + 60
        while not one.pair.drained and time.monotonic() < deadline:
            one.take()
        if not one.pair.drained:
            receiver.kill()
        assert receiver.communicate(timeout=60)[0].split() == ["0", "1", "2", "3", "4"]
        assert one.pair.failure() is None
