"""How a communicator ends: by an error, `abort`, `close`, or because another one takes its place, by `shrink` or `grow`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Self

from xvcomm.comm.growing import Growing
from xvcomm.comm.shrinking import Shrinking
from xvcomm.comm.subgroups import naming
from xvcomm.errors import ArgumentError, ClosedError
from xvcomm.memory.ring import Reason
from xvcomm.types.deadline import Deadline

if TYPE_CHECKING:
    from xvcomm.engine.context import Context


class Lifetime:
    """Part of Communicator."""

    _context: Context
    rank: int
    timeout: float

    if TYPE_CHECKING:

        def __init__(self, context: Context, timeout: float) -> None: ...

    def _init_lifetime(self) -> None:
        self._whole = self._context.path == "0"
        self._shrinking = Shrinking(self._context)
        self._newest: list[Lifetime] = []  # of those that took the place of one another, which share it; empty before

    def check(self) -> None:
        """Raise the error that ended this communicator, if there is one: PeerLost, Aborted, ... Never blocks."""
        self._context.check()

    def abort(self, reason: str = "") -> None:
        """Make every rank leave its operation and raise Aborted with `reason`. Thread-safe."""
        self._context.lifecycle.abort(Reason.ABORTED.word(self.rank, self.rank), reason)

    def shrink(self, timeout: float | None = None, *, exclude: Collection[int] = ()) -> Self:
        """Create a communicator of the ranks that are left, after ranks were lost, without a restart of the processes.

        All ranks that are left must call this; it blocks until they have, or are lost too. They keep their order. Also
        possible after another error, or without one: then all ranks are left. This communicator is closed, and its
        asynchronous operations that are not complete fail. Other communicators remain as they are. Use the new one in place
        of this one: closing it closes the job, if closing this one would have; leaving this one's `with` block closes it.

        A rank that has closed this communicator is not waited for, if this rank knows of it.

        Args:
            exclude: ranks that are left out though they may live, for instance because they hang; the same on all others.
                One that calls this nevertheless raises Aborted.

        Raises:
            DeadlineExceeded: names the ranks that did not call this; on all ranks that did. They can call it again.
            Aborted: the others cannot reach this rank and go on without it; or another rank failed meanwhile.
            PeerLost: the process that served the job's store is lost; restart the job.
            ClosedError: this communicator was closed, or another one has taken its place.
            ArgumentError: `exclude` has this rank, or a number that is no rank.
        """
        if self.rank in exclude or not all(0 <= rank < len(self._context.ranks) for rank in exclude):
            raise ArgumentError(f"exclude={list(exclude)}: expected other ranks of {len(self._context.ranks)}")
        with naming(self._context):
            made = self._shrinking.run(self._deadline(timeout), [self._context.ranks[rank] for rank in exclude])
        return self._replace_by(made, Shrinking(made, self._shrinking))

    def grow(self, timeout: float | None = None) -> Self:
        """Create a communicator of all ranks of this one and the processes that have asked to join the job by now.

        All ranks must call this at the same point of the program; it blocks until they have, and the newcomers have joined. A
        process asks by `xvcomm.init` with `XVCOMM_REJOIN=1`, and gets the new communicator there. It has the rank number
        that it was started with if that is free, or else the last one. This communicator is closed, as by `shrink`. With
        newcomers the job begins anew in the same processes: its other communicators are closed, too. Without, this does what
        `shrink` does. Only for the communicator of the whole job.

        A newcomer that fails or ends meanwhile is left out, and so is one that does not join in half of the time that is left.

        Raises:
            PeerLost: a rank of this communicator is lost; on all ranks that are left. They can go on by `shrink`.
            DeadlineExceeded: names the ranks that did not come, on all that did. They can call it again, or `shrink`.
            Aborted: a rank failed meanwhile.
            ClosedError: this communicator was closed, or another one has taken its place.
            ArgumentError: this is not the communicator of the whole job.
        """
        self._ensure_whole()
        with naming(self._context):
            made = Growing(self._shrinking).run(self._deadline(timeout))
        same = made.session is self._context.session
        return self._replace_by(made, Shrinking(made, self._shrinking if same else None))

    def join_requests(self, timeout: float | None = None) -> int:
        """How many processes wait to join the job, by `grow`; this rank may know of one earlier than another rank.

        Takes one request to the job's store. Some of them may have ended since they asked.

        Raises:
            DeadlineExceeded, StoreError: the store does not answer, or cannot be reached.
            ClosedError: this communicator was closed, or another one has taken its place.
            ArgumentError: this is not the communicator of the whole job.
        """
        self._ensure_whole()
        if self._context.lifecycle.closed:
            raise ClosedError(f"join_requests {self._context.lifecycle.closed}", rank=self.rank)
        return self._context.session.join_requests.count(self._deadline(timeout))

    def _ensure_whole(self) -> None:
        if not self._whole:
            raise ArgumentError(
                "only the communicator of the whole job can grow: call join_requests() and grow() on what xvcomm.init(), "
                "shrink() or grow() returned, and make groups of the new one by split() or subgroup()"
            )

    def _replace_by(self, context: Context, shrinking: Shrinking) -> Self:
        """Let a communicator with this context take the place of this one."""
        made = type(self)(context, self.timeout)
        made._whole, made._shrinking, made._newest = self._whole, shrinking, self._newest
        self._newest[:] = [made]
        return made

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(self.timeout if timeout is None else timeout)

    def close(self) -> None:
        """Leave the communicator and free its resources; those of the whole job if `xvcomm.init` created it. Idempotent.

        Asynchronous operations that are not complete fail with an error: wait for them first. Without effect after `shrink`
        or `grow`, which have closed it.
        """
        if self._newest and self not in self._newest:
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
        (self._newest or [self])[0].close()
