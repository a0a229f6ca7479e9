"""The user's interface to a pipeline: compared between the ranks and checked once, then run step by step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import UnionType
from typing import Any

from xvcomm.errors import ArgumentError, MismatchError
from xvcomm.pipeline.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    RecvActivation,
    RecvGradient,
    Schedule,
    flatten,
)
from xvcomm.pipeline.check import Report, check
from xvcomm.pipeline.stage import Spec, Stage, StageSpec
from xvcomm.pipeline.step import Peers, Step

# What a rank sends to the others: title and digest of its schedule, its stages' specs, and an error of its own.
_Introduction = tuple[str, list[tuple[Spec | None, Spec | None]], str | None]

# The stage method, with its arguments, that each action calls.
_CALLS: tuple[tuple[type | UnionType, str, str], ...] = (
    (Forward, "forward", "x, micro_batch"),
    (Backward, "backward", "dy, micro_batch"),
    (BackwardInput, "backward_input", "dy, micro_batch"),
    (BackwardWeight, "backward_weight", "micro_batch"),
    (RecvActivation | RecvGradient, "empty", "shape, dtype"),
)


def run(
    stages: Stage | Sequence[Stage],
    comm: Peers,
    schedule: Schedule,
    *,
    ranks: Sequence[int] | None = None,
    open_sends: int = 4,
) -> list[Any]:
    """Run one checked step of a pipeline: `Pipeline(...).run()`. For several steps create a Pipeline once."""
    return Pipeline(stages, comm, schedule, ranks=ranks, open_sends=open_sends).run()


class Pipeline:
    """One rank's part of a pipeline, checked once and run for any number of steps.

    Attributes:
        report: resource use of the schedule, from `check`.
    """

    def __init__(
        self,
        stages: Stage | Sequence[Stage],
        comm: Peers,
        schedule: Schedule,
        *,
        ranks: Sequence[int] | None = None,
        open_sends: int = 4,
    ) -> None:
        """Compare stages and schedule with the other ranks, and prove that a step runs to its end.

        Every rank of the pipeline must call this; it blocks until all have. Errors that concern several ranks are raised on all
        of them.

        Args:
            stages: this rank's virtual stages, one per chunk; a single one need not be in a list.
            comm: a communicator that contains the ranks of the pipeline.
            schedule: the same on all ranks.
            ranks: the ranks in `comm` that form the pipeline, in order of the stages; all of `comm` by default.
            open_sends: maximum number of sends in flight, each of which keeps its array alive, before the rank waits for one.

        Raises:
            ArgumentError: `ranks` or the stages do not fit the schedule, a stage lacks a member that the schedule needs, or
                `open_sends` is below 1.
            MismatchError: two ranks have different schedules; names both.
            ScheduleError: the schedule cannot run, or two stages disagree on shape or dtype; names the action.
        """
        if open_sends < 1:
            raise ArgumentError(f"open_sends must be at least 1, not {open_sends}")
        self._ranks = _positions(comm, schedule, ranks)
        self._position = self._ranks.index(comm.rank)
        self._stages: tuple[Any, ...] = tuple(stages) if isinstance(stages, Sequence) else (stages,)
        self._comm = comm
        self._open_sends = open_sends
        self.schedule = schedule
        self._specs = _agree(self._exchange(self._introduction()), schedule)
        self.report: Report = check(schedule, self._specs)

    def run(self) -> list[Any]:
        """Run one step: every micro-batch forward and backward through this rank's stages.

        Blocks until everything is computed and sent; on GPUs until it is enqueued. If a stage raises, the communicator is
        aborted, so that the other ranks raise instead of waiting.

        Returns:
            The results of the last stage's `forward` for each micro-batch, in order, on the rank of the last stage; an empty
            list on the others.

        Raises:
            ScheduleError: a stage returned an array of another shape or dtype than it declared.
            XvcommError: a message failed; see `Communicator.isend`.
        """
        step = Step(self._comm, self.schedule, self._ranks, self._stages, self._specs, self._open_sends)
        for item in self.schedule.programs[self._position]:
            step.do(item)
        return step.finish()

    def _introduction(self) -> _Introduction:
        schedule = self.schedule
        title = (
            f"{schedule.name} for {schedule.stages} ranks x {schedule.chunks} chunks with {schedule.micro_batches} "
            f"micro-batches, {hashlib.sha256(repr(schedule).encode()).hexdigest()[:16]}"
        )
        try:
            return title, self._own_specs(), None
        except ArgumentError as error:
            return title, [], str(error)

    def _own_specs(self) -> list[tuple[Spec | None, Spec | None]]:
        schedule = self.schedule
        if len(self._stages) != schedule.chunks:
            raise ArgumentError(
                f"{len(self._stages)} stages given, but schedule {schedule.name} has {schedule.chunks} chunks per rank; "
                f"give one stage per chunk"
            )
        specs = []
        for chunk, stage in enumerate(self._stages):
            number = schedule.stage(self._position, chunk)
            for name, arguments in self._called(chunk):
                if not callable(getattr(stage, name, None)):
                    raise ArgumentError(_lacks(stage, number, f"method {name}({arguments})", schedule))
            taken = _declared(stage, number, "input_spec", schedule) if number else None
            given = _declared(stage, number, "output_spec", schedule) if number < schedule.depth - 1 else None
            specs.append((taken, given))
        return specs

    def _called(self, chunk: int) -> list[tuple[str, str]]:
        """The methods, with their arguments, that the schedule calls on this rank's stage of a chunk."""
        program = self.schedule.programs[self._position] if self._position < len(self.schedule.programs) else ()
        actions = [action for _, action in flatten(program) if action.chunk == chunk]
        return [
            (name, arguments) for kind, name, arguments in _CALLS if any(isinstance(action, kind) for action in actions)
        ]

    def _exchange(self, mine: _Introduction) -> list[_Introduction]:
        first, *others = self._ranks
        if self._comm.rank != first:
            self._comm.send_object(mine, first)
            everybody: list[_Introduction] = self._comm.recv_object(first)
            return everybody
        everybody = [mine, *(self._comm.recv_object(rank) for rank in others)]
        for rank in others:
            self._comm.send_object(everybody, rank)
        return everybody


def _positions(comm: Peers, schedule: Schedule, ranks: Sequence[int] | None) -> tuple[int, ...]:
    chosen = tuple(range(comm.size)) if ranks is None else tuple(ranks)
    if len(chosen) != schedule.stages:
        raise ArgumentError(
            f"schedule {schedule.name} is for {schedule.stages} ranks, the pipeline has {len(chosen)}: "
            f"{chosen}; build the schedule for {len(chosen)} stages, or choose the ranks with ranks="
        )
    if len(set(chosen)) != len(chosen) or not all(0 <= rank < comm.size for rank in chosen):
        raise ArgumentError(f"ranks {chosen} must be different ranks from 0 to {comm.size - 1}")
    if comm.rank not in chosen:
        raise ArgumentError(f"rank {comm.rank} is not in this pipeline, which has ranks {chosen}")
    return chosen


def _lacks(stage: Any, number: int, member: str, schedule: Schedule) -> str:
    advice = ", or use 1f1b" if "backward_" in member else ""
    return (
        f"stage {number} ({type(stage).__name__}) has no {member}, which schedule {schedule.name} needs; add it{advice}"
        f" (xvcomm.pipeline.Stage lists the members of a stage)"
    )


def _declared(stage: Any, number: int, name: str, schedule: Schedule) -> Spec | None:
    try:
        return Spec.parse(getattr(stage, name))
    except AttributeError as error:
        raise ArgumentError(_lacks(stage, number, f"{name}, a (shape, dtype name) pair", schedule)) from error


def _agree(everybody: list[_Introduction], schedule: Schedule) -> list[StageSpec]:
    for position, (_, _, problem) in enumerate(everybody):
        if problem is not None:
            raise ArgumentError(f"pipeline position {position}: {problem}")
    first = everybody[0][0]
    for position, (title, _, _) in enumerate(everybody):
        if title != first:
            raise MismatchError(
                f"pipeline position 0 has the schedule {first}; position {position} has {title}; "
                f"build the same one on all ranks"
            )
    owners = [schedule.owner(stage) for stage in range(schedule.depth)]
    return [StageSpec(*everybody[position][1][chunk]) for position, chunk in owners]
