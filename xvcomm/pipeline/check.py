"""Checks that a schedule is complete, correctly ordered, consistent between ranks, and free of deadlock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xvcomm.errors import ArgumentError, ScheduleError
from xvcomm.pipeline.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Layout,
    Message,
    Program,
    RecvActivation,
    RecvGradient,
    Schedule,
    SendActivation,
    SendGradient,
    Value,
    flatten,
)
from xvcomm.pipeline.deadlock import find_deadlock
from xvcomm.pipeline.stage import StageSpec


@dataclass(frozen=True, slots=True)
class Report:
    """Resource use of a checked schedule.

    Attributes:
        activations: for each rank, the maximum number of micro-batches (over all its chunks) whose activations it keeps at a
            time: from Forward to Backward or BackwardWeight.
        buffers: for each rank, the maximum number of receives that are posted and not yet used by a computation.
        messages: messages per step, over all ranks.
    """

    activations: tuple[int, ...]
    buffers: tuple[int, ...]
    messages: int


def check(schedule: Schedule, specs: Sequence[StageSpec] | None = None) -> Report:
    """Prove that a schedule runs to its end, or name the action that prevents it.

    It checks that every rank computes every micro-batch of each of its chunks once, forward and backward, after its inputs are
    available; that the k-th send between two ranks matches the k-th receive in value, shape and dtype; and that there is no
    deadlock. The latter holds even if a send ends only when its receive is posted and every rank handles one message or group
    at a time, and therefore also with more buffering or overlap.

    Args:
        specs: of every virtual stage, in order; by default shapes and dtypes are not checked.

    Returns:
        Resource use of the schedule.

    Raises:
        ScheduleError: names the offending action, its rank and what is wrong with it.
        ArgumentError: the sizes of `schedule` or `specs` are out of range.
    """
    _check_sizes(schedule, specs)
    for rank, program in enumerate(schedule.programs):
        _check_complete(schedule, rank, program)
        _check_order(schedule, rank, program)
    _check_channels(schedule)
    if specs is not None:
        _check_specs(schedule, specs)
    circle = find_deadlock(schedule)
    if circle:
        chain = ", which waits for ".join([*circle[1:], circle[0]])
        raise ScheduleError(f"schedule {schedule.name} deadlocks: {circle[0]} waits for {chain}")
    return Report(
        tuple(_live_activations(program) for program in schedule.programs),
        tuple(_live_buffers(schedule, rank, program) for rank, program in enumerate(schedule.programs)),
        sum(isinstance(a, Message) and a.sends for program in schedule.programs for _, a in flatten(program)),
    )


def _check_sizes(schedule: Schedule, specs: Sequence[StageSpec] | None) -> None:
    if min(schedule.stages, schedule.micro_batches, schedule.chunks) < 1:
        raise ArgumentError("a schedule needs at least one stage, one micro-batch and one chunk")
    if len(schedule.programs) != schedule.stages:
        raise ArgumentError(
            f"schedule {schedule.name} has {len(schedule.programs)} programs for {schedule.stages} ranks"
        )
    if specs is not None and len(specs) != schedule.depth:
        raise ArgumentError(f"{len(specs)} specs for {schedule.depth} stages; give one per virtual stage, in order")


def _expected(layout: Layout, rank: int, split: set[tuple[int, int]]) -> Iterator[Compute | Message]:
    for chunk in range(layout.chunks):
        stage = layout.stage(rank, chunk)
        previous = layout.owner(stage - 1)[0] if stage else rank
        following = layout.owner(stage + 1)[0] if stage < layout.depth - 1 else rank
        for m in range(layout.micro_batches):
            yield Forward(m, chunk)
            if (m, chunk) in split:
                yield BackwardInput(m, chunk)
                yield BackwardWeight(m, chunk)
            else:
                yield Backward(m, chunk)
            if previous != rank:
                yield RecvActivation(m, chunk, previous)
                yield SendGradient(m, chunk, previous)
            if following != rank:
                yield SendActivation(m, chunk, following)
                yield RecvGradient(m, chunk, following)


def _check_complete(schedule: Schedule, rank: int, program: Program) -> None:
    found = Counter(action for _, action in flatten(program))
    split = {(a.micro_batch, a.chunk) for a in found if isinstance(a, BackwardInput | BackwardWeight)}
    expected = dict.fromkeys(_expected(schedule, rank, split))
    for action, times in found.items():
        if action not in expected:
            raise ScheduleError(f"rank {rank}: {action} does not belong in {_sizes(schedule)}", rank=rank)
        if times > 1:
            raise ScheduleError(f"rank {rank}: {action} occurs {times} times; it must occur once", rank=rank)
    for action in expected:
        if action not in found:
            raise ScheduleError(f"rank {rank}: {action} is missing", rank=rank)


def _sizes(layout: Layout) -> str:
    return f"{layout.stages} ranks x {layout.chunks} chunks with {layout.micro_batches} micro-batches"


def _check_order(schedule: Schedule, rank: int, program: Program) -> None:
    here: set[Value] = set()
    for _, action in flatten(program):
        for value in schedule.requires(rank, action):
            if value not in here:
                raise ScheduleError(f"rank {rank}: {action} comes before {value} is available", rank=rank)
        provided = schedule.provides(rank, action)
        if provided is not None:
            here.add(provided)


def _check_channels(schedule: Schedule) -> None:
    sent: dict[tuple[int, int], list[Message]] = defaultdict(list)
    received: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, program in enumerate(schedule.programs):
        for _, action in flatten(program):
            if isinstance(action, Message):
                if action.sends:
                    sent[rank, action.peer].append(action)
                else:
                    received[action.peer, rank].append(action)
    for (source, target), sends in sent.items():
        for k, (send, recv) in enumerate(zip(sends, received[source, target], strict=True)):
            if schedule.carried(source, send) != schedule.carried(target, recv):
                raise ScheduleError(
                    f"message {k} from rank {source} to rank {target}: rank {source} does {send} where rank {target} "
                    f"does {recv}; messages between two ranks match in order",
                    rank=source,
                    peer=target,
                )


def _check_specs(schedule: Schedule, specs: Sequence[StageSpec]) -> None:
    for stage in range(schedule.depth - 1):
        given, taken = specs[stage].output, specs[stage + 1].input
        source, chunk = schedule.owner(stage)
        target, target_chunk = schedule.owner(stage + 1)
        if given is None or taken is None:
            missing = f"stage {stage} declares no output" if given is None else f"stage {stage + 1} declares no input"
            raise ScheduleError(f"{missing} spec; every stage but the first has an input, all but the last an output")
        if given != taken:
            raise ScheduleError(
                f"rank {source}: {SendActivation(0, chunk, target)} gives {given}, the output of stage {stage}, where "
                f"rank {target}: {RecvActivation(0, target_chunk, source)} expects {taken}, the input of stage {stage + 1}",
                rank=source,
                peer=target,
            )


def _live_activations(program: Program) -> int:
    live = most = 0
    for item in program:
        if isinstance(item, Forward):
            live += 1
            most = max(most, live)
        elif isinstance(item, Backward | BackwardWeight):
            live -= 1
    return most


def _live_buffers(layout: Layout, rank: int, program: Program) -> int:
    waiting: set[Value] = set()
    most = 0
    for _, action in flatten(program):
        if isinstance(action, Message) and not action.sends:
            waiting.add(layout.carried(rank, action))
            most = max(most, len(waiting))
        elif isinstance(action, Compute):
            waiting.difference_update(layout.requires(rank, action))
    return most
