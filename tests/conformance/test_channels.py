"""Errors of channels and probes: killed ranks, mismatched operations, several threads."""

import re
import signal
import threading
import time

import numpy as np
import pytest

from xvcomm.errors import Aborted, DeadlineExceeded, MismatchError, PeerLost, XvcommError
from xvcomm.testing.inside import context
from xvcomm.testing.signals import await_that, meet
from xvcomm.testing.world import World
from xvcomm.types.deadline import Deadline

SOON = 60.0


@pytest.fixture(scope="module")
def pair():
    with World(islands="a,b", timeout=100) as world:
        yield world


@pytest.fixture(scope="module")
def three():
    with World(3, timeout=100) as world:
        yield world


def raised(call, *args, **kwargs):
    """The exception of a call, or None."""
    try:
        call(*args, **kwargs)
    except XvcommError as error:
        return error
    return None


def mismatch(comm, sender):
    sub = comm.split(0)
    if comm.rank == sender:
        error = raised(sub.send, np.zeros(4), 1 - sender, 7, channel=9)
        error = error or raised(sub.recv, np.zeros(1), 1 - sender, channel=2)
    else:
        error = raised(sub.recv, np.zeros(5), sender, 7, channel=9)
    sub.close()
    return [error]


@pytest.mark.parametrize("sender", [0, 1])
def test_a_mismatch_names_the_channel(pair, sender):
    for rank, (error,) in enumerate(pair.run(mismatch, sender)):
        assert isinstance(error, MismatchError) and (error.rank, error.peer) == (rank, 1 - rank)
        assert f"rank {sender} on " in str(error) and "sent 4 x float64, tag 7; " in str(error)
        assert "expected 5 x float64, tag 7 (channel 9)" in str(error)


def wrong_channel(comm):
    """Rank 0 sends more than a ring holds on a channel on which rank 1 does not receive."""
    sub = comm.split(0)
    if comm.rank == 0:
        error = raised(sub.send, np.zeros(1 << 20), 1, channel=3, timeout=0.4)
    else:
        error = raised(sub.recv, np.zeros(1 << 20), 0, channel=4, timeout=20)
    sub.close()
    return [error]


def test_a_deadline_names_the_channel(pair):
    (late,), (other,) = pair.run(wrong_channel)
    assert isinstance(late, DeadlineExceeded) and isinstance(other, DeadlineExceeded)
    assert late.peer == 1 and "send with rank 1 (channel 3) was waiting for rank 1" in str(late)
    assert "recv with rank 0 (channel 4) on rank 1" in str(other)


def late_behind_a_probe(comm, what):
    """Rank 0 reaches its deadline waiting for rank 1, which probes, or probes while the others wait in a collective."""
    sub = comm.split(0)
    if comm.rank == 0:
        error = raised(sub.recv, np.zeros(1), 1, timeout=0.4) if what == "recv" else raised(sub.probe, timeout=0.4)
    elif what == "recv" and comm.rank == 2:
        error = None
        comm.store.wait([f"late/{what}"], Deadline.after(20))  # sub's ends waiting when the deadline finishes it
    else:
        error = raised(sub.probe) if what == "recv" else raised(sub.barrier)
    comm.store.set(f"late/{what}", b"")
    sub.close()
    return [error]


@pytest.mark.parametrize("what", ["recv", "probe"])
def test_a_deadline_behind_a_probe(three, what):
    (error,), *_ = three.run(late_behind_a_probe, what)
    assert isinstance(error, DeadlineExceeded)
    if what == "recv":
        assert "recv with rank 1 was waiting for rank 1 on " in str(error) and error.peer == 1
        assert "; rank 1: its last operation: probe #" in str(error) and "rank 2" not in str(error)
    else:
        assert "probe with any rank was waiting for rank 1 on " in str(error) and ", rank 2 on " in str(error)
        assert "rank 2: its last operation: barrier #" in str(error)


def probing(comm, source, many):
    """Run `many` probes of the last rank concurrently."""
    errors = []
    threads = [
        threading.Thread(target=lambda c=c: errors.append(raised(comm.probe, source, channel=c)))
        for c in range(1, many)
    ]
    for thread in threads:
        thread.start()
    errors.append(raised(comm.probe, source))
    for thread in threads:
        thread.join()
    return errors


def sleep(comm):
    time.sleep(60)


@pytest.mark.parametrize("source", [2, None])
def test_probing_for_a_killed_rank(source):
    with World(3, timeout=100) as world:
        world.run(meet)
        for rank in (0, 1):
            world.submit(rank, probing, source, 3)
        world.submit(2, sleep)
        time.sleep(0.3)
        killed = time.monotonic()
        world.kill(2, signal.SIGKILL)
        *outcomes, _ = world.collect()
        assert time.monotonic() - killed < SOON
    for errors in outcomes:
        assert len(errors) == 3
        assert all(isinstance(e, PeerLost) and e.peer == 2 and "rank 2 on " in str(e) for e in errors), errors


def test_an_interrupted_probe_consumes_no_message(pair):
    pair.run(meet)
    pair.submit(0, interrupted)
    pair.submit(1, sender_after_interrupt)
    time.sleep(0.5)
    pair.kill(0, signal.SIGINT)
    assert pair.collect() == ["again", None]


def interrupted(comm):
    try:
        comm.probe(1, channel=8)
    except KeyboardInterrupt:
        comm.send(np.zeros(1), 1, channel=8)
        assert comm.probe(channel=8).tag == 5
        comm.recv(np.zeros(3), 1, 5, channel=8)
        comm.barrier()
        return "again"


def sender_after_interrupt(comm):
    comm.recv(np.zeros(1), 0, channel=8)
    comm.send(np.zeros(3), 0, 5, channel=8)
    comm.barrier()


def threads_with_channels(comm, channels, many):
    """One thread per channel, each with messages of its own sizes, found by probes for any rank."""
    peers = [rank for rank in range(comm.size) if rank != comm.rank]
    failures = []

    def talk(channel):
        try:
            works = [
                comm.isend(np.full(channel * 100 + n, comm.rank), peer, n, channel=channel)
                for n in range(many) for peer in peers
            ]  # fmt: skip
            for _ in range(many * len(peers)):
                found = comm.probe(channel=channel)
                assert found.nbytes == 8 * (channel * 100 + found.tag), found
                got = comm.recv(np.zeros(found.nbytes // 8, int), found.src, found.tag, channel=channel)
                assert (got == found.src).all()
            for work in works:
                work.wait()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=talk, args=(channel,)) for channel in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    comm.barrier()
    return failures


def test_a_thread_for_each_channel(three):
    assert three.run(threads_with_channels, [0, 1, 7, 31], 20) == [[], [], []]


def abort_and_leave(comm):
    comm.abort("enough")
    comm.close()


def probe_until_raised(comm, source):
    while True:
        comm.iprobe(source)


@pytest.mark.parametrize("source", [1, None])
def test_a_probe_raises_the_abort_of_a_rank_that_closed(source):
    with World(2, timeout=100) as world:
        world.submit(0, probe_until_raised, source)
        world.submit(1, abort_and_leave)
        error = world.collect()[0]
        assert isinstance(error, Aborted) and error.peer == 1 and "enough" in str(error), error


def close_under_probe(comm):
    """Close the communicator while a thread is in a probe."""
    sub = comm.split(0)
    errors = []
    thread = threading.Thread(target=lambda: errors.append(raised(sub.probe)))
    thread.start()
    await_that(lambda: "probe" in comm.history()[-1].describe())
    sub.close()
    thread.join(10)
    return errors, raised(sub.iprobe), raised(sub.probe, (comm.rank + 1) % comm.size)


def test_close_ends_a_probe(three):
    for rank, (errors, *later) in enumerate(three.run(close_under_probe)):
        for error in (*errors, *later):
            assert type(error).__name__ in ("ClosedError", "PeerLost"), (rank, error)
        assert len(errors) == 1


def last_words(comm):
    """The flight recorder's view of rank 0 while it probes."""
    comm.barrier()
    if comm.rank == 0:
        comm.probe(channel=5)
        comm.recv(np.zeros(1), 1, channel=5)
        return None
    session = context(comm).session
    await_that(lambda: "barrier" not in session.liveness.last_words(0))
    words = session.liveness.last_words(0)
    if comm.rank == 2:
        comm.send(np.zeros(1), 1)
    else:
        comm.recv(np.zeros(1), 2)
        comm.send(np.zeros(1), 0, channel=5)
    return words


def test_the_flight_recorder_records_probes(three):
    for words in three.run(last_words)[1:]:
        assert re.fullmatch(r"its last operation: probe #\d+ at test_channels\.py:\d+ \(in progress\)", words), words


def small_at_once(comm):
    """A small message that fits the ring has been sent when the call returns; one that has arrived is received at once."""
    comm.barrier()
    if comm.rank == 0:
        first = comm.isend(np.full(8, 3.0), 1)  # opens the ring
        first.wait()
        done = comm.isend(np.full(8, 4.0), 1).done()
        comm.barrier()
    else:
        x, y = np.zeros(8), np.zeros(8)
        comm.recv(x, 0)
        comm.barrier()
        done = comm.irecv(y, 0).done()
        assert (x == 3.0).all() and (y == 4.0).all()
    return done


def test_small_asynchronous_messages_need_no_thread(pair):
    assert pair.run(small_at_once) == [True, True]


def waited_by_two(comm):
    """Two threads wait for one message, after another wait was interrupted by a timeout."""
    if comm.rank:
        comm.recv(np.zeros(1), 0)
        comm.send(np.full(4, 7.0), 0)
        return None
    work = comm.irecv(np.zeros(4), 1)
    with pytest.raises(DeadlineExceeded, match="was not done after"):
        work.wait(0.01)
    comm.send(np.zeros(1), 1)
    found = []
    threads = [threading.Thread(target=lambda: found.append(work.wait()[0])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_threads_that_wait_for_one_message(pair):
    assert pair.run(waited_by_two)[0] == [7.0, 7.0]
