"""Ranks with different calls all raise MismatchError, which names two of them and their calls.

Each case runs on a communicator of its own, split off the processes' communicator, because a mismatch makes it unusable.
"""

import time

import numpy as np
import pytest

from xvcomm.errors import MismatchError
from xvcomm.testing import failures
from xvcomm.testing.world import World

SOON = 60.0
TOPOLOGIES = ["a:2", "a:2,b:2", "a,b,c"]


@pytest.fixture(scope="module", params=TOPOLOGIES)
def world(request):
    with World(islands=request.param, timeout=100) as world:
        yield world


@pytest.fixture(scope="module", params=["a:2", "a,b"])
def pair(request):
    with World(islands=request.param, timeout=100) as world:
        yield world


def calls(comm, name, odd):
    """One rank's side of a mismatch: its call, the buffer that must not change, and its expected description."""
    x = np.full(4092, 7, np.float32)
    part = x[: 4092 // comm.size]
    other = x.astype(np.float64) if odd else x
    shorter = x[:4091] if odd else x
    table = {
        "dtype": (lambda: comm.all_reduce(other), other, f"4092 x {other.dtype}"),
        "count": (lambda: comm.all_reduce(shorter), shorter, f"{shorter.size} x float32"),
        "op": (lambda: comm.all_reduce(x, "max" if odd else "sum"), x, "(max)" if odd else "(sum)"),
        "collective": (
            (lambda: comm.all_gather(part)) if odd else (lambda: comm.all_reduce(x)), x,
            "all_gather of" if odd else "all_reduce(sum) of",
        ),
        "barrier": (comm.barrier if odd else (lambda: comm.all_reduce(x)), x, "barrier" if odd else "all_reduce"),
        "broadcast_root": (lambda: comm.broadcast(x, root=int(odd)), x, f"with root {int(odd)}"),
        "reduce_root": (lambda: comm.reduce(x, root=int(odd)), x, f"with root {int(odd)}"),
        "gather_root": (lambda: comm.gather(part, root=int(odd)), x, f"with root {int(odd)}"),
        "scatter_dtype": (
            lambda: comm.scatter(other if comm.rank == 0 else None, out=np.zeros(4092 // comm.size, other.dtype)), x,
            f" x {other.dtype}",
        ),
        "asynchronous": (lambda: comm.all_reduce(other, async_op=True).wait(), other, f"4092 x {other.dtype}"),
    }  # fmt: skip
    return table[name]


NAMES = [
    "dtype", "count", "op", "collective", "barrier", "broadcast_root", "reduce_root", "gather_root", "scatter_dtype",
    "asynchronous",
]  # fmt: skip


def differ(comm, name, odd_rank, late):
    """Make a different call on one rank; returns this rank's error, twice, and whether its buffer changed."""
    sub = comm.split(0)
    call, buffer, description = calls(sub, name, comm.rank == odd_rank)
    time.sleep(0.15 if late else 0.0)
    started = time.monotonic()
    errors = []
    for attempt in (call, sub.barrier):
        try:
            attempt()
        except MismatchError as error:
            errors.append(error)
    seconds = time.monotonic() - started
    sub.close()
    return errors, seconds, bool((buffer == 7).all()), description


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("late", ["first", "odd"])
def test_collectives(world, name, late):
    """Whether the odd rank or the others come later, all raise, and no buffer changes."""
    odd = world.size - 1
    for rank in range(world.size):
        world.submit(rank, differ, name, odd, (rank == odd) == (late == "odd"))
    outcomes = world.collect()
    descriptions = [o[3] for o in outcomes]
    for rank, (errors, seconds, untouched, _) in enumerate(outcomes):
        # Who came first and needed nobody, a root for instance, is told by its next call.
        assert errors, (rank, name)
        assert seconds < SOON
        for error in errors:
            text = str(error)
            assert error.rank == rank
            assert f"rank {odd} on " in text and descriptions[odd] in text, text
            assert any(f"rank {r} on " in text for r in range(odd)) and descriptions[0] in text, text
        if odd in (rank, errors[0].peer):
            assert errors[0].peer is not None and errors[0].peer != rank
        # Inside an island of agreeing ranks an in-place reduction may have begun.
        if comm_is_native(world) or rank == odd:
            assert untouched, rank


def comm_is_native(world):
    return world.run(is_native)[0]


def is_native(comm):
    return comm.topology.homogeneous


def message(comm, case, sender):
    """Send on one rank what the other does not expect; a second message raises at a sender that had completed."""
    sub = comm.split(0)
    size = 1 << 21 if case.startswith("large") else 16
    x, buffer = np.full(size, 3, np.float32), np.full(size, 7, np.float32)
    started = time.monotonic()
    errors = []
    try:
        if comm.rank == sender:
            sent = {"dtype": x.astype(np.float64), "count": x[:-1], "tag": x}[case.removeprefix("large_")]
            sub.send(sent, 1 - comm.rank, tag=9 if case.endswith("tag") else 5)
        else:
            time.sleep(0.1)
            sub.recv(buffer, 1 - comm.rank, tag=5)
    except MismatchError as error:
        errors.append(error)
    time.sleep(0.2)
    try:
        if comm.rank == sender:
            sub.recv(buffer, 1 - comm.rank)
        else:
            sub.send(x, 1 - comm.rank)
    except MismatchError as error:
        errors.append(error)
    seconds = time.monotonic() - started
    sub.close()
    return errors, seconds, bool((buffer == 7).all())


@pytest.mark.parametrize("case", ["dtype", "count", "tag", "large_dtype", "large_count", "large_tag"])
@pytest.mark.parametrize("sender", [0, 1])
def test_point_to_point(pair, case, sender):
    outcomes = pair.run(message, case, sender)
    size = 1 << 21 if case.startswith("large") else 16
    sent = {
        "dtype": f"{size} x float64, tag 5", "count": f"{size - 1} x float32, tag 5", "tag": f"{size} x float32, tag 9"
    }[case.removeprefix("large_")]  # fmt: skip
    for rank, (errors, seconds, untouched) in enumerate(outcomes):
        # A small message lay in the ring before anybody looked at it: its sender learns by the next call.
        assert len(errors) == (1 if rank == sender and not case.startswith("large") else 2)
        assert untouched and seconds < SOON
        for error in errors:
            assert error.rank == rank and error.peer == 1 - rank
            assert f"rank {sender} on " in str(error) and f"rank {1 - sender} on " in str(error)
            assert f"sent {sent}" in str(error) and f"expected {size} x float32, tag 5" in str(error)


def test_a_mismatched_message_of_a_rank_that_left(world):
    """Its sender had completed the send, and could not be informed."""
    world.run(failures.check_message_mismatch_with_the_departed)


def third(comm):
    """Ranks 0 and 1 disagree about a message while rank 2 waits for rank 0, and rank 3 is idle."""
    sub = comm.split(0)
    error = None
    try:
        if comm.rank == 0:
            sub.send(np.zeros(4), 1, tag=1)
            sub.recv(np.zeros(4), 1)
        elif comm.rank == 1:
            sub.recv(np.zeros(4), 0, tag=2)
        elif comm.rank == 2:
            sub.recv(np.zeros(4), 0)
        else:
            time.sleep(0.5)
            sub.barrier()
    except MismatchError as caught:
        error = caught
    sub.close()
    return error


def test_uninvolved_ranks_raise_mismatch_too():
    with World(4) as world:
        for error in world.outcomes(third):
            assert isinstance(error, MismatchError)
            assert "sent 4 x float64, tag 1" in str(error) and "expected 4 x float64, tag 2" in str(error)
            assert "rank 0 on " in str(error) and "rank 1 on " in str(error)


def mixed(comm, kind):
    """One rank's messages and the other's collectives never match, until both call a collective, or one waits."""
    sub = comm.split(0)
    try:
        if comm.rank == 0:
            sub.send(np.zeros(4), 1)
            sub.barrier()
        elif kind == "all_reduce":
            sub.all_reduce(np.zeros(4))
    finally:
        sub.close()


def test_a_message_where_the_other_calls_a_collective(pair):
    for outcome in pair.outcomes(mixed, "all_reduce"):
        assert isinstance(outcome, MismatchError)
        assert "called barrier" in str(outcome) and "called all_reduce(sum) of 4 x float64" in str(outcome)


def split_by(comm, colours):
    comm.split(colours[comm.rank])


def still_works(comm):
    return float(comm.all_reduce(np.ones(1))[0])


def test_split_with_colours_of_different_types(world):
    colours = [1] * (world.size - 1) + ["one"]
    for outcome in world.outcomes(split_by, colours):
        assert isinstance(outcome, MismatchError)
        assert "rank 0 gave the int 1" in str(outcome) and f"rank {world.size - 1} gave the str 'one'" in str(outcome)
    assert world.run(still_works) == [world.size] * world.size
