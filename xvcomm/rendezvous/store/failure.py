"""An error that one rank publishes in a store, for others to raise."""

from __future__ import annotations

from typing import Any

import msgspec

from xvcomm.errors import Aborted, ConfigError, DeadlineExceeded, MismatchError, PeerLost, XvcommError

_KINDS: dict[str, type[XvcommError]] = {
    kind.__name__: kind for kind in (PeerLost, DeadlineExceeded, Aborted, ConfigError, MismatchError)
}


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error of one of these classes: the class, the text, and the rank of the job that it names."""

    kind: str
    text: str
    peer: int | None = None

    @classmethod
    def of(cls, error: XvcommError) -> Failure:
        """What becomes of an error of one of these classes."""
        kind = next(name for name, kind in _KINDS.items() if isinstance(error, kind))
        return cls(kind, str(error), error.peer)

    def error(self, **known: Any) -> XvcommError:
        """The error that another rank raises.

        Args:
            known: what that rank knows of it, see `XvcommError`.
        """
        return _KINDS[self.kind](self.text, peer=self.peer, **known)


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What several ranks have tried together: why it has failed; or that it has not."""

    failure: Failure | None = None


decode_failure = msgspec.msgpack.Decoder(Failure).decode
decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


def cause(error: BaseException, rank: int, hostname: str) -> XvcommError:
    """The error for others when a rank fails by an error: the same one if another rank caused it."""
    if isinstance(error, (PeerLost, DeadlineExceeded, Aborted)) and error.peer not in (None, rank):
        return error
    return Aborted(f"rank {rank} on {hostname} failed: {type(error).__name__}: {error}", peer=rank)
