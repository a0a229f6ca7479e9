"""How a communicator ends: by an error, `abort`, `close`, or as the beginning of the one that `shrink` makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from xvcomm.comm.shrinking import Shrinking
from xvcomm.memory.ring import Reason

if TYPE_CHECKING:
    from xvcomm.engine.context import Context


class Lifetime:
    """Part of Communicator."""

    _context: Context
    rank: int

    def _init_lifetime(self) -> None:
        self._whole = self._context.path == "0"
        self._shrinking = Shrinking(self._context)
        self._successor: Self | None = None

    def check(self) -> None:
        """Raise the error that ended this communicator, if there is one: PeerLost, Aborted, ... Never blocks."""
        self._context.check()

    def abort(self, reason: str = "") -> None:
        """Make every rank leave its operation and raise Aborted with `reason`. Thread-safe."""
        self._context.lifecycle.abort(Reason.ABORTED.word(self.rank, self.rank), reason)

    def _replace_by(self, made: Self) -> None:
        """Let a communicator that `shrink` has made of this one take its place."""
        self._successor = made
        made._whole, made._shrinking = self._whole, Shrinking(made._context, self._shrinking)

    def close(self) -> None:
        """Leave the communicator and free its resources; those of the whole job if `xvcomm.init` created it. Idempotent.

        Asynchronous operations that are not complete fail with an error: wait for them first. Without effect after `shrink`,
        which has closed it.
        """
        if self._successor is not None:
            return
        if self._whole:
            self._context.session.close()
        else:
            self._context.lifecycle.close()

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call a function when this communicator is closed: after its operations have stopped, before its memory is unmapped."""
        self._context.lifecycle.on_close(callback)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._context.session.explaining.note_end(error)
        last = self
        while last._successor is not None:
            last = last._successor
        last.close()
