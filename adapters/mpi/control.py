"""What two ranks tell each other about their messages, on a channel of its own and without data.

A sender announces the first message of each channel but channel 0, so that receives of any tag need not look at all
channels. A receiver acknowledges a synchronous message when somebody receives it.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from xvcomm.comm.communicator import Communicator
from xvcomm.comm.point_to_point import CHANNELS
from xvcomm.engine.inflight.work import Work
from xvcomm.errors import PeerLost

CHANNEL = CHANNELS - 1
"""Where they tell it; tags share the channels below."""

_ACKNOWLEDGED = CHANNELS
"""What is told in place of a tag: a channel, or this and the number of a message."""

Key = tuple[int, int]
"""A synchronous message: receiver and number."""


class Control:
    """Of one communicator. Any thread, one at a time.

    Attributes:
        heard: channels that each rank has announced.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._comm = communicator
        self.heard: list[set[int]] = [{0} for _ in range(communicator.size)]
        self._announced: list[set[int]] = [{0} for _ in range(communicator.size)]
        self._expected: set[Key] = set()
        self._lost: dict[int, PeerLost] = {}
        self._background: deque[Work] = deque()

    @property
    def expecting(self) -> bool:
        """Whether acknowledgements are to come."""
        return bool(self._expected)

    def announce(self, dest: int, channel: int) -> None:
        """Say that messages come on a channel; once."""
        if channel not in self._announced[dest]:
            self._announced[dest].add(channel)
            self._tell(dest, channel)

    def expect(self, key: Key) -> None:
        """A synchronous message is sent."""
        self._expected.add(key)

    def acknowledge(self, source: int, number: int) -> None:
        """A synchronous message is received."""
        if source == self._comm.rank:
            self._expected.discard((source, number))
        else:
            self._tell(source, _ACKNOWLEDGED + number)

    def answered(self, key: Key) -> bool:
        """Whether a synchronous message was received.

        Raises:
            PeerLost: its receiver has left without.
        """
        if key in self._expected and key[0] in self._lost:
            self._expected.discard(key)
            raise self._lost[key[0]]
        return key not in self._expected

    def listen(self) -> None:
        """Hear what those have to say of whom acknowledgements are expected."""
        for peer in {dest for dest, _ in self._expected} - {self._comm.rank}:
            try:
                self.hear(peer)
            except PeerLost as error:
                self._lost[peer] = error

    def hear(self, source: int | None) -> None:
        """Hear all that a rank, or any, has said. Does not wait.

        Raises:
            PeerLost: it has left, and so has said all.
        """
        while (probe := self._comm.iprobe(source, channel=CHANNEL)) is not None:
            self._comm.recv(np.empty(0, np.uint8), probe.src, probe.tag, channel=CHANNEL)
            if probe.tag < _ACKNOWLEDGED:
                self.heard[probe.src].add(probe.tag)
            else:
                self._expected.discard((probe.src, probe.tag - _ACKNOWLEDGED))

    def look_after(self, work: Work) -> None:
        """Keep a send that nobody waits for, until it is done."""
        self._background.append(work)
        while self._background and self._background[0].done():
            self._background.popleft()

    def flush(self) -> None:
        """Wait for the sends that nobody waits for."""
        while self._background:
            self._background.popleft().wait()

    def _tell(self, dest: int, what: int) -> None:
        self.look_after(self._comm.isend(np.empty(0, np.uint8), dest, what, channel=CHANNEL))
