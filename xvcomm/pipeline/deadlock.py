"""Finds deadlocks of a pipeline schedule, on the strictest communicator that fulfils the contract."""

from __future__ import annotations

from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from xvcomm.pipeline.actions import Compute, Group, Message, Schedule, Value, flatten


class _Event(NamedTuple):
    """Something that happens once per step.

    Attributes:
        rank: rank of the program.
        position: position of the item in the program.
        ended: False: the rank has passed the item, that is, computed it or posted its messages. True: the messages of the item
            have been transferred.
    """

    rank: int
    position: int
    ended: bool


def find_deadlock(schedule: Schedule) -> list[str]:
    """A cycle of events that wait for each other, as text; empty if the schedule runs to its end.

    The model: a rank computes and posts in program order; a computation waits for its messages; a rank's messages are
    transferred one item after the other, those of a group together; a message is transferred when both ends have reached it.
    Because every send matches a known receive, the events form one fixed graph, and the schedule deadlocks if and only if it
    has a cycle. A rank that also waits for old sends before it posts new ones adds no cycle: its later actions affect other
    ranks only through messages that queue behind those sends anyway.

    Args:
        schedule: complete, ordered and with matching channels, as verified by `check`.
    """
    try:
        TopologicalSorter(_waits(schedule)).prepare()
    except CycleError as error:
        circle: list[_Event] = error.args[1][:0:-1]
        neighbours = zip(circle[-1:] + circle[:-1], circle, circle[1:] + circle[:1], strict=True)
        # The events where the cycle changes ranks suffice to describe it; every cycle includes at least two ranks.
        turns = [e for later, e, earlier in neighbours if not later.rank == e.rank == earlier.rank]
        return [_describe(schedule, event) for event in turns]
    return []


def _waits(schedule: Schedule) -> dict[_Event, set[_Event]]:
    sent, received = _ends(schedule)
    waits: dict[_Event, set[_Event]] = defaultdict(set)
    begins: dict[_Event, set[_Event]] = {}
    for rank, program in enumerate(schedule.programs):
        queue: list[_Event] = []
        for position, item in enumerate(program):
            passed, ended = _Event(rank, position, False), _Event(rank, position, True)
            if position:
                waits[passed].add(_Event(rank, position - 1, False))
            if isinstance(item, Compute):
                arrivals = map(received.get, schedule.requires(rank, item))
                waits[passed].update(event for event in arrivals if event is not None and event.rank == rank)
                continue
            begins[ended] = {passed, *queue[-1:]}
            queue.append(ended)
    for value, source in sent.items():
        both = begins[source] | begins[received[value]]
        waits[source] |= both
        waits[received[value]] |= both
    return waits


def _ends(schedule: Schedule) -> tuple[dict[Value, _Event], dict[Value, _Event]]:
    sent: dict[Value, _Event] = {}
    received: dict[Value, _Event] = {}
    for rank, program in enumerate(schedule.programs):
        for position, action in flatten(program):
            if isinstance(action, Message):
                ends = sent if action.sends else received
                ends[schedule.carried(rank, action)] = _Event(rank, position, True)
    return sent, received


def _describe(schedule: Schedule, event: _Event) -> str:
    item = schedule.programs[event.rank][event.position]
    what = " with ".join(map(str, item.messages if isinstance(item, Group) else (item,)))
    verb = "" if isinstance(item, Compute) else "the end of " if event.ended else "posting "
    return f"rank {event.rank}: {verb}{what}"
