"""How far a device is with operations that have not ended, as the events on its streams tell."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from xvcomm.trace.format import Stage


class Stretch(NamedTuple):
    """Operations on a stream that end with one event, which the device has not reached.

    Attributes:
        queue: equal for those on one stream.
        records: numbers in the flight recorder of those that may still be under way.
        passed: of those that are over, as their rings tell.
        following: number of the first operation that surely lies behind the event; None before it is recorded.
    """

    queue: Hashable
    records: Sequence[int]
    passed: Sequence[int]
    following: int | None


class Progress(NamedTuple):
    """What a communicator knows of its operations that have not ended.

    Attributes:
        stretches: of those that the device has.
        reached: of queues an operation that lies before an event which the device has reached, the newest one known.
        others: the stages of those that the device does not have.
    """

    stretches: Sequence[Stretch] = ()
    reached: Mapping[Hashable, int] = MappingProxyType({})
    others: Mapping[int, Stage] = MappingProxyType({})


def stages(found: Iterable[Progress]) -> dict[int, Stage]:
    """The stages of operations of all communicators, by their numbers in the flight recorder.

    An operation runs if no event lies before it and none that may run was enqueued with it: as far as events tell, which does
    not cover what the program itself has enqueued. A number alone does not tell the place on a stream: threads may enqueue
    operations in another order than they begin them.
    """
    known: dict[int, Stage] = {}
    reached: dict[Hashable, int] = {}
    of_queue: defaultdict[Hashable, list[Stretch]] = defaultdict(list)
    for progress in found:
        known.update(progress.others)
        for queue, number in progress.reached.items():
            reached[queue] = max(number, reached.get(queue, -1))
        for stretch in progress.stretches:
            of_queue[stretch.queue].append(stretch)
    for queue, stretches in of_queue.items():
        begin = reached.get(queue, -1)
        over = [number for s in stretches for number in s.passed]
        pending: list[Stretch] = []
        for stretch in stretches:
            if stretch.following is not None and stretch.following <= begin:
                over += stretch.records
            else:
                pending.append(stretch)
        fence = min((s.following for s in pending if s.following is not None), default=math.inf)
        begun: list[int] = []
        for number in (number for s in pending for number in s.records):
            if number >= fence:
                known[number] = Stage.ENQUEUED
            else:
                begun.append(number)
        known.update(dict.fromkeys(over, Stage.OVER))
        known.update(dict.fromkeys(begun, Stage.RUNNING if len(begun) == 1 else Stage.TOGETHER))
    return known
