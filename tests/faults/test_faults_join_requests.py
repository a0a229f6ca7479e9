"""Processes that ask to join a job: what becomes of `grow` if they, or its ranks, fail."""

import contextlib
import os
import signal
import socket
import threading
import time
from unittest import mock

import pytest
from growing import grown, join, lose, restarted, take_in
from shrinking import die, shrunk, works

import xvcomm
from xvcomm.comm import growing
from xvcomm.engine.session import pending_request, session
from xvcomm.errors import Aborted, ClosedError, ConfigError, DeadlineExceeded, ResourceError, StoreError
from xvcomm.testing.signals import await_that
from xvcomm.testing.world import World

ISLANDS = {"islands": "a:2,b:1"}
HOSTS = {"hosts": "a:2,b:1"}


def go_on_without(comm, file):
    """A newcomer that is stopped is waited for during a part of the time; then the ranks go on without it."""
    left = lose(comm, (1,))
    made, seconds = take_in(left, 1, timeout=3.0)
    assert 1.0 < seconds < 2.9
    with pytest.raises(ClosedError):
        left.barrier()
    works(made, left.job_ranks)
    assert made.join_requests() == 0
    made.barrier()
    if made.rank == 0:
        os.kill(int(file.read_text()), signal.SIGCONT)
    made.barrier()
    made, _ = grown(made)
    works(made, left.job_ranks)
    made.close()


def stop_when_taken_in(file):
    """It learns what became of it when it goes on."""
    file.write_text(str(os.getpid()))
    real = pending_request.PendingRequest.answer

    def answer(self, deadline):
        found = real(self, deadline)
        os.kill(os.getpid(), signal.SIGSTOP)
        return found

    with (
        mock.patch.object(pending_request.PendingRequest, "answer", answer),
        pytest.raises(DeadlineExceeded, match=rf"grow: process {os.getpid()} on .* did not join as rank 1 in time"),
    ):
        xvcomm.init()


def test_a_newcomer_that_is_stopped(tmp_path):
    file = tmp_path / "pid"
    with World(3) as world:
        restarted(world, (1,), go_on_without, file, join=stop_when_taken_in, joining=(file,))


def go_on_without_many(comm, folder):
    """However many are stopped, they cost one part of the time."""
    left = lose(comm, range(2, comm.size))
    made, seconds = take_in(left, comm.size - 2, timeout=12.0)
    assert 5.0 < seconds < 11.0
    works(made, left.job_ranks)
    if made.rank == 0:
        for file in folder.iterdir():
            os.kill(int(file.name), signal.SIGCONT)
    made.barrier()
    made.close()


def stop_together(folder):
    """One is named by all, the others are refused."""
    real = pending_request.PendingRequest.answer

    def answer(self, deadline):
        found = real(self, deadline)
        (folder / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGSTOP)
        return found

    with (
        mock.patch.object(pending_request.PendingRequest, "answer", answer),
        pytest.raises((Aborted, DeadlineExceeded), match=r"did not (answer|join as rank \d+) .*in time"),
    ):
        xvcomm.init()


def test_many_newcomers_are_stopped(tmp_path):
    with World(8) as world:
        restarted(world, tuple(range(2, 8)), go_on_without_many, tmp_path, join=stop_together, joining=(tmp_path,))


def go_on_after_a_failed_attempt(comm):
    """One newcomer dies while the ranks wait for it, and another one has just asked to join: it waits for the next `grow`."""
    left = lose(comm, (1, 3))
    made, _ = take_in(left, 1)
    if 3 not in made.job_ranks:
        made, _ = take_in(made, 1)
    works(made, (0, 2, 3))
    made.close()


def die_when_the_other_has_applied(folder):
    def confirm(self, session):
        (folder / "joins").touch()
        await_that((folder / "asked").exists)
        die()

    with mock.patch.object(growing.Attempt, "_confirm", confirm):
        xvcomm.init()


def apply_meanwhile(folder):
    real = pending_request.PendingRequest.answer

    def answer(self, deadline):
        (folder / "asked").touch()
        return real(self, deadline)

    await_that((folder / "joins").exists)
    with mock.patch.object(pending_request.PendingRequest, "answer", answer):
        join((0, 2, 3))


def test_an_attempt_fails_while_another_process_applies(tmp_path):
    with World(4) as world:
        for rank in range(4):
            world.submit(rank, go_on_after_a_failed_attempt)
        world.collect(1, 3)
        for rank, call in ((1, die_when_the_other_has_applied), (3, apply_meanwhile)):
            world.restart(rank)
            world.submit(rank, call, tmp_path)
        for outcome in world.collect(0, 2, 3):
            assert not isinstance(outcome, BaseException), outcome


def take_in_twice(comm, file):
    """The join request that was withdrawn is left out, and the second one of the same process is taken."""
    left = lose(comm, (1,))
    await_that(file.exists)
    made, _ = take_in(left, 2)
    works(made, comm.job_ranks)
    made.close()


def give_up_and_apply_again(file):
    with pytest.raises(DeadlineExceeded, match=r"did not call grow\(\) in time"):
        xvcomm.init(timeout=0.5)
    threading.Timer(0.5, file.touch).start()
    join((0, 1, 2))


def test_a_process_gives_up_and_applies_again(tmp_path):
    file = tmp_path / "given up"
    with World(3) as world:
        restarted(world, (1,), take_in_twice, file, join=give_up_and_apply_again, joining=(file,))


def take_in_slowly(comm):
    """A member needs longer than the newcomer would wait by itself."""
    left = lose(comm, (1,))
    real = growing.Session

    def slow(*args):
        time.sleep(3.0)
        return real(*args)

    with mock.patch.object(growing, "Session", slow) if left.rank == 1 else contextlib.nullcontext():
        made, _ = take_in(left, 1)
    works(made, comm.job_ranks)
    made.close()


def join_late():
    """It is taken in shortly before its own time is over."""
    real = pending_request.PendingRequest.answer

    def answer(self, deadline):
        found = real(self, deadline)
        time.sleep(max(0, deadline.left() - 0.2))
        return found

    with mock.patch.object(pending_request.PendingRequest, "answer", answer):
        comm = xvcomm.init(timeout=3.0)
    works(comm, (0, 1, 2))
    comm.close()


def test_the_members_time_applies():
    with World(3) as world:
        restarted(world, (1,), take_in_slowly, join=join_late, joining=())


def mixed_after_growing(comm):
    """A communicator that some shrink and others grow leaves what was decided about join requests as it was."""
    made, _ = take_in(lose(comm, (1,)), 1)
    shrink_or_grow(made)


def shrink_or_grow(comm):
    made, _ = grown(comm) if comm.rank == 0 else shrunk(comm)
    assert made.join_requests() == 0
    made.barrier()
    made, seconds = grown(made)
    assert seconds < 2.0
    works(made, (0, 1, 2))
    made.close()


def join_and_shrink():
    shrink_or_grow(xvcomm.init())


def test_some_shrink_after_growing():
    with World(3) as world:
        restarted(world, (1,), mixed_after_growing, join=join_and_shrink, joining=())


def go_on_with_the_others(comm, file):
    """A newcomer that fails, and asks again at once, waits for the next `grow`; the others of this one join."""
    left = lose(comm, (1, 3))
    real = growing.Attempt.run

    def run(self):
        outcome = real(self)
        await_that(file.exists)
        return outcome

    with mock.patch.object(growing.Attempt, "run", run):
        made, _ = take_in(left, 2)
    works(made, (0, 2, 3))
    one_more(made)


def one_more(comm):
    made, _ = take_in(comm, 1)
    works(made, (0, 1, 2, 3))
    made.close()


def join_and_take_in():
    comm = xvcomm.init()
    works(comm, (0, 2, 3))
    one_more(comm)


def fail_and_apply_again(file):
    bad = mock.Mock(side_effect=ResourceError("too many open files"))
    with mock.patch.object(session.equipment, "open_transports", bad), pytest.raises(ResourceError):
        xvcomm.init()
    real = pending_request.PendingRequest.answer

    def answer(self, deadline):
        file.touch()
        return real(self, deadline)

    with mock.patch.object(pending_request.PendingRequest, "answer", answer):
        join((0, 1, 2, 3))


def test_a_newcomer_fails_and_applies_again(tmp_path):
    file = tmp_path / "asked again"
    with World(4) as world:
        for rank in range(4):
            world.submit(rank, go_on_with_the_others, file)
        world.collect(1, 3)
        for rank, call in ((1, (fail_and_apply_again, file)), (3, (join_and_take_in,))):
            world.restart(rank)
            world.submit(rank, *call)
        for outcome in world.collect():
            assert not isinstance(outcome, BaseException), outcome


def fail_once(comm, failing):
    """A member's own failure: the newcomer waits for the next `grow`, whichever member has failed."""
    left = lose(comm, (1,))
    await_that(lambda: left.join_requests() > 0)
    left.barrier()
    bad = mock.Mock(side_effect=ResourceError("too many open files"))
    fails = left.rank == failing
    with (
        mock.patch.object(session.equipment, "open_transports", bad) if fails else contextlib.nullcontext(),
        pytest.raises(ResourceError if fails else Aborted, match="too many open files"),
    ):
        left.grow()
    made, _ = shrunk(left)
    assert made.join_requests() == 1
    made.barrier()
    made, _ = grown(made)
    works(made, comm.job_ranks)
    made.close()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_member_fails(failing):
    with World(3) as world:
        restarted(world, (1,), fail_once, failing)


def leave_waiting(comm, file):
    left = lose(comm, (1,))
    await_that(file.exists)
    left.barrier()
    made, _ = grown(left)
    works(made, left.job_ranks)
    made.close()


def wait_in_vain(file):
    with pytest.raises(DeadlineExceeded, match=r"did not call grow\(\) in time"):
        xvcomm.init(timeout=0.5)
    file.touch()
    die()


def test_the_ranks_do_not_grow_in_time(tmp_path):
    """The process that waits gives up, and those that grow later do without it."""
    file = tmp_path / "given up"
    with World(3) as world:
        restarted(world, (1,), leave_waiting, file, join=wait_in_vain, joining=(file,), dead=(1,))


def grow_without_the_store(comm):
    """The store in which the job has begun ends with rank 0: no process can ask to join any more."""
    left = lose(comm, (0,))
    assert left.join_requests() == 0
    made, _ = grown(left)
    works(made, left.job_ranks)
    made.close()


def find_no_store():
    with pytest.raises(StoreError):
        xvcomm.init(timeout=0.5)


def test_the_store_is_lost():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with World(3, env={"XVCOMM_STORE": address}) as world:
        restarted(world, (0,), grow_without_the_store, join=find_no_store, joining=())


def test_no_address():
    with pytest.raises(ConfigError, match="XVCOMM_REJOIN=1 needs XVCOMM_STORE"):
        xvcomm.init(env={"XVCOMM_REJOIN": "1", "XVCOMM_RANK": "1", "XVCOMM_SIZE": "2"})
