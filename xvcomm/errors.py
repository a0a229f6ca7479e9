"""Every error xvcomm raises. Each message says what happened, to whom, and what to do."""

from __future__ import annotations


class XvcommError(Exception):
    """Base of every error that xvcomm raises.

    Attributes:
        rank: the rank that raises, if known.
        peer: the other rank concerned, if there is one.
        op: the operation under way, for instance `"all_reduce"`.
        seq: its sequence number in the communicator.
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
    """An array cannot be used: not contiguous, read-only as an output, wrong shape, wrong device."""


class DTypeError(XvcommError, TypeError):
    """A dtype is unknown, or the operation is not defined on it."""


class ArgumentError(XvcommError, ValueError):
    """An argument other than an array is out of range or of the wrong kind."""


class NotPicklable(ArgumentError, TypeError):
    """A communicator was pickled or copied: it belongs to its process."""


class ConfigError(XvcommError, ValueError):
    """An `XVCOMM_*` variable, or a launcher's variable, is missing or wrong; the message names it."""


class AuthenticationError(XvcommError, ConnectionError):
    """The other side of the store does not know the job's secret."""


class StoreError(XvcommError, ConnectionError):
    """The store cannot be reached, or its address cannot be taken."""


class ResourceError(XvcommError, OSError):
    """The machine refuses a resource: /dev/shm is full, a limit is reached."""


class BackendUnavailable(XvcommError, RuntimeError):
    """No backend or transport can do what is asked; the message carries each refusal and its remedy."""


class MismatchError(XvcommError, RuntimeError):
    """Two ranks described the same operation differently. Raised on both; nothing was delivered."""


class PeerLost(XvcommError, ConnectionError):
    """A rank died or left while others needed it; names the rank and its last operation."""


class DeadlineExceeded(XvcommError, TimeoutError):
    """An operation did not finish in time; names who is missing."""


class Aborted(XvcommError, RuntimeError):
    """The communicator was aborted, by `abort()` here or on another rank, or by what went wrong there; gives the reason."""


class ClosedError(XvcommError, RuntimeError):
    """The communicator was closed before this call."""


class ScheduleError(XvcommError, ValueError):
    """A schedule cannot run: names the offending step or action."""
