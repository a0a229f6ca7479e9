"""Questions to other processes about what they do, which their carriers answer from their flight recorders."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import defaultdict
from typing import Any

from xvcomm.trace.format import Excerpt, Life, parse_record
from xvcomm.types.deadline import Deadline
from xvcomm.wire.carrier import Carrier


class Questions:
    """Those of this process. Thread-safe."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._numbers = itertools.count(1)
        self._links: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._waiting: dict[int, queue.SimpleQueue[Any]] = {}

    def ask(self, link: int, wanted: int, deadline: Deadline) -> Excerpt | None:
        """The newest records of the process at the other end of a link; None if it does not answer in time."""
        one_at_a_time = self._links[link]
        if not one_at_a_time.acquire(timeout=deadline.left()):
            return None
        number = next(self._numbers)
        answers = self._waiting[number] = queue.SimpleQueue()
        try:
            self._carrier.ask(link, number, wanted)
            records = []
            while True:
                _, following, words, payload = answers.get(timeout=deadline.left())
                if words > 1:
                    records.append(parse_record(payload[1:].tobytes()))
                if not following:
                    return Excerpt(Life(int(payload[0])), tuple(records))
        except queue.Empty:
            return None
        finally:
            del self._waiting[number]
            one_at_a_time.release()

    def hear(self) -> None:
        """Hand out the answers that have come."""
        for answer in self._carrier.answers():
            waiting = self._waiting.get(int(answer["number"]))
            if waiting is not None:
                waiting.put(answer)
