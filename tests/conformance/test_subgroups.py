"""Subgroups: created by their members only, repeatedly, and with members that disagree."""

import contextlib
import copy
import pickle
import threading
import time

import numpy as np
import pytest

from xvcomm.engine import context
from xvcomm.engine.session.session import Session
from xvcomm.errors import (
    Aborted,
    ArgumentError,
    ClosedError,
    DeadlineExceeded,
    MismatchError,
    NotPicklable,
    PeerLost,
    XvcommError,
)
from xvcomm.testing.signals import meet
from xvcomm.testing.world import World

LONG = "x" * 5000 + "/ä\udc80\0"


@pytest.fixture(scope="module", params=["a:4", "a,b,a,b"])
def world(request):
    with World(islands=request.param, timeout=100) as world:
        yield world


@pytest.fixture(scope="module")
def four():
    with World(4, timeout=100) as world:
        yield world


def raised(call, *args, **kwargs):
    """The exception of a call, or None."""
    try:
        call(*args, **kwargs)
    except XvcommError as error:
        return error
    return None


def works(comm, group, ranks):
    """Check that a group has the requested ranks in the requested order."""
    assert (group.rank, group.size) == (list(ranks).index(comm.rank), len(ranks))
    got = group.all_gather(np.array([comm.rank]))
    assert got.tolist() == list(ranks)
    total = group.all_reduce(np.full(70_000, float(comm.rank)))
    assert (total == sum(ranks)).all()
    labels = [comm.topology.island_of(rank).label for rank in ranks]
    assert [group.topology.island_of(r).label for r in range(group.size)] == labels
    if group.size > 1:
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        assert group.sendrecv(np.array([comm.rank]), after, np.array([-1]), before, channel=1).item() == ranks[before]


def some(comm, ranks, name):
    if comm.rank not in ranks:
        return None
    with comm.subgroup(ranks, name) as group:
        works(comm, group, list(ranks))
    return comm.rank


@pytest.mark.parametrize("name", ["x", "", LONG], ids=["short", "empty", "long"])
@pytest.mark.parametrize("ranks", [(0, 1), (3, 1), (2, 0, 3), (0, 1, 2, 3), (3, 2, 1, 0), (2,)], ids=str)
def test_only_the_members_call(four, ranks, name):
    got = four.run(some, ranks, name)
    assert got == [rank if rank in ranks else None for rank in range(4)]


def nested(comm):
    """Rows and columns of a mesh under one name, groups of groups, numpy integers, and repetition."""
    for _ in range(3):
        row = comm.subgroup(range(comm.rank // 2 * 2, comm.rank // 2 * 2 + 2), "mesh")
        column = comm.subgroup(np.array([comm.rank % 2, comm.rank % 2 + 2]), "mesh")
        works(comm, row, [comm.rank // 2 * 2, comm.rank // 2 * 2 + 1])
        works(comm, column, [comm.rank % 2, comm.rank % 2 + 2])
        everybody = comm.subgroup((3, 2, 1, 0), "mesh")
        half = everybody.subgroup([0, 1] if comm.rank > 1 else [3, 2], "mesh")
        works(comm, everybody, [3, 2, 1, 0])
        assert half.all_gather(np.array([comm.rank])).tolist() == ([3, 2] if comm.rank > 1 else [0, 1])
        for group in (row, half, everybody, column):
            group.close()


def test_meshes(world):
    world.run(nested)


def in_threads(comm, many):
    """Groups of all ranks, created concurrently by threads under different names."""
    failures = []

    def make(number):
        try:
            with comm.subgroup(range(comm.size), f"thread {number}") as group:
                assert group.all_reduce(np.array([number])).item() == number * comm.size
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(many)]
    order = threads if comm.rank % 2 else threads[::-1]
    for thread in order:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def test_names_tell_groups_apart(four):
    assert four.run(in_threads, 5) == [[]] * 4


def beside(comm):
    """Rank 3 and the parent are busy meanwhile, with a message and a collective that wait for the group's members."""
    if comm.rank == 3:
        work = comm.irecv(np.zeros(1), 0)
        total = comm.all_reduce(np.array([1]))
        return total.item(), work.wait().item()
    group = comm.subgroup([0, 1, 2], "beside")
    got = group.all_reduce(np.array([1])).item()
    group.close()
    if comm.rank == 0:
        comm.send(np.array([5.0]), 3)
    return comm.all_reduce(np.array([1])).item(), got


def test_creating_a_group_does_not_use_the_parents_operations(four):
    assert four.run(beside) == [(4, 3)] * 3 + [(4, 5.0)]


def refused(comm):
    me, other = comm.rank, (comm.rank + 1) % comm.size
    calls = [
        ([me, other, me], "x"), ([other], "x"), ([], "x"), ([me, comm.size], "x"), ([me, -1], "x"),
        ([me, 1.5], "x"), ([me, "1"], "x"), (7, "x"), ([me, other], 7), ([me, other], None), ([me, other], b"x"),
    ]  # fmt: skip
    errors = [raised(comm.subgroup, ranks, name) for ranks, name in calls]
    assert all(isinstance(error, ArgumentError) and "subgroup" in str(error) for error in errors), errors
    return [str(error) for error in errors[:4]]


def test_invalid_arguments(four):
    twice, absent, empty, too_large = four.run(refused)[1]
    assert "rank 1 occurs twice in ranks 1, 2, 1" in twice
    assert "this rank, 1, is not in ranks 2" in absent and "is not in ranks" in empty
    assert "rank 4: ranks of this communicator go from 0 to 3" in too_large
    four.run(nested)


def differing(comm, lists, timeout):
    """Every rank's different arguments; the error and its time, and whether the parent still works."""
    ranks = lists[comm.rank]
    started = time.monotonic()
    error = None if ranks is None else raised(comm.subgroup, ranks, f"differing {lists}", timeout=timeout)
    seconds = time.monotonic() - started
    comm.barrier()
    return [error, seconds]


@pytest.mark.parametrize(
    "lists",
    [
        ((0, 1), (1, 0), None, None),
        ((0, 1, 2), (0, 1), (0, 1, 2), None),
        ((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3), (3, 2, 1, 0)),
    ],
)
def test_members_that_differ(four, lists):
    outcomes = four.run(differing, lists, 100)
    for rank, (error, seconds) in enumerate(outcomes):
        assert seconds < 60
        if lists[rank] is None:
            assert error is None
            continue
        assert isinstance(error, MismatchError) and error.rank == rank, (rank, error)
        assert f"subgroup 'differing {lists}': rank " in str(error) and str(error).count(" gave ") == 2


@pytest.mark.parametrize(
    ("lists", "missing"),
    [
        (((0, 1), None, None, None), {0: "rank 1"}),
        (((0, 1, 2, 3), None, (0, 1, 2, 3), None), {0: "ranks 1, 3", 2: "ranks 1, 3"}),
        (((0, 1), (1, 2), (2, 0), None), {0: "rank 1", 1: "rank 2", 2: "rank 0"}),
    ],
)
def test_members_that_do_not_come(four, lists, missing):
    outcomes = four.run(differing, lists, 0.5)
    for rank, (error, seconds) in enumerate(outcomes):
        if rank in missing:
            assert isinstance(error, DeadlineExceeded) and error.rank == rank and 0.4 < seconds < 60
            assert f": {missing[rank]} did not join in time" in str(error), error
            assert error.peer == int(missing[rank].split()[1].strip(","))
        else:
            assert error is None


def late(comm):
    """Rank 1 comes after rank 0 has given up."""
    if comm.rank > 1:
        return []
    if comm.rank == 0:
        errors = [raised(comm.subgroup, [0, 1], "late", timeout=0.2)]
        comm.send(np.zeros(1), 1)
    else:
        comm.recv(np.zeros(1), 0)
        errors = [raised(comm.subgroup, [0, 1], "late", timeout=10)]
    with comm.subgroup([0, 1], "late") as group:
        works(comm, group, [0, 1])
    return errors


def test_a_member_that_comes_late_raises(four):
    for (error,) in four.run(late)[:2]:
        assert isinstance(error, DeadlineExceeded) and "rank 1 did not join in time" in str(error)


def parent_ends(comm, how):
    """The parent ends while ranks 0 and 1 wait for rank 2 to create a group."""
    sub = comm.split(0)
    if comm.rank < 2:
        errors = [raised(sub.subgroup, [0, 1, 2], "never")]
    else:
        time.sleep(0.3)
        if comm.rank == 2:
            sub.abort("no more") if how == "abort" else sub.close()
        errors = []
    if comm.rank == 2 and how == "close":
        errors = [raised(sub.subgroup, [2], "x")]
    sub.close()
    return errors


def test_an_abort_of_the_parent_ends_the_creation_of_a_group(four):
    for errors in four.run(parent_ends, "abort")[:2]:
        assert isinstance(errors[0], Aborted) and "no more" in str(errors[0])


def parent_late(comm):
    """The parent fails by a deadline while ranks 0 and 1 wait for rank 2 to create a group."""
    sub = comm.split(0)
    if comm.rank < 2:
        errors = [raised(sub.subgroup, [0, 1, 2], "never")]
    elif comm.rank == 2:
        errors = [raised(sub.recv, np.zeros(1), 3, timeout=0.3)]
    else:
        errors = [raised(sub.recv, np.zeros(1), 0)]
    sub.close()
    return errors


def test_the_parents_deadline_ends_the_creation_of_a_group(four):
    for (error,) in four.run(parent_late):
        assert isinstance(error, DeadlineExceeded) and error.peer is not None, error
        assert "did not join" not in str(error), error


def test_a_closed_communicator_creates_no_group():
    with World(4, timeout=100) as world:
        started = time.monotonic()
        *waited, closed, _ = world.run(parent_ends, "close")
        assert time.monotonic() - started < 60
    assert isinstance(closed[0], ClosedError)
    for (error,) in waited:
        assert isinstance(error, PeerLost) and error.peer == 2 and "rank 2" in str(error), error


def killed(comm):
    return [raised(comm.subgroup, [0, 1, 2], "killed")] if comm.rank < 2 else time.sleep(300)


def test_a_member_is_killed():
    with World(3, timeout=100) as world:
        world.run(meet)
        for rank in range(3):
            world.submit(rank, killed)
        time.sleep(0.3)
        started = time.monotonic()
        world.kill(2)
        *outcomes, _ = world.collect()
        assert time.monotonic() - started < 60
    for (error,) in outcomes:
        assert isinstance(error, PeerLost) and error.peer == 2 and "rank 2" in str(error), error


class Interrupted(Exception):
    """Raised by a signal handler."""


def interrupted(comm, kind, victim):
    """A member closes after all members have met and before it has set up its part of the group."""

    def make():
        return comm.subgroup([0, 1, 2], "interrupted") if kind == "subgroup" else comm.split(0)

    if comm.rank != victim:
        return [raised(lambda: make().all_reduce(np.ones(4)))]
    with pytest.raises(Interrupted), comm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(context.Context, "_open_contract", refuse)
        patch.setattr(Session, "telling", contextlib.nullcontext)
        make()
    return [None]


def refuse(self, store, deadline):
    raise Interrupted


@pytest.mark.parametrize("topology", ["a:3", "a,b,c"])
@pytest.mark.parametrize("kind", ["split", "subgroup"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_member_closes_while_a_group_is_created(topology, kind, victim):
    """Rank 0 creates the shared memory that the others wait for; the others only map it."""
    with World(islands=topology, timeout=100) as world:
        world.run(meet)
        started = time.monotonic()
        outcomes = world.run(interrupted, kind, victim)
        assert time.monotonic() - started < 60
    for rank, (error,) in enumerate(outcomes):
        assert rank == victim or (isinstance(error, PeerLost) and error.peer == victim), outcomes


def many(comm, count):
    """Many groups that are open at the same time."""
    groups = [comm.subgroup([0, 1], "many") for _ in range(count)]
    assert [group.all_reduce(np.array([i])).item() for i, group in enumerate(groups)] == [2 * i for i in range(count)]
    for group in groups:
        group.close()


def test_dozens_of_groups_at_once():
    with World(2, timeout=100) as world:
        world.run(many, 60)


def colours(comm):
    """Any integer is a valid colour and key; other values are rejected before any communication."""
    for color, key in ((True, False), (np.int64(1), np.int32(-comm.rank)), (np.uint8(7), True)):
        with comm.split(color, key) as group:
            assert group.size == comm.size
    for color, key in ((1.0, 0), (b"x", 0), (0, 0.5), (0, None)):
        assert isinstance(raised(comm.split, color, key), ArgumentError)


def test_colours(four):
    four.run(colours)


def copied(comm):
    for copying in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(NotPicklable, match="is bound to its process") as caught:
            copying(comm)
        assert isinstance(caught.value, TypeError)


def test_communicators_are_not_copied(four):
    four.run(copied)
