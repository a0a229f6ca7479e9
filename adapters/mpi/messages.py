"""Messages and receives, before they meet, while and after."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xvcomm.adapters.mpi import control
from xvcomm.engine.inflight.work import Work
from xvcomm.engine.probe import Probe
from xvcomm.errors import XvcommError
from xvcomm.types.dtype import DType

Array = NDArray[Any]

ANY_SOURCE = ANY_TAG = -1
TAG_UB = 999_999_999
"""The largest tag. What xvcomm's own error messages call a tag shows it behind the number of the message."""

_SYNCHRONOUS = TAG_UB + 1
_STRIDE = 10 * _SYNCHRONOUS
NUMBERS = 1 << 28
"""Where the numbers of messages begin again."""


class Envelope(NamedTuple):
    """What is known of a message before it is received.

    Attributes:
        number: of the message, among those from its source to this rank.
        synchronous: whether its sender waits for the receive.
    """

    source: int
    tag: int
    number: int
    nbytes: int
    dtype: DType
    synchronous: bool = False

    @classmethod
    def of(cls, probe: Probe) -> Envelope:
        """Of a message that xvcomm has found."""
        number, rest = divmod(probe.tag, _STRIDE)
        synchronous, tag = divmod(rest, _SYNCHRONOUS)
        return cls(probe.src, tag, number, probe.nbytes, probe.dtype, synchronous > 0)

    @property
    def wire(self) -> int:
        """xvcomm's tag of it."""
        return self.number * _STRIDE + self.synchronous * _SYNCHRONOUS + self.tag

    @property
    def channel(self) -> int:
        """xvcomm's channel of it."""
        return channel_of(self.tag)


def channel_of(tag: int) -> int:
    """The channel of a tag."""
    return tag % control.CHANNEL


class Arrived:
    """A message that was taken from its ring, or sent by this rank to itself, before anybody wanted it."""

    def __init__(self, envelope: Envelope, data: Array, work: Work | None) -> None:
        self.envelope, self.data, self.work = envelope, data, work

    def ready(self) -> bool:
        """Whether all of it is there."""
        return self.work is None or self.work.done()


Room = Callable[[Envelope], Array]
"""Gives the vector that a message goes to, of its length and dtype, or raises what the receive is to raise."""


class Receive:
    """A receive that was posted.

    Attributes:
        envelope: of the message, once it has one.
        data: where the message went.
        cancelled: whether it was given up before it had a message.
    """

    def __init__(self, source: int, tag: int, room: Room) -> None:
        self.source, self.tag, self._room = source, tag, room
        self.envelope: Envelope | None = None
        self.data: Array | None = None
        self.cancelled = False
        self._settled = False  # whether it is known what becomes of it; the last to be set, for threads that only look
        self._work: Work | None = None
        self._arrived: Arrived | None = None
        self._error: BaseException | None = None
        self._gate = threading.Lock()

    def fits(self, envelope: Envelope, first: bool) -> bool:
        """Whether a message is for it; `first` tells whether it is the first of its source that nobody has."""
        if self.source not in (ANY_SOURCE, envelope.source):
            return False
        return first if self.tag == ANY_TAG else self.tag == envelope.tag

    def accept(self, envelope: Envelope) -> Array:
        """Take a message; gives where it is to go: aside, if it does not fit."""
        self.envelope = envelope
        try:
            self.data = self._room(envelope)
        except XvcommError as error:
            self._error = error
            return scratch(envelope)
        return self.data

    def follow(self, work: Work | None) -> None:
        """The message is under way, or here if there is no Work."""
        self._work = work
        self._settled = True

    def copy(self, arrived: Arrived) -> None:
        """The message is here already, or will be, but elsewhere."""
        self.accept(arrived.envelope)
        self._arrived = arrived
        self._settled = True

    def fail(self, error: BaseException) -> None:
        """It ends without its message."""
        self._error = error
        self._settled = True

    def cancel(self) -> None:
        """It is given up before it had a message."""
        self.cancelled = self._settled = True

    def over(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        if not self._settled or (self._work is not None and not self._work.done()):
            return False
        with self._gate:
            arrived = self._arrived
            if arrived is not None:
                if not arrived.ready():
                    return False
                if self._error is None and self.data is not None and _error_of(arrived.work) is None:
                    self.data[...] = arrived.data
                self._arrived, self._work = None, arrived.work
        return True

    def check(self) -> None:
        """Raise what went wrong, of one that is over."""
        error = self._error or _error_of(self._work)
        if error is not None:
            raise error


def _error_of(work: Work | None) -> BaseException | None:
    return None if work is None else work.exception()


def scratch(envelope: Envelope) -> Array:
    """A new vector for a message."""
    return np.empty(envelope.nbytes // envelope.dtype.itemsize, envelope.dtype.numpy)
