"""Control messages between two ranks about their messages, on a separate channel and without data.

A sender announces its first message on each channel except channel 0, so that receives with ANY_TAG need not poll all channels.
A receiver acknowledges a synchronous message when it is matched.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from xvcomm.comm.communicator import Communicator
from xvcomm.comm.point_to_point import CHANNELS
from xvcomm.engine.inflight.work import Work
from xvcomm.errors import PeerLost

CHANNEL = CHANNELS - 1
"""Channel of the control messages; tags use the channels below it."""

_ACKNOWLEDGED = CHANNELS
"""The tag of a control message is either a channel number, or this plus the number of an acknowledged message."""

Key = tuple[int, int]
"""A synchronous message: receiver and number."""


class Control:
    """The control messages of one communicator. Thread-safe only under the caller's lock.

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
        """Whether acknowledgements are outstanding."""
        return bool(self._expected)

    def announce(self, dest: int, channel: int) -> None:
        """Announce messages on a channel, once."""
        if channel not in self._announced[dest]:
            self._announced[dest].add(channel)
            self._tell(dest, channel)

    def expect(self, key: Key) -> None:
        """Expect an acknowledgement of a synchronous message that is being sent."""
        self._expected.add(key)

    def acknowledge(self, source: int, number: int) -> None:
        """Acknowledge a synchronous message."""
        if source == self._comm.rank:
            self._expected.discard((source, number))
        else:
            self._tell(source, _ACKNOWLEDGED + number)

    def answered(self, key: Key) -> bool:
        """Whether a synchronous message has been acknowledged.

        Raises:
            PeerLost: its receiver has left without an acknowledgement.
        """
        if key in self._expected and key[0] in self._lost:
            self._expected.discard(key)
            raise self._lost[key[0]]
        return key not in self._expected

    def listen(self) -> None:
        """Process control messages of ranks whose acknowledgements are outstanding."""
        for peer in {dest for dest, _ in self._expected} - {self._comm.rank}:
            try:
                self.hear(peer)
            except PeerLost as error:
                self._lost[peer] = error

    def hear(self, source: int | None) -> None:
        """Process all available control messages of a rank, or of any rank. Never blocks.

        Raises:
            PeerLost: the rank has left, and all its messages have been processed.
        """
        while (probe := self._comm.iprobe(source, channel=CHANNEL)) is not None:
            self._comm.recv(np.empty(0, np.uint8), probe.src, probe.tag, channel=CHANNEL)
            if probe.tag < _ACKNOWLEDGED:
                self.heard[probe.src].add(probe.tag)
            else:
                self._expected.discard((probe.src, probe.tag - _ACKNOWLEDGED))

    def look_after(self, work: Work) -> None:
        """Keep a detached send alive until it is complete."""
        self._background.append(work)
        while self._background and self._background[0].done():
            self._background.popleft()

    def flush(self) -> None:
        """Wait for detached sends."""
        while self._background:
            self._background.popleft().wait()

    def _tell(self, dest: int, what: int) -> None:
        self.look_after(self._comm.isend(np.empty(0, np.uint8), dest, what, channel=CHANNEL))
