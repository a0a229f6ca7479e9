"""Exceptions that xvcomm raises. Each message says what happened, which rank it concerns, and what to do."""

from __future__ import annotations


class XvcommError(Exception):
    """Base class of all xvcomm exceptions.

    Attributes:
        rank: rank that raises, if known.
        peer: the other rank involved, if any.
        op: name of the operation in progress, for instance `"all_reduce"`.
        seq: sequence number of that operation in its communicator.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        op: str | None = None,
        seq: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.op = op
        self.seq = seq


class ArrayError(XvcommError, ValueError):
    """An array cannot be used: it is not contiguous, a read-only output, or has a wrong shape or device."""


class DTypeError(XvcommError, TypeError):
    """A dtype is unknown, or the operation is not defined for it."""


class ArgumentError(XvcommError, ValueError):
    """An argument other than an array is out of range or of the wrong kind."""


class NotPicklable(ArgumentError, TypeError):
    """A communicator was pickled or copied. It is bound to its process and supports neither."""


class ConfigError(XvcommError, ValueError):
    """An `XVCOMM_*` variable or a launcher's variable is missing or invalid; the message names it."""


class AuthenticationError(XvcommError, ConnectionError):
    """The store and this process have different job secrets."""


class StoreError(XvcommError, ConnectionError):
    """The store cannot be reached, or its address is already in use."""


class ResourceError(XvcommError, OSError):
    """The system refuses a resource: for instance /dev/shm is full, or a process limit is reached."""


class BackendUnavailable(XvcommError, RuntimeError):
    """No backend or transport supports the request; the message lists the reason and remedy for each one tried."""


class MismatchError(XvcommError, RuntimeError):
    """Two ranks called the same operation with different arguments. Raised on both ranks; no data was delivered."""


class PeerLost(XvcommError, ConnectionError):
    """A rank exited or left while other ranks needed it; names the rank and its last operation."""


class DeadlineExceeded(XvcommError, TimeoutError):
    """An operation did not finish before its deadline; names the ranks that did not take part."""


class Aborted(XvcommError, RuntimeError):
    """The communicator was aborted by `abort()` or by an error, on this rank or another; gives the reason."""


class ClosedError(XvcommError, RuntimeError):
    """The communicator was closed before this call."""


class ScheduleError(XvcommError, ValueError):
    """A pipeline or collective schedule cannot run; names the offending step or action."""
