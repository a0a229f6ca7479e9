"""Start and end times of the computations of a pipeline, for given durations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xvcomm.errors import ArgumentError, ScheduleError
from xvcomm.pipeline.actions import (
    Backward,
    BackwardInput,
    Compute,
    Forward,
    Layout,
    Schedule,
    Value,
)

Orders = Sequence[Sequence[Compute]]


@dataclass(frozen=True, slots=True)
class Pace:
    """Durations of the computations of a virtual stage, and of a message between ranks, in any unit."""

    forward: float
    backward: float
    weight: float
    message: float

    def of(self, compute: Compute) -> float:
        """Duration of a computation; that of BackwardInput is backward - weight."""
        match compute:
            case Forward():
                return self.forward
            case Backward():
                return self.backward
            case BackwardInput():
                return self.backward - self.weight
            case _:
                return self.weight


def timeline(layout: Layout, orders: Orders, pace: Pace) -> list[list[tuple[float, float]]]:
    """Start and end of every computation, if each rank runs its order as soon as inputs are available.

    Raises:
        ScheduleError: the orders deadlock; names the first computation that never starts.
    """
    times: list[list[tuple[float, float]]] = [[] for _ in orders]
    ready: dict[Value, tuple[int, float]] = {}
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            for compute in order[len(times[rank]) :]:
                needs = layout.requires(rank, compute)
                if any(value not in ready for value in needs):
                    break
                start = times[rank][-1][1] if times[rank] else 0.0
                for where, done in map(ready.__getitem__, needs):
                    start = max(start, done if where == rank else done + pace.message)
                end = start + pace.of(compute)
                times[rank].append((start, end))
                value = layout.provides(rank, compute)
                if value is not None:
                    ready[value] = (rank, end)
                moved = True
    for rank, order in enumerate(orders):
        if len(times[rank]) < len(order):
            raise ScheduleError(f"rank {rank} never starts {order[len(times[rank])]}; check() tells why")
    return times


def bubble(
    schedule: Schedule, forward: float = 1, backward: float = 2, weight: float | None = None, message: float = 0
) -> float:
    """Fraction of a step that ranks spend idle, 0 to 1, if all ranks are equally fast.

    Args:
        schedule: any schedule that passes `check`.
        forward: time of one micro-batch through all chunks of one rank.
        backward: the same for the whole backward pass.
        weight: the part of `backward` spent on weight gradients; half of it by default.
        message: time of one message.

    Raises:
        ArgumentError: a time is not positive, or `weight` is not less than `backward`.
    """
    weight = backward / 2 if weight is None else weight
    if not (forward > 0 and 0 < weight < backward and message >= 0):
        raise ArgumentError("bubble needs forward > 0, 0 < weight < backward and message >= 0")
    chunks = schedule.chunks
    pace = Pace(forward / chunks, backward / chunks, weight / chunks, message)
    orders = [[a for a in program if isinstance(a, Compute)] for program in schedule.programs]
    times = timeline(schedule, orders, pace)
    busy = sum(end - start for spans in times for start, end in spans)
    return 1 - busy / (schedule.stages * max(spans[-1][1] for spans in times))
