"""How far the clocks of other hosts are ahead of this one's, by their answers to questions."""

from __future__ import annotations

from collections import defaultdict, deque

from xvcomm.trace.format import Answer

SAMPLES = 8
"""Newest answers of a host that count: as in NTP, the one that came soonest tells best, and an old one does not."""


class Clocks:
    """Those of one rank's job, by host."""

    def __init__(self) -> None:
        self._samples: defaultdict[str, deque[tuple[int, int]]] = defaultdict(lambda: deque(maxlen=SAMPLES))

    def note(self, host: str, answer: Answer) -> None:
        """A rank of a host has answered."""
        self._samples[host].append((answer.round_trip, answer.ahead))

    def ahead(self, host: str) -> int:
        """Nanoseconds by which a host's clock is ahead; 0 if none of its ranks has answered."""
        return min(self._samples[host], default=(0, 0))[1]
