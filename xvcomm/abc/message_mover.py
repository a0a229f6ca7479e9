"""Contract of a device that can move single messages in fewer steps than a stream: host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod

from xvcomm.memory.ring import RingEnd
from xvcomm.types.deadline import Deadline


class MessageMover(ABC):
    """Moves single messages of one ring end for a caller that waits: one at a time, in fewer steps than a stream."""

    end: RingEnd

    @property
    @abstractmethod
    def record(self) -> int:
        """Number of the newest message's record in the flight recorder."""

    @abstractmethod
    def begin(self, collective: int, data: int, dtype: int, nbytes: int, tag: int, call_site: int) -> bool:
        """Note a message in the flight recorder, put it behind the ring end's others, and move what need not wait.

        Args:
            collective: number of the communicator's next collective, for the record.
            data: address of the array.
            dtype, nbytes, tag: as in `ring.Message`.
            call_site: where the user called, from `trace.callsite`.

        Returns:
            Whether the message is through and the end of the record noted; else comes `finish`.

        Raises:
            RingStopped: see `Stream.synchronize`; also if the communicator's abort word is set.
        """

    @abstractmethod
    def finish(self, deadline: Deadline) -> None:
        """Block until the message is through, and note the end of its record.

        Raises:
            RingStopped, RingStalled: see `Stream.synchronize`.
        """

    @abstractmethod
    def discard(self) -> bool:
        """Give up the message after an error or an interrupt; False if there is none or it is through after all.

        The caller must then stop its ring and record its end.
        """


class SupportsMessageMovers(ABC):
    """What a `Device` that is not asynchronous may implement too; without message movers, streams carry all messages."""

    @abstractmethod
    def message_mover(self, end: RingEnd, op: int, recorder: int, communicator: int, stop: int) -> MessageMover:
        """A message mover for single messages of a ring end. Never blocks.

        Args:
            op: `OpCode.SEND` or `OpCode.RECV`, for the record.
            recorder, communicator: `Recorder.handle`, and the communicator's number in the records.
            stop: address of the communicator's abort word.
        """
