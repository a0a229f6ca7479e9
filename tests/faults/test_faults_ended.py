"""The job ends while a process waits to join it, or before it comes: it learns of it at once."""

import contextlib

import pytest
from growing import lose, restarted, store_address, take_in
from shrinking import die
from stores import variables

import xvcomm
from xvcomm.errors import Aborted, PeerLost
from xvcomm.testing.signals import await_that
from xvcomm.testing.world import World

ISLANDS = {"islands": "a:2,b:1"}
HOSTS = {"hosts": "a:2,b:1"}


def end_before(comm):
    """The ranks end without taking in the process that waits."""
    left = lose(comm, (1,))
    await_that(lambda: left.join_requests() > 0)
    left.barrier()
    left.close()


def refused():
    with pytest.raises(Aborted, match="the job has ended"):
        xvcomm.init()


@pytest.mark.parametrize("places", [ISLANDS, HOSTS], ids=["islands", "hosts"])
def test_the_job_ends(places):
    """A process that waits to join learns of it."""
    with World(**places) as world:
        restarted(world, (1,), end_before, join=refused, joining=())


def die_at_last(comm, folder, first_leaves):
    """All ranks that are left die, or the first one leaves in good order before."""
    left = lose(comm, (1,))
    await_that(lambda: left.join_requests() > 0)
    with contextlib.suppress(PeerLost):  # the first one that is through may die while another one is still in it
        left.barrier()
    if not first_leaves:
        die()
    if left.rank == 0:
        left.close()
        (folder / "left").touch()
    else:
        await_that((folder / "left").exists)
        die()


def told_to_start_again():
    with pytest.raises(
        Aborted, match="all its ranks have died or left; start the whole job again, without XVCOMM_REJOIN"
    ):
        xvcomm.init(timeout=40)


@pytest.mark.parametrize("first_leaves", [False, True], ids=["all die", "one leaves"])
@pytest.mark.parametrize("kind", ["islands", "hosts", "file"])
def test_the_last_rank_dies(kind, first_leaves, tmp_path):
    """A process that waits to join learns of it, though no rank tells it."""
    env = variables("file" if kind == "file" else "launcher", tmp_path / "store")
    with World(**(HOSTS if kind == "hosts" else ISLANDS), env=env) as world:
        dead, call = (2,) if first_leaves else (0, 2), (die_at_last, tmp_path, first_leaves)
        restarted(world, (1,), *call, join=told_to_start_again, joining=(), dead=dead)


def take_in_and_die(comm, file):
    made, _ = take_in(lose(comm, (1,)), 1)
    die_when_one_waits(made, file)


def join_and_die(file):
    die_when_one_waits(xvcomm.init(), file)


def die_when_one_waits(comm, file):
    comm.barrier()
    file.touch()
    await_that(lambda: comm.join_requests() > 0)
    comm.barrier()
    die()


def wait_for_those_that_die(address, file):
    await_that(file.exists)
    with pytest.raises(Aborted, match="all its ranks have died"):
        xvcomm.init(rank=3, size=4, store=address, timeout=40)


@pytest.mark.parametrize("places", [ISLANDS, HOSTS], ids=["islands", "hosts"])
def test_the_last_rank_of_a_grown_job_dies(places, tmp_path):
    file = tmp_path / "grown"
    with World(**places) as world, World(1) as beside:
        address = world.run(store_address)[0]
        beside.kill(0)
        beside.restart(0, XVCOMM_LOCAL_RANK="", XVCOMM_LOCAL_SIZE="")
        for rank in range(3):
            world.submit(rank, take_in_and_die, file)
        world.collect(1)
        world.restart(1)
        world.submit(1, join_and_die, file)
        beside.submit(0, wait_for_those_that_die, address, file)
        assert all(isinstance(outcome, EOFError) for outcome in world.collect())
        (outcome,) = beside.collect()
        assert not isinstance(outcome, BaseException), outcome


def end(comm, folder):
    rank = comm.rank
    comm.close()
    (folder / str(rank)).touch()


def come_late(address, folder, ranks):
    await_that(lambda: len(list(folder.iterdir())) == ranks)
    with pytest.raises(Aborted, match="the job has ended"):
        xvcomm.init(rank=2, size=3, store=address, timeout=100)


def test_a_process_that_comes_after_the_end(tmp_path):
    """It learns at once that the job has ended, though that lost no rank and has never grown."""
    with World(2) as world, World(1) as beside:
        address = world.run(store_address)[0]
        for rank in range(2):
            world.submit(rank, end, tmp_path)
        beside.kill(0)
        beside.restart(0, XVCOMM_LOCAL_RANK="", XVCOMM_LOCAL_SIZE="")
        beside.submit(0, come_late, address, tmp_path, 2)
        for outcome in (*world.collect(), *beside.collect()):
            assert not isinstance(outcome, BaseException), outcome


def end_with_one_waiting(comm):
    await_that(lambda: comm.join_requests() > 0)
    comm.barrier()
    comm.close()


def wait_until_the_end(address):
    with pytest.raises(Aborted, match="the job has ended"):
        xvcomm.init(rank=2, size=3, store=address, timeout=100)


def test_the_job_ends_with_its_folder(tmp_path):
    """The last rank removes the folder, in which a process waits."""
    (tmp_path / "store").mkdir(mode=0o700)
    address = f"file://{tmp_path / 'store'}"
    with World(2, env={"XVCOMM_STORE": address}) as world, World(1) as beside:
        beside.kill(0)
        beside.restart(0, XVCOMM_LOCAL_RANK="", XVCOMM_LOCAL_SIZE="")
        for rank in range(2):
            world.submit(rank, end_with_one_waiting)
        beside.submit(0, wait_until_the_end, address)
        for outcome in (*world.collect(), *beside.collect()):
            assert not isinstance(outcome, BaseException), outcome
