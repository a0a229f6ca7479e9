"""Processes that are started again find the job that runs, also if it is not the first one of its processes."""

import gc
import time
import weakref

import pytest
from growing import join, lose, restarted, take_in
from shrinking import die, works
from stores import KINDS, variables

import xvcomm
from xvcomm.errors import DeadlineExceeded
from xvcomm.testing.signals import await_that
from xvcomm.testing.world import World


@pytest.fixture(params=KINDS)
def store(request, tmp_path):
    """Variables of a job with each kind of store."""
    return variables(request.param, tmp_path / "store")


def join_and_begin_anew(everyone):
    join(everyone)
    join(everyone)


def second_and_third(comm):
    """A rank is lost in the second job of these processes, and takes part in the third."""
    everyone = comm.job_ranks
    comm.close()
    left = lose(xvcomm.init(), (1,))
    made, _ = take_in(left, 1)
    works(made, everyone)
    made.close()
    join(everyone)


def test_the_second_job_of_these_processes(store):
    with World(2, env=store) as world:
        restarted(world, (1,), second_and_third, join=join_and_begin_anew)


def wait_in_vain(file):
    for timeout, least, most in ((None, 2, 8), (0.1, 0, 2)):
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"did not call grow\(\) in time"):
            xvcomm.init(timeout=timeout)
        assert least <= time.monotonic() - begun < most
    file.touch()


def go_on_alone(comm, file):
    left = lose(comm, (1,))
    await_that(file.exists)
    left.close()


def test_the_wait_has_a_limit_of_its_own(tmp_path):
    """Not that of operations; the argument of `init` comes first."""
    file = tmp_path / "given up"
    with World(2, env={"XVCOMM_REJOIN_TIMEOUT": "2"}) as world:
        restarted(world, (1,), go_on_alone, file, join=wait_in_vain, joining=(file,))


def once(comm):
    everyone = comm.job_ranks
    made, _ = take_in(lose(comm, (1,)), 1)
    works(made, everyone)
    made.close()


def test_a_folder_that_was_left(tmp_path):
    """A job that has ended left the folder of a later communicator, in which no process lives."""
    (tmp_path / "store" / "1").mkdir(parents=True, mode=0o700)
    with World(2, env={"XVCOMM_STORE": f"file://{tmp_path / 'store'}"}) as world:
        restarted(world, (1,), once)


def test_no_job_runs(tmp_path):
    env = {"XVCOMM_REJOIN": "1", "XVCOMM_RANK": "1", "XVCOMM_SIZE": "2", "XVCOMM_STORE": f"file://{tmp_path / 'store'}"}
    with pytest.raises(DeadlineExceeded, match=r"no job runs in this store, .* unset XVCOMM_REJOIN"):
        xvcomm.init(env=env, timeout=0.5)


def end_before_the_next(comm):
    """A rank ends between two jobs of these processes, while the others begin the second one."""
    everyone, victim = comm.job_ranks, comm.rank == 1
    comm.close()
    if victim:
        die()
    join(everyone)


def test_a_rank_ends_between_two_jobs(store):
    """The others wait for it, so the process in its place begins the second one with them."""
    with World(2, env=store) as world:
        restarted(world, (1,), end_before_the_next)


ROUNDS = 8


def grow_often(comm):
    """How many of the jobs that it was part of this process has in memory, of which it holds the first one."""
    jobs, last = [weakref.ref(comm.identity[0])], comm
    with comm:
        for _ in range(ROUNDS):
            last, _ = take_in(lose(last, (1,)), 1)
            jobs.append(weakref.ref(last.identity[0]))
        last.barrier()
        gc.collect()
        return sum(job() is not None for job in jobs)


def join_until(last):
    comm = xvcomm.init()
    if last:
        with comm:
            comm.barrier()
    else:
        lose(comm, (1,))


def test_jobs_before_are_forgotten():
    with World(2) as world:
        world.submit(0, grow_often)
        world.submit(1, grow_often)
        for count in range(ROUNDS):
            assert isinstance(world.collect(1)[0], EOFError)
            world.restart(1)
            world.submit(1, join_until, count == ROUNDS - 1)
        kept, joined = world.collect()
        assert joined is None and kept == 2
