"""Status of a receive or probe."""

from __future__ import annotations

from xvcomm.adapters.mpi.datatypes import BYTE, Datatype
from xvcomm.adapters.mpi.messages import ANY_SOURCE, ANY_TAG, Envelope

UNDEFINED = -32766
"""A count that is not an integer, or the colour of no group."""


class Status:
    """Source, tag and length of a message; empty until an operation fills it.

    Attributes:
        source, tag: of the message.
        error: always 0; errors are raised.
    """

    def __init__(self, status: Status | None = None) -> None:
        self.source, self.tag, self.error, self._nbytes, self._cancelled = ANY_SOURCE, ANY_TAG, 0, 0, False
        if status is not None:
            self.__dict__.update(status.__dict__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Status) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # it changes

    @property
    def count(self) -> int:
        """Bytes of the message."""
        return self._nbytes

    @property
    def cancelled(self) -> bool:
        """Whether the receive was cancelled."""
        return self._cancelled

    def Get_source(self) -> int:
        """Rank that sent the message."""
        return self.source

    def Set_source(self, source: int) -> None:
        """Set the source."""
        self.source = source

    def Get_tag(self) -> int:
        """Tag of the message."""
        return self.tag

    def Set_tag(self, tag: int) -> None:
        """Set the tag."""
        self.tag = tag

    def Get_error(self) -> int:
        """Always 0."""
        return self.error

    def Set_error(self, error: int) -> None:
        """Set the error."""
        self.error = error

    def Get_count(self, datatype: Datatype = BYTE) -> int:
        """Number of elements of a datatype in the message; UNDEFINED if it is not an integer."""
        return UNDEFINED if self._nbytes % datatype.size else self._nbytes // datatype.size

    Get_elements = Get_count

    def Set_elements(self, datatype: Datatype, count: int) -> None:
        """Set the length."""
        self._nbytes = datatype.size * count

    def Is_cancelled(self) -> bool:
        """Whether the receive was cancelled."""
        return self._cancelled

    def Set_cancelled(self, flag: bool) -> None:
        """Set whether the receive was cancelled."""
        self._cancelled = flag

    def tell(self, envelope: Envelope | None, cancelled: bool = False) -> None:
        """Fill the status from a message, or (None) with MPI's empty status."""
        self.error, self._cancelled = 0, cancelled
        if envelope is None:
            self.source, self.tag, self._nbytes = ANY_SOURCE, ANY_TAG, 0
        else:
            self.source, self.tag, self._nbytes = envelope.source, envelope.tag, envelope.nbytes
