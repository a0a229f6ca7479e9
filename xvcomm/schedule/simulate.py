"""Runs the schedules of all ranks on numpy arrays in one process, under the strictest assumptions.

Nothing is buffered: a message is transferred when both ends have reached it, and a native call runs when every member of the
island has. Among the possible events, the next one is drawn at random from a seed. A schedule that gives the right result here
does so on every implementation that fulfils the contract of `Schedule`.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from xvcomm.errors import ScheduleError
from xvcomm.schedule import semantics
from xvcomm.schedule.describe import step_text
from xvcomm.schedule.runs import runs
from xvcomm.schedule.semantics import Array, Fault, Memory
from xvcomm.schedule.steps import (
    Buf,
    Copy,
    Factor,
    Get,
    GetReduce,
    Lane,
    Native,
    Put,
    Reduce,
    Request,
    Scale,
    Schedule,
    Step,
)
from xvcomm.types.dtype import ReduceOp
from xvcomm.types.topology import Topology

Order = Literal["sequential", "concurrent", "buffered"]
_BORDER = (Put, Get, GetReduce)


def run(
    requests: Sequence[Request],
    schedules: Sequence[Schedule],
    topology: Topology,
    inputs: Sequence[Array],
    op: ReduceOp = ReduceOp.SUM,
    *,
    factors: Sequence[float] | None = None,
    shared: bool = False,
    order: Order = "sequential",
    seed: int = 0,
) -> list[Array]:
    """Run one collective and return OUT of every rank.

    Args:
        requests: one per rank; they differ in an all_to_all only.
        inputs: one-dimensional contents of IN, one per rank; empty if the rank has no input.
        op: the element-wise reduction, without scaling.
        factors: multiplier of `Factor.PREMUL` on each rank; default 1.
        shared: put IN and OUT into one array, as in an in-place call; a broadcast always does.
        order: `"sequential"`: each rank runs its steps in order, but starts consecutive border steps together, as `after`
            permits. `"concurrent"`: each lane proceeds as soon as `after` permits. `"buffered"`: one of `runs` after the other,
            as on a single stream, with rings that buffer every message whole.
        seed: for the choice among possible events.

    Raises:
        ScheduleError: the ranks deadlock, two ends disagree, or a step accesses memory that it must not; names rank, index and
            step.
    """
    _check_steps(schedules)
    memories = [
        Memory(request, rank, given, schedule.scratch, schedule.wide, shared)
        for rank, (request, schedule, given) in enumerate(zip(requests, schedules, inputs, strict=True))
    ]
    machine = _Machine(schedules, topology, memories, op, factors or [1.0] * topology.size, order)
    machine.run(random.Random(seed))
    results = []
    for rank, memory in enumerate(memories):
        try:
            results.append(memory.result())
        except Fault as fault:
            raise ScheduleError(f"rank {rank} does not complete its output: {fault}") from None
    return results


def _check_steps(schedules: Sequence[Schedule]) -> None:
    for rank, schedule in enumerate(schedules):
        for index, step in enumerate(schedule.steps):
            if any(not 0 <= wait < index for wait in step.after):
                raise _error(rank, index, step, "`after` must name earlier steps")
            if (step.lane is Lane.SEND) != isinstance(step, Put) or (
                isinstance(step, Native) and step.lane is not Lane.NATIVE
            ):
                raise _error(rank, index, step, f"it cannot run on the {step.lane.value} lane")


def _error(rank: int, index: int, step: Step, why: str) -> ScheduleError:
    return ScheduleError(f"rank {rank}, step {index} ({step_text(step)}): {why}", rank=rank)


_Program = Iterator[list[int]]


def _in_order(steps: Sequence[Step], done: Sequence[bool]) -> _Program:
    """Indices of the steps that a rank starts next, in order, with consecutive border steps together."""
    index = 0
    while index < len(steps):
        begin = index
        index += 1
        while isinstance(steps[begin], _BORDER) and index < len(steps) and isinstance(steps[index], _BORDER):
            index += 1
        waiting = list(range(begin, index))
        while waiting or not all(done[begin:index]):
            ready, kept_back = [], set[tuple[Lane, int]]()
            for i in waiting:
                ring = steps[i].lane, getattr(steps[i], "peer", -1)  # its messages start in order
                if ring not in kept_back and all(_through(steps, done, begin, wait) for wait in steps[i].after):
                    ready.append(i)
                else:
                    kept_back.add(ring)
            waiting = [i for i in waiting if i not in ready]
            yield ready


def _through(steps: Sequence[Step], done: Sequence[bool], begin: int, wait: int) -> bool:
    """Whether a lane's steps from `begin` to `wait` are done; `after` names only the last one of a lane."""
    return all(done[i] for i in range(begin, wait + 1) if steps[i].lane is steps[wait].lane)


def _in_runs(steps: Sequence[Step], done: Sequence[bool]) -> _Program:
    """Indices of the steps that a rank starts next, one run at a time."""
    begin = 0
    for run in runs(steps):
        end = begin + len(run)
        yield list(range(begin, end))
        while not all(done[begin:end]):
            yield []
        begin = end


def _by_lanes(steps: Sequence[Step], done: Sequence[bool]) -> _Program:
    """Indices of the steps that a rank starts next, with each lane proceeding independently."""
    lanes = [deque(i for i, step in enumerate(steps) if step.lane is lane) for lane in Lane]
    running: dict[int, int] = {}
    while True:
        reached = []
        for number, lane in enumerate(lanes):
            if lane and done[running.get(number, -1)] and all(done[wait] for wait in steps[lane[0]].after):
                running[number] = lane.popleft()
                reached.append(running[number])
        yield reached


_PROGRAMS: dict[Order, Callable[[Sequence[Step], Sequence[bool]], _Program]] = {
    "sequential": _in_order, "concurrent": _by_lanes, "buffered": _in_runs,
}  # fmt: skip


@dataclass
class _Rank:
    """Progress of one rank. `done` has an additional last element, always true, for the step before the first."""

    steps: Sequence[Step]
    done: list[bool] = field(init=False)
    reached: list[bool] = field(init=False)
    program: _Program = field(init=False)

    def __post_init__(self) -> None:
        self.done = [False] * len(self.steps) + [True]
        self.reached = [False] * len(self.steps)


_Event = tuple[tuple[int, int], ...]  # (rank, step index) of all that take part


class _Machine:
    """The state of all ranks in one run."""

    def __init__(
        self,
        schedules: Sequence[Schedule],
        topology: Topology,
        memories: Sequence[Memory],
        op: ReduceOp,
        factors: Sequence[float],
        order: Order,
    ) -> None:
        self._topology = topology
        self._memories = memories
        self._op = op
        self._factors = factors
        self._ranks = [_Rank(schedule.steps) for schedule in schedules]
        for state in self._ranks:
            state.program = _PROGRAMS[order](state.steps, state.done)
        self._buffered = order == "buffered"
        self._buffers: dict[tuple[int, int], Array] = {}
        self._possible: list[_Event] = []
        self._sent: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
        self._awaited: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
        self._gathered: defaultdict[int, dict[int, int]] = defaultdict(dict)

    def run(self, chance: random.Random) -> None:
        """Execute events until none is possible."""
        for rank in range(len(self._ranks)):
            self._advance(rank)
        while self._possible:
            pick = chance.randrange(len(self._possible))
            self._possible[pick], self._possible[-1] = self._possible[-1], self._possible[pick]
            event = self._possible.pop()
            self._happen(event)
            for rank, index in event:
                self._ranks[rank].done[index] = True
            for rank, _ in event:
                self._advance(rank)
        self._check_finished()

    def _advance(self, rank: int) -> None:
        state = self._ranks[rank]
        for index in next(state.program, []):
            state.reached[index] = True
            self._reach(rank, index, state.steps[index])

    def _reach(self, rank: int, index: int, step: Step) -> None:
        match step:
            case Native():
                island = self._topology.island_of(rank)
                waiting = self._gathered[island.index]
                waiting[rank] = index
                if len(waiting) == island.size:
                    self._possible.append(tuple((member, waiting.pop(member)) for member in island.ranks))
            case Put(peer=peer) if not self._buffered:
                self._sent[rank, peer].append(index)
                self._meet(rank, peer)
            case Get(peer=peer) | GetReduce(peer=peer):
                self._awaited[peer, rank].append(index)
                self._meet(peer, rank)
            case _:
                self._possible.append(((rank, index),))

    def _meet(self, sender: int, receiver: int) -> None:
        sent, awaited = self._sent[sender, receiver], self._awaited[sender, receiver]
        if sent and awaited:
            self._possible.append(((sender, sent.popleft()), (receiver, awaited.popleft())))

    def _happen(self, event: _Event) -> None:
        rank, index = event[-1]
        step = self._ranks[rank].steps[index]
        try:
            if isinstance(step, Native):
                calls: list[Any] = [self._ranks[member].steps[i] for member, i in event]
                semantics.native(self._op, [self._memories[member] for member, _ in event], calls)
            elif len(event) == 2:
                self._deliver(event[0], rank, step)
            else:
                self._compute(rank, index, step)
        except Fault as fault:
            raise _error(rank, index, step, str(fault)) from None

    def _deliver(self, origin: tuple[int, int], rank: int, step: Step) -> None:
        put = self._ranks[origin[0]].steps[origin[1]]
        assert isinstance(put, Put) and isinstance(step, Get | GetReduce)
        if put.src.count != step.dst.count:
            raise Fault(f"rank {origin[0]} sends {put.src.count} elements in step {origin[1]} ({step_text(put)})")
        if (put.src.buf is Buf.WIDE) is not (step.dst.buf is Buf.WIDE):
            raise Fault(f"rank {origin[0]} sends elements of another size in step {origin[1]} ({step_text(put)})")
        values = self._buffers.pop(origin) if self._buffered else self._memories[origin[0]].read(put.src)
        memory = self._memories[rank]
        if isinstance(step, GetReduce):
            own = memory.read(step.own)
            values = semantics.combine(self._op, [values, own] if step.remote_first else [own, values])
        memory.write(step.dst, values)

    def _compute(self, rank: int, index: int, step: Step) -> None:
        memory = self._memories[rank]
        match step:
            case Put(peer=peer, src=src):
                self._buffers[rank, index] = memory.read(src).copy()
                self._sent[rank, peer].append(index)
                self._meet(rank, peer)
            case Copy(src=src, dst=dst):
                memory.write(dst, memory.read(src))
            case Reduce(srcs=srcs, dst=dst, average=average):
                divisor = self._topology.size if average else 1
                memory.write(dst, semantics.combine(self._op, [memory.read(src) for src in srcs], divisor=divisor))
            case Scale(src=src, dst=dst, factor=factor):
                premul = factor is Factor.PREMUL
                how, by = (np.multiply, self._factors[rank]) if premul else (np.divide, self._topology.size)
                memory.write(dst, semantics.scaled(how, memory.read(src), by, dst.buf is Buf.WIDE))

    def _check_finished(self) -> None:
        stuck = []
        for rank, state in enumerate(self._ranks):
            for index, step in enumerate(state.steps):
                if not state.done[index] and state.reached[index]:
                    stuck.append(_error(rank, index, step, "waits for ever"))
                    break
        if stuck:
            others = f"; {len(stuck) - 1} more ranks wait, next: {stuck[1]}" if len(stuck) > 1 else ""
            raise ScheduleError(f"{stuck[0]}{others}", rank=stuck[0].rank)
        for rank, state in enumerate(self._ranks):
            if not all(state.done):
                index = state.done.index(False)
                raise _error(rank, index, state.steps[index], "was never reached")
