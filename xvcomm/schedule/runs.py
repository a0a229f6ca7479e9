"""Groups consecutive messages of a schedule that may start together when all steps otherwise run one by one."""

from __future__ import annotations

from collections.abc import Sequence

from xvcomm.schedule.steps import Get, GetReduce, Put, Span, Step

_MOST = 16
"""Maximum number of messages in a run: with more, one launch of the movers would have too few blocks per message."""


class _Run:
    """Messages that may start together: none waits for another, uses the same ring, or writes to the same memory."""

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self.steps: list[Step] = []
        self._rings: set[tuple[int, bool]] = set()
        self._targets: list[Span] = []

    def add(self, step: Step) -> bool:
        """Add a step; returns False if it cannot start together with the others."""
        target = step.dst if isinstance(step, Get | GetReduce) else None
        ring = (step.peer, target is None) if isinstance(step, Put | Get | GetReduce) else None
        if self.steps and not (ring is not None and self._rings and self._suits(step, ring, target)):
            return False
        self.steps.append(step)
        if ring is not None:
            self._rings.add(ring)
        if target is not None:
            self._targets.append(target)
        return True

    def _suits(self, step: Step, ring: tuple[int, bool], target: Span | None) -> bool:
        if len(self.steps) >= _MOST or ring in self._rings or max(step.after, default=-1) >= self._begin:
            return False
        # `after` does not order steps of the same lane, so overlapping targets are checked here.
        return target is None or not any(_overlap(target, other) for other in self._targets)


def runs(steps: Sequence[Step]) -> tuple[tuple[Step, ...], ...]:
    """All steps in order; the messages of a run may start together, every other step is a run by itself."""
    found: list[_Run] = []
    for index, step in enumerate(steps):
        if not found or not found[-1].add(step):
            found.append(_Run(index))
            found[-1].add(step)
    return tuple(tuple(run.steps) for run in found)


def _overlap(a: Span, b: Span) -> bool:
    return a.buf is b.buf and a.start < b.stop and b.start < a.stop
