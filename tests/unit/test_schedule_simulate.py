"""The simulator rejects invalid schedules and names the rank and step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from xvcomm.errors import ScheduleError
from xvcomm.schedule import build
from xvcomm.schedule.semantics import combine
from xvcomm.schedule.simulate import run
from xvcomm.schedule.steps import (
    Buf,
    Collective,
    Copy,
    Get,
    GetReduce,
    Lane,
    Native,
    Put,
    Reduce,
    Request,
    Schedule,
    Span,
    Step,
)
from xvcomm.types.dtype import ReduceOp
from xvcomm.types.topology import Topology

TOPOLOGY = Topology.from_labels("aabb")
REQUEST = Request(Collective.ALL_REDUCE, 4, count=96)
INPUTS = [np.arange(96, dtype="i4") * (rank + 1) for rank in range(4)]
Schedules = list[Schedule]


def schedules(segment: int = 32, request: Request = REQUEST, topology: Topology = TOPOLOGY) -> Schedules:
    return [build(request, topology, rank, segment) for rank in range(topology.size)]


def simulate(plans: Schedules, **how: Any) -> list[Any]:
    return run([REQUEST] * 4, plans, TOPOLOGY, INPUTS, **how)


def edited(plans: Schedules, rank: int, edit: Callable[[list[Step]], None]) -> Schedules:
    """The schedules with one rank's steps changed; dependencies are dropped, because step indices change."""
    steps = [replace(step, after=()) for step in plans[rank].steps]
    edit(steps)
    changed = Schedule(tuple(steps), plans[rank].scratch)
    return [changed if r == rank else plan for r, plan in enumerate(plans)]


def first(steps: list[Step], kind: type[Step]) -> int:
    return next(i for i, step in enumerate(steps) if isinstance(step, kind))


def by_hand(*plans: tuple[Step, ...], scratch: int = 0, topology: Topology | None = None) -> list[Any]:
    """Run hand-written all-reduces of 4 elements, by default with one rank per island."""
    topology = topology or Topology.from_labels([str(r) for r in range(len(plans))])
    request = Request(Collective.ALL_REDUCE, 4, count=4)
    inputs = [np.full(4, r + 1, "i4") for r in range(len(plans))]
    return run([request] * len(plans), [Schedule(plan, scratch) for plan in plans], topology, inputs)


IN, OUT, TMP = (Span(buf, 0, 4) for buf in (Buf.IN, Buf.OUT, Buf.TMP))
PUT, GET = Put(Lane.SEND, (), 1, IN), Get(Lane.RECV, (), 0, OUT)


def test_the_unbroken_schedule_runs() -> None:
    for order in ("sequential", "concurrent"):
        for result in simulate(schedules(), order=order):
            np.testing.assert_array_equal(result, np.arange(96) * 10)


@pytest.mark.parametrize("order", ("sequential", "concurrent"))
def test_a_dropped_put_leaves_its_reader_waiting(order: str) -> None:
    plans = schedules(segment=0)
    kept = list(plans[0].steps)
    dropped = first(kept, Put)
    assert all(wait < dropped for step in kept[: dropped + 2] for wait in step.after)
    plans[0] = replace(plans[0], steps=(*kept[:dropped], kept[dropped + 1]))
    with pytest.raises(ScheduleError, match=r"rank \d, step \d+ \(.*\): waits for ever"):
        simulate(plans, order=order)


def test_a_message_of_another_size_is_refused_with_both_ends() -> None:
    def shorten(steps: list[Step]) -> None:
        index = first(steps, Put)
        put = steps[index]
        assert isinstance(put, Put)
        steps[index] = replace(put, src=Span(put.src.buf, put.src.start, put.src.count - 1))

    with pytest.raises(ScheduleError, match=r"rank 2, step \d+ \(get_reduce rank 0.*rank 0 sends \d+ elements in step"):
        simulate(edited(schedules(), 0, shorten))


def test_swapped_messages_to_one_rank_give_another_result() -> None:
    def swap(steps: list[Step]) -> None:
        one, two = [i for i, step in enumerate(steps) if isinstance(step, Put)][:2]
        steps[one], steps[two] = replace(steps[two], after=()), replace(steps[one], after=())

    try:
        results = simulate(edited(schedules(), 0, swap))
    except ScheduleError:
        return
    assert any((result != np.arange(96) * 10).any() for result in results)


def test_swapped_native_calls_are_refused() -> None:
    def swap(steps: list[Step]) -> None:
        natives = [i for i, step in enumerate(steps) if isinstance(step, Native)]
        one, two = natives[1:3]
        steps[one], steps[two] = steps[two], steps[one]

    with pytest.raises(ScheduleError, match="members make different calls"):
        simulate(edited(schedules(), 1, swap))


def test_native_counts_must_be_equal() -> None:
    def uneven(steps: list[Step]) -> None:
        index = first(steps, Native)
        call = steps[index]
        assert isinstance(call, Native)
        steps[index] = replace(call, counts=(12, 20))

    with pytest.raises(ScheduleError, match="members make different calls"):
        simulate(edited(schedules(), 1, uneven))


@pytest.mark.parametrize("labels", ("aabb", "aabbcc"))
def test_a_missing_dependency_is_detected(labels: str) -> None:
    topology = Topology.from_labels(labels)
    inputs = [np.arange(96, dtype="i4") * (rank + 1) for rank in range(topology.size)]
    plans = schedules(topology=topology)
    stripped = [Schedule(tuple(replace(s, after=()) for s in p.steps), p.scratch) for p in plans]

    def broken(order: Any, seed: int) -> bool:
        try:
            results = run([REQUEST] * topology.size, stripped, topology, inputs, order=order, seed=seed)
        except ScheduleError:
            return True
        return any((result != sum(inputs)).any() for result in results)

    assert not any(broken("sequential", seed) for seed in range(5))
    assert any(broken("concurrent", seed) for seed in range(20))


@pytest.mark.parametrize("kind", (Put, GetReduce, Native))
def test_each_after_of_a_kind_is_needed(kind: type[Step]) -> None:
    """Dropping `after` from the steps of one kind alone is found out."""
    plans = schedules(segment=16)
    stripped = [
        Schedule(tuple(replace(s, after=()) if isinstance(s, kind) else s for s in p.steps), p.scratch) for p in plans
    ]
    found = False
    for seed in range(40):
        try:
            found |= any((r != np.arange(96) * 10).any() for r in simulate(stripped, order="concurrent", seed=seed))
        except ScheduleError:
            found = True
    assert found


def test_deadlocks_are_detected() -> None:
    # Each first waits for the other's put, which comes after its own get and a copy.
    def plan(peer: int) -> tuple[Step, ...]:
        return Get(Lane.RECV, (), peer, TMP), Copy(Lane.NATIVE, (0,), TMP, OUT), Put(Lane.SEND, (), peer, IN)

    with pytest.raises(ScheduleError, match=r"rank 0, step 0 \(get rank 1 -> tmp\[0:4\]\): waits for ever; 1 more"):
        by_hand(plan(1), plan(0), scratch=4)


def test_neighbouring_border_steps_progress_together() -> None:
    def plan(peer: int) -> tuple[Step, ...]:
        swap = (Get(Lane.RECV, (), peer, TMP), Put(Lane.SEND, (), peer, IN))
        order = (IN, TMP) if peer else (TMP, IN)
        return (*swap, Reduce(Lane.RECV, (1,), order, OUT))

    for result in by_hand(plan(1), plan(0), scratch=4):
        np.testing.assert_array_equal(result, [3] * 4)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((Put(Lane.SEND, (), 1, OUT),), "reads out.*element 0 was never written"),
        ((Put(Lane.SEND, (), 1, TMP),), "reads tmp.*element 0 was never written"),
        ((Put(Lane.SEND, (), 1, Span(Buf.IN, 2, 4)),), r"in\[2:6\] exceeds its buffer of 4"),
        ((PUT, Copy(Lane.NATIVE, (), IN, Span(Buf.OUT, 0, 3))), r"4 elements cannot fill out\[0:3\]"),
        ((PUT, Copy(Lane.NATIVE, (), IN, IN)), "writes to the caller's input"),
        ((PUT,), "rank 0 does not complete its output"),
        ((Put(Lane.RECV, (), 1, IN),), "cannot run on the recv lane"),
        ((Put(Lane.SEND, (0,), 1, IN),), "`after` must name earlier steps"),
    ],
)
def test_rules_of_memory_and_lanes(steps: tuple[Step, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        by_hand(steps, (GET,), scratch=4)


def test_a_native_call_may_not_half_overlap_its_source() -> None:
    call = Native(Lane.NATIVE, (), Collective.ALL_REDUCE, Span(Buf.OUT, 0, 2), Span(Buf.OUT, 1, 2))
    plan = (Copy(Lane.NATIVE, (), IN, OUT), call)
    with pytest.raises(ScheduleError, match="overlap without coinciding"):
        by_hand(plan, plan, topology=Topology.from_labels("aa"))


def test_low_precision_accumulates_in_float32() -> None:
    terms = [np.array([x], "float16") for x in (2048, 1, 1)]
    assert combine(ReduceOp.SUM, terms)[0] == 2050
    assert combine(ReduceOp.SUM, [combine(ReduceOp.SUM, terms[:2]), terms[2]])[0] == 2048
