"""Messages and receives, before and after they are matched."""

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
"""The largest tag. xvcomm's own error messages show a tag that also contains the message's number."""

_SYNCHRONOUS = TAG_UB + 1
_STRIDE = 10 * _SYNCHRONOUS
NUMBERS = 1 << 28
"""Message numbers wrap around at this value."""


class Envelope(NamedTuple):
    """Properties of a message that are known before it is received.

    Attributes:
        source, tag: of the message.
        number: sequence number among the messages from its source to this rank.
        nbytes, dtype: of its data.
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
        """From a probe of xvcomm."""
        number, rest = divmod(probe.tag, _STRIDE)
        synchronous, tag = divmod(rest, _SYNCHRONOUS)
        return cls(probe.src, tag, number, probe.nbytes, probe.dtype, synchronous > 0)

    @property
    def wire(self) -> int:
        """The tag that xvcomm gets for it."""
        return self.number * _STRIDE + self.synchronous * _SYNCHRONOUS + self.tag

    @property
    def channel(self) -> int:
        """The channel of xvcomm that it is sent on."""
        return channel_of(self.tag)


def channel_of(tag: int) -> int:
    """The channel of a tag."""
    return tag % control.CHANNEL


class Arrived:
    """A message that was received into separate memory, or sent by this rank to itself, before a receive matched it."""

    def __init__(self, envelope: Envelope, data: Array, work: Work | None) -> None:
        self.envelope, self.data, self.work = envelope, data, work

    def ready(self) -> bool:
        """Whether all of its data has arrived."""
        return self.work is None or self.work.done()


Room = Callable[[Envelope], Array]
"""Returns the vector for a message, of its length and dtype, or raises the error of the receive."""


class Receive:
    """A posted receive.

    Attributes:
        envelope: of the message, once matched.
        data: the vector with the message.
        cancelled: whether it was cancelled before it was matched.
    """

    def __init__(self, source: int, tag: int, room: Room) -> None:
        self.source, self.tag, self._room = source, tag, room
        self.envelope: Envelope | None = None
        self.data: Array | None = None
        self.cancelled = False
        self._settled = False  # whether the outcome is known; set last, because other threads read it without a lock
        self._work: Work | None = None
        self._arrived: Arrived | None = None
        self._error: BaseException | None = None
        self._gate = threading.Lock()

    def fits(self, envelope: Envelope, first: bool) -> bool:
        """Whether a message matches it; `first` tells whether it is the first unmatched one of its source."""
        if self.source not in (ANY_SOURCE, envelope.source):
            return False
        return first if self.tag == ANY_TAG else self.tag == envelope.tag

    def accept(self, envelope: Envelope) -> Array:
        """Match a message; returns the vector to receive into, a temporary one if the message does not fit the buffer."""
        self.envelope = envelope
        try:
            self.data = self._room(envelope)
        except XvcommError as error:
            self._error = error
            return scratch(envelope)
        return self.data

    def follow(self, work: Work | None) -> None:
        """Complete with `work`, or at once if it is None."""
        self._work = work
        self._settled = True

    def copy(self, arrived: Arrived) -> None:
        """Complete with a message that is, or will be, in separate memory."""
        self.accept(arrived.envelope)
        self._arrived = arrived
        self._settled = True

    def fail(self, error: BaseException) -> None:
        """Complete with an error."""
        self._error = error
        self._settled = True

    def cancel(self) -> None:
        """Cancel it before it is matched."""
        self.cancelled = self._settled = True

    def over(self) -> bool:
        """Whether it has completed or failed. Never blocks."""
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
        """Raise its error, once it is over."""
        error = self._error or _error_of(self._work)
        if error is not None:
            raise error


def _error_of(work: Work | None) -> BaseException | None:
    return None if work is None else work.exception()


def scratch(envelope: Envelope) -> Array:
    """Allocate a vector for a message."""
    return np.empty(envelope.nbytes // envelope.dtype.itemsize, envelope.dtype.numpy)
