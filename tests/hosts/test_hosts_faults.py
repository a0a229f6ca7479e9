"""Faults of jobs over several hosts: on host labels, and between network namespaces."""

import ctypes
import itertools
import os
import re
import signal
import threading
import time

import numpy as np
import psutil
import pytest

from xvcomm.errors import DeadlineExceeded, PeerLost
from xvcomm.system.stacks import SIGNAL
from xvcomm.testing import World, failures
from xvcomm.testing.inside import context
from xvcomm.testing.signals import Signals, await_that
from xvcomm.types.deadline import Deadline

HOST = {"XVCOMM_DEVICE": "host"}


@pytest.fixture(scope="module", params=["a,b", "a:2,b:1", "a,b,a,b"])
def world(request):
    with World(hosts=request.param, env=HOST) as ranks:
        yield ranks


@pytest.mark.parametrize("check", failures.CHECKS)
def test_check(world, check):
    world.run(check)


def depart(comm, first, what):
    """The last rank closes a communicator in which nothing was called, before or after the others begin to wait for it."""
    group, signals, last = comm.split(0), Signals(comm), comm.size - 1
    if comm.rank == last:
        if not first:
            signals.hear("waiting", range(last))
            time.sleep(0.1)
        group.close()
        signals.tell("left")
        return None
    signals.tell("waiting")
    if first:
        signals.hear("left", [last])
    calls = {
        "recv": lambda: group.recv(np.zeros(3), last),
        "send": lambda: group.send(np.zeros(1 << 22), last),
        "probe": lambda: group.probe(last, channel=3),
        "barrier": group.barrier,
    }
    try:
        calls[what]()
    except PeerLost as error:
        return str(error)
    finally:
        group.close()


@pytest.mark.parametrize("what", ["recv", "send", "probe", "barrier"])
@pytest.mark.parametrize("first", [True, False], ids=["before", "meanwhile"])
def test_departure(world, what, first):
    """A wait for a rank that has closed the communicator fails, also if that rank never opened the ring."""
    for text in world.run(depart, first, what)[:-1]:
        assert f"rank {world.size - 1} on " in text and " left; " in text


def leave(comm, what, late=False):
    """The last rank closes its session before anything joins it with ranks of other hosts; rank 0 may come after all others."""
    if comm.rank == comm.size - 1:
        comm.close()
        return None
    if late and comm.rank == 0:
        left = context(comm).session.journal.left
        await_that(lambda: all(left(rank) for rank in range(1, comm.size)))
    begun = time.monotonic()
    with comm, pytest.raises(PeerLost) as caught:
        if what == "subgroup":
            comm.subgroup(range(comm.size), "all")
        elif what == "all_gather":
            comm.all_gather(np.zeros(700_000))
        else:
            comm.barrier()
    return caught.value.peer, str(caught.value), time.monotonic() - begun


@pytest.mark.parametrize("what", ["subgroup", "barrier"])
def test_departure_without_a_wire(what):
    """Ranks hear of one that has left the job before there was any connection to it, long before their deadline."""
    with World(hosts="a,b,c", env=HOST, timeout=100) as ranks:
        for peer, text, seconds in ranks.run(leave, what)[:-1]:
            assert peer == 2 and seconds < 30
            assert what != "subgroup" or "rank 2 on c closed the communicator before it joined" in text


def leave_one_after_the_other(comm):
    """Rank 2 leaves the job, then rank 1, on rank 0's host, a communicator in which nothing was called; rank 0's error there."""
    group, signals = comm.split(0), Signals(comm)
    if comm.rank == 2:
        comm.close()
        return None
    if comm.rank == 1:
        signals.hear("noticed", [0])
        group.close()
        return None
    inside = context(group)
    await_that(lambda: 2 in inside.lifecycle.departed)
    signals.tell("noticed")
    with group, pytest.raises(PeerLost) as caught:
        group.recv(np.zeros(3), 1)
    return caught.value.peer


def test_departures_on_two_hosts():
    """A rank that has noticed one on another host also notices one on its own."""
    with World(hosts="a:2,b", env=HOST, timeout=100) as ranks:
        assert ranks.run(leave_one_after_the_other)[0] == 1


@pytest.mark.parametrize("hosts", ["a,b,c", "a,b:2"])
def test_a_departure_that_lets_others_leave(hosts):
    """A rank that fails because another has left, and leaves too, is not named in its place."""
    with World(hosts=hosts, env=HOST, timeout=100) as ranks:
        for peer, text, _ in ranks.run(leave, "all_gather", True)[:-1]:
            assert peer == 2, text


def late(comm):
    """Rank 1 calls another collective than rank 0, which has given up by then: the ring has told so, the session not yet."""
    group = comm.split(0)
    for each in (comm, group):
        each.all_reduce(np.zeros(3))
    inside = context(group)
    try:
        if comm.rank == 0:
            group.all_reduce(np.zeros(1000), timeout=0.3)
        else:
            with inside.lifecycle.lock:  # the session needs it to look at the rings
                await_that(inside.rings.told)
                group.broadcast(np.zeros(1000), 0)
    except DeadlineExceeded as error:
        return str(error)
    finally:
        group.close()


def test_a_deadline_is_no_mismatch():
    """A rank that comes after another one's deadline, with another call, learns of the deadline."""
    with World(hosts="a,b", env=HOST) as ranks:
        for text in ranks.run(late):
            assert "all_reduce #1 was waiting for rank 1 on b" in text


def stuck(comm, milliseconds):
    """Rank 1 holds the interpreter while rank 0 waits for it."""
    group = comm.split(0)
    group.all_reduce(np.zeros(3))
    if comm.rank == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})  # for the stack, which would wake it
        ctypes.PyDLL(None).usleep(1000 * milliseconds)  # which does not release the interpreter's lock
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})
    try:
        group.recv(np.zeros(7), 1 - comm.rank, timeout=0.3)
    except DeadlineExceeded as error:
        return str(error)
    finally:
        group.close()


def test_last_words_of_a_stuck_rank():
    """A rank whose interpreter is stuck still says what it did last, also where no ring leads to it."""
    with World(hosts="a,b", env=HOST) as ranks:
        first, _ = ranks.run(stuck, 1500)
    assert re.search(
        r"rank 1: its last operation: all_reduce #0 of 3 x float64 at test_hosts_faults.py:\d+ \(done\)", first
    )


def ask_all(comm, count):
    """How many records rank 0 gets of each other rank when it asks all at once."""
    for _ in range(count):
        comm.barrier()
    if comm.rank:
        return comm.barrier()
    others = range(1, comm.size)
    found = context(comm).session.recorders.newest(others, Deadline.after(10), count)
    comm.barrier()
    return [len(found[rank].records) if rank in found else 0 for rank in others]


def test_answers_of_many():
    """No answer is lost, although they come faster than Python takes them."""
    with World(hosts="a,b,c,d,e,f", env=HOST) as ranks:
        assert ranks.run(ask_all, 64)[0] == [64] * 5


def wait_beside_a_slow_rank(comm, pids, seconds, what="recv"):
    """Rank 0 waits for rank 1, and that for rank 2, which computes; rank 1 is stopped for a while when rank 0 gives up."""
    x, group, signals = np.zeros(3), comm.split(0), Signals(comm)
    group.sendrecv(x, (comm.rank + 1) % 3, x.copy(), (comm.rank - 1) % 3)
    try:
        if comm.rank == 2:
            signals.hear("over", [0])
            group.barrier()
        elif comm.rank == 1:
            signals.tell("waiting")
            group.recv(x, 2)
        else:
            signals.hear("waiting", [1])
            time.sleep(0.1)
            os.kill(pids[1], signal.SIGSTOP)
            await_that(lambda: psutil.Process(pids[1]).status() == psutil.STATUS_STOPPED)
            threading.Timer(seconds, os.kill, (pids[1], signal.SIGCONT)).start()
            if what == "recv":
                group.recv(x, 1, timeout=0.1)
            else:
                group.send(np.zeros(16 << 20), 1, timeout=1.0)
    except DeadlineExceeded as error:
        return error.peer, str(error)
    finally:
        if comm.rank == 0:
            signals.tell("over")
        group.close()


def test_a_rank_that_is_slow_to_answer():
    """A rank that is stopped for a second is asked again when it goes on: the error names the one that it waits for."""
    with World(hosts="a,b,c", env=HOST) as ranks:
        (peer, text), *_ = ranks.run(wait_beside_a_slow_rank, ranks.pids(), 1.0)
    assert peer == 2 and "recv with rank 1 was waiting for rank 2 on c; rank 2: its last operation: " in text, text


@pytest.mark.parametrize("what", ["recv", "send"])
def test_a_rank_that_is_too_slow_to_answer(what):
    """A rank that is stopped for longer is named, and not said to be out of reach; also while a connection is made anew."""
    with World(hosts="a,b,c", env=HOST) as ranks:
        (peer, text), *_ = ranks.run(wait_beside_a_slow_rank, ranks.pids(), 5.0, what)
    assert peer == 1 and "rank 1: it does not answer, but its host b does: it is stopped, or very slow; " in text, text


@pytest.mark.parametrize("side", [0, 1])
def test_one_direction_of_a_link(two_hosts, side):
    """Where one host hears nothing over a link, and is heard, the other link does the work."""
    ranks = two_hosts.begun()
    two_hosts.mute(side, 1)
    two_hosts.unharmed(ranks)


def test_links_that_carry_nothing(two_hosts):
    """A network that is stuck: the verdict does not accuse the program."""
    ranks = two_hosts.await_begun(two_hosts.start("stuck", env={"XVCOMM_PEER_TIMEOUT": "60"}))
    for side, link in itertools.product(range(2), repeat=2):
        two_hosts.mute(side, link)
    texts = two_hosts.outputs(ranks)
    for rank, text in enumerate(texts):
        assert re.search(
            rf"rank {1 - rank} on [ab] does not answer.*Look whether its host and its network work", text
        ), text
    # One of them may still have slots of the message before in its ring, and has sent nothing of this one.
    carried = r"carried so far: 10\.77\.\d\.\d to 10\.77\.\d\.\d \(tcp\) \d+ bytes out"
    assert any(re.search(carried, text) for text in texts), texts


@pytest.mark.parametrize("side", [0, 1])
def test_one_direction_of_all_links(two_hosts, side):
    """Where one host hears nothing, and is heard, both lose each other after XVCOMM_PEER_TIMEOUT."""
    ranks = two_hosts.begun(env={"XVCOMM_PEER_TIMEOUT": "1.5"})
    for link in range(2):
        two_hosts.mute(side, link)
    for rank, process in enumerate(ranks):
        text = process.communicate(timeout=40)[0]
        assert process.returncode == 1 and re.search(rf"PeerLost: .*rank {1 - rank} .*on [ab] (was lost|left)", text), (
            text
        )


@pytest.mark.parametrize("what", ["all_reduce", "subgroup"])
def test_hosts_that_are_apart_before_the_first_wire(two_hosts, what):
    """Both lose each other after XVCOMM_PEER_TIMEOUT, also where no connection but those of the store has joined them."""
    env = {"XVCOMM_PEER_TIMEOUT": "4", "XVCOMM_TIMEOUT": "60"}
    ranks = two_hosts.await_begun(two_hosts.start("apart", what, env=env))
    for link in range(2):
        two_hosts.link(link, "down")
    for rank, text in enumerate(two_hosts.outputs(ranks)):
        found = re.search(rf"([\d.]+) s: PeerLost: .*rank {1 - rank} .*on [ab],? .*was lost", text)
        assert found and float(found[1]) < 20, text
        assert float(re.search(r"([\d.]+) s to leave", text)[1]) < 8, text


def test_the_host_of_the_store_is_out_of_reach(two_hosts):
    """All other ranks lose rank 0, which served the store, after XVCOMM_PEER_TIMEOUT: also those without a wire to it."""
    options = {"sides": (0, 1, 1, 1), "env": {"XVCOMM_PEER_TIMEOUT": "6"}}
    ranks = two_hosts.await_begun(two_hosts.start_labelled("forsaken", **options))
    for link in range(2):
        two_hosts.link(link, "down")
    for text in two_hosts.outputs(ranks)[1:]:
        seconds, peer, words = text.split(maxsplit=2)
        assert peer == "0" and "rank 0 on h0 was lost; " in words, text
        assert re.search("no answer|No route to host|did not answer", words), text
        assert float(seconds) < 9, text


def test_a_host_that_does_not_answer(two_hosts):
    """An error at the deadline says so, before the host is lost."""
    env = {"XVCOMM_PEER_TIMEOUT": "30", "XVCOMM_TIMEOUT": "5"}
    ranks = two_hosts.await_begun(two_hosts.start("forsaken", env=env))
    for link in range(2):
        two_hosts.link(link, "down")
    told = r"which did not answer; connections from [ab]: .*10.77.\S+ \(tcp\) up, nothing heard for [\d.]+ s, "
    for rank in ranks:
        text = rank.communicate(timeout=60)[0]
        assert re.search(f"DeadlineExceeded: .*it runs on host [ab], {told}nothing acknowledged", text), text


def test_what_is_told_of_connections(two_hosts):
    """An error that names a late rank has the states of the connections to it; records have the bytes that each has carried."""
    ranks = two_hosts.await_begun(two_hosts.start("hang"))
    two_hosts.link(1, "down")
    text, _ = two_hosts.outputs(ranks)
    up, lost = (
        rf"10.77.{link}.1 to 10.77.{link}.2 \(tcp\) {state}, \d+ bytes sent, \d+ received"
        for link, state in enumerate(("up", r"lost [\d.]+ s ago"))
    )
    error, *reductions, waited = text[text.index("recv with rank 1 on rank 0") :].splitlines()  # behind the report
    assert re.search(f"rank 1: its last operation: .*; connections from a: {up}; {lost}; the communicator", error), text
    assert re.search(r"recv #\d+ with rank 1 by tcp of 1048576 x float64 at ranks.py:\d+ \(failed\)$", waited), text
    shares = [re.findall(r"10.77.(\d).1 to \S+ \(tcp\) (\d+) bytes out, (\d+) in", line) for line in reductions]
    assert {link for each in shares for link, _, _ in each} == {"0", "1"}, text
    for each in shares:  # a half goes out, and its sum comes back
        assert sum(int(sent) for _, sent, _ in each) == sum(int(got) for _, _, got in each) == 1 << 23, text


def test_a_store_out_of_reach(two_hosts):
    """A store that cannot be reached for longer than XVCOMM_PEER_TIMEOUT loses no rank that another link reaches."""
    ranks = two_hosts.begun("7", env={"XVCOMM_PEER_TIMEOUT": "2"})
    two_hosts.link(0, "down")
    mend = threading.Timer(5, two_hosts.link, (0, "up"))
    mend.start()
    two_hosts.unharmed(ranks)
    mend.join()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("seconds", [0.4, 4], ids=["shortly", "for long"])
def test_stopped(two_hosts, tmp_path, rank, seconds):
    """A process that is stopped and goes on is not lost, however XVCOMM_PEER_TIMEOUT is, as long as its host answers."""
    ranks = two_hosts.begun(tmp_path / "end", env={"XVCOMM_PEER_TIMEOUT": "1.5"})
    os.kill(ranks[rank].pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(ranks[rank].pid, signal.SIGCONT)
    (tmp_path / "end").touch()
    two_hosts.unharmed(ranks)


def test_stopped_with_full_buffers(two_hosts, tmp_path):
    """Nor is one that was sent more than its sockets take, so that its host acknowledges nothing more."""
    shrink_buffers(two_hosts)
    ranks = two_hosts.begun(tmp_path / "end", env={"XVCOMM_PEER_TIMEOUT": "1.5"})
    os.kill(ranks[1].pid, signal.SIGSTOP)
    await_that(lambda: two_hosts.refused(0))
    time.sleep(5)
    os.kill(ranks[1].pid, signal.SIGCONT)
    (tmp_path / "end").touch()
    two_hosts.unharmed(ranks)


def test_stopped_for_good(two_hosts):
    """A rank that waits for a stopped process raises an error at the deadline."""
    ranks = two_hosts.begun(env={"XVCOMM_PEER_TIMEOUT": "1.5", "XVCOMM_TIMEOUT": "8"})
    os.kill(ranks[1].pid, signal.SIGSTOP)
    text = ranks[0].communicate(timeout=60)[0]
    assert ranks[0].returncode == 1 and re.search(r"DeadlineExceeded: .*rank 1 ", text), text
    ranks[1].kill()


def leave_beside_a_stopped(comm, other, count):
    """Rank 0 sends to rank 1, process `other`, which is stopped, and leaves: its seconds; how much rank 1 receives afterwards."""
    x = np.full(1000, 7.0)
    if comm.rank == 1:
        comm.send(x, 0)
        comm.recv(x, 0)  # rank 0 has what was sent
        os.kill(os.getpid(), signal.SIGSTOP)
        for _ in range(count):
            y = np.zeros(1000)
            comm.recv(y, 0)
            assert (y == 7).all()
        comm.close()
        return count
    comm.recv(x, 1)
    comm.send(x, 1)
    await_that(lambda: psutil.Process(other).status() == psutil.STATUS_STOPPED)
    for _ in range(count):
        comm.send(x, 1)
    begun = time.monotonic()
    comm.close()
    return time.monotonic() - begun


def test_leaving_beside_a_stopped_process():
    """A rank does not wait long for a stopped one to have what was sent, which comes nevertheless."""
    with World(hosts="a,b", env=HOST, timeout=100) as ranks:
        for rank in range(2):
            ranks.submit(rank, leave_beside_a_stopped, ranks.pids()[1], 5)
        (seconds,) = ranks.collect(0)
        ranks.kill(1, signal.SIGCONT)
        assert ranks.collect(1) == [5]
    assert seconds < 8


def shrink_buffers(hosts):
    """Let all sockets of these hosts take little at a time."""
    for side in range(2):
        for name in ("rmem", "wmem"):
            setting = hosts.begin(side, "sysctl", "-w", f"net.ipv4.tcp_{name}=4096 4608 8192")
            assert setting.wait(30) == 0, setting.stdout.read()


def test_full_buffers(two_hosts):
    """Sockets that take little at a time cost time only."""
    shrink_buffers(two_hosts)
    two_hosts.run("collectives")


def test_out_of_descriptors(two_hosts):
    """A process that can accept no connection for a while does so afterwards."""
    two_hosts.run("starved", "2", env={"XVCOMM_PEER_TIMEOUT": "1"})


def test_out_of_descriptors_for_good(two_hosts):
    """A process that can open nothing more says so, and the others end with it."""
    first, second = (process.communicate(timeout=60)[0] for process in two_hosts.start("starved", ""))
    assert "ResourceError: cannot map shared memory: too many open files" in second, second
    told = r"(ResourceError: cannot map shared memory|its reason has not come)"  # for which it may need a descriptor
    assert re.search(rf"Aborted: .*rank 1 on b .*: {told}", first), first
