"""Questions to other processes about what they do, which their carriers answer from their flight recorders."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from xvcomm.trace.format import Excerpt, Life, Record, parse_record
from xvcomm.types.deadline import Deadline
from xvcomm.wire.carrier import Carrier


class Questions:
    """Those of this process. Thread-safe."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._numbers = itertools.count(1)
        self._links: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._waiting: dict[int, queue.SimpleQueue[Any]] = {}

    def ask(self, links: Sequence[int], wanted: int, deadline: Deadline) -> dict[int, Excerpt]:
        """The newest records of the processes at the other ends of links, all asked at once: of those that answer in time."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        asked, found = dict[int, int](), dict[int, Excerpt]()
        with contextlib.ExitStack() as steps:
            for link in sorted(links):  # threads that ask several at once do not wait for each other
                one_at_a_time = self._links[link]
                if one_at_a_time.acquire(timeout=deadline.left()):
                    steps.callback(one_at_a_time.release)
                    number = next(self._numbers)
                    asked[number], self._waiting[number] = link, answers
                    steps.callback(self._waiting.pop, number)
                    self._carrier.ask(link, number, wanted)
            records: defaultdict[int, list[Record]] = defaultdict(list)
            while len(found) < len(asked):
                try:
                    number, following, words, payload = answers.get(timeout=deadline.left())
                except queue.Empty:
                    break
                if words > 1:
                    records[number].append(parse_record(payload[1:].tobytes()))
                if not following:
                    found[asked[number]] = Excerpt(Life(int(payload[0])), tuple(records[number]))
        return found

    def hear(self) -> None:
        """Hand out the answers that have come."""
        for answer in self._carrier.answers():
            waiting = self._waiting.get(int(answer["number"]))
            if waiting is not None:
                waiting.put(answer)
