"""Questions to other processes about what they do, which their carriers answer without the interpreter."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from xvcomm.trace.format import HEAD_WORDS, Answer, Life, Question
from xvcomm.types.deadline import Deadline
from xvcomm.wire.carrier import Carrier


class Questions:
    """Those of this process. Thread-safe."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._numbers = itertools.count(1)
        self._links: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        # Not `SimpleQueue`, of which CPython's `get` may wait without end where a signal interrupts it near its timeout.
        self._waiting: dict[int, queue.Queue[Any]] = {}

    def ask(self, links: Sequence[int], question: Question, deadline: Deadline) -> dict[int, Answer]:
        """Ask the processes at the other ends of links, all at once; gives the answers that come in time."""
        answers: queue.Queue[Any] = queue.Queue()
        asked, begun, found = dict[int, int](), dict[int, int](), dict[int, Answer]()
        with contextlib.ExitStack() as steps:
            for link in sorted(links):  # threads that ask several at once do not wait for each other
                one_at_a_time = self._links[link]
                if one_at_a_time.acquire(timeout=deadline.left()):
                    steps.callback(one_at_a_time.release)
                    number = next(self._numbers)
                    asked[number], self._waiting[number] = link, answers
                    steps.callback(self._waiting.pop, number)
                    begun[number] = time.time_ns()
                    self._carrier.ask(link, number, question)
            parts: defaultdict[int, list[bytes]] = defaultdict(list)
            clocks = dict[int, tuple[int, int]]()  # how far they are ahead, by round trips of such length
            while len(found) < len(asked):
                try:
                    heard, (number, following, words, payload) = answers.get(timeout=deadline.left())
                except queue.Empty:
                    break
                life, there = (int(word) for word in payload[:HEAD_WORDS])
                if number not in clocks:  # the first part is the quickest
                    clocks[number] = there - (begun[number] + heard) // 2, heard - begun[number]
                if words > HEAD_WORDS:
                    parts[number].append(payload[HEAD_WORDS:].tobytes())
                if not following:
                    found[asked[number]] = Answer(Life(life), *clocks[number], tuple(parts[number]))
        return found

    def hear(self) -> None:
        """Hand out the answers that have come."""
        heard = time.time_ns()
        for answer in self._carrier.answers():
            waiting = self._waiting.get(int(answer["number"]))
            if waiting is not None:
                waiting.put((heard, answer))
