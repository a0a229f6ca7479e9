"""Makes a communicator of the ranks that are left of another one, and again if ranks are lost meanwhile."""

from __future__ import annotations

from functools import partial

from xvcomm.engine.context import Context
from xvcomm.engine.session.survivors import Decision, Survivors
from xvcomm.errors import Aborted, DeadlineExceeded, PeerLost, StoreError
from xvcomm.types.deadline import Deadline
from xvcomm.types.opcode import OpCode

_SHRUNK = "on a communicator that was shrunk; use the one that shrink() returned"
_NAMED = 16


class Shrinking:
    """Shrinks one communicator, once, or repeatedly until it succeeds.

    Args:
        context: of the communicator.
        before: what has made this communicator of another one; None if it was made otherwise.
    """

    def __init__(self, context: Context, before: Shrinking | None = None) -> None:
        self._context = context
        self._survivors: Survivors = Survivors(context.session, context.path) if before is None else before._survivors
        self._departed: set[int] | None = None
        self._done = False

    def run(self, deadline: Deadline) -> Context:
        """Close the communicator, and make the new one together with all ranks that are left.

        Raises:
            XvcommError: names ranks by their numbers in the whole job.
            ClosedError: this rank has closed the communicator, or has shrunk it already.
            DeadlineExceeded: names the ranks that did not come; on all ranks that did.
            Aborted: the others have lost this rank, and go on without it; or another rank failed.
        """
        context, session, ranks = self._context, self._context.session, self._context.ranks
        if self._done or self._departed is None:
            context.lifecycle.ensure_open(OpCode.SHRINK)
            self._departed = self._find_departed(deadline)
        departed = self._departed
        while True:
            decision = self._survivors.agree(ranks, departed, deadline, partial(context.lifecycle.close, _SHRUNK))
            self._check(decision)
            path = f"{self._survivors.path}.shrunk-{decision.token}"
            try:
                made = Context(session, path, decision.members, deadline, OpCode.SHRINK)
                self._done = True
                return made
            except PeerLost:
                if deadline.expired():
                    raise
            except StoreError:
                if deadline.expired():
                    raise
                session.succession.note_unreachable()
            except DeadlineExceeded as error:
                if error.peer is not None or deadline.expired():  # else it is the store that does not answer
                    raise
            ranks, departed = decision.members, set()

    def _find_departed(self, deadline: Deadline) -> set[int]:
        """The ranks that have closed the communicator, by their numbers in the job.

        Those that could not make it together with this one have closed it, too, but go on to shrink it.
        """
        context = self._context
        context.look()
        departed = {context.ranks[rank] for rank in context.lifecycle.departed}
        made = context.session.guarded(f"comm/{context.path}", lambda: None)
        try:
            return departed if departed and made.failure(deadline) is None else set()
        except StoreError:
            return set()

    def _check(self, decision: Decision) -> None:
        """Raise if this rank cannot go on."""
        own = self._context.session.rank
        if decision.late:
            who = ", ".join(map(self._name, decision.late[:_NAMED]))
            raise DeadlineExceeded(
                f"shrink: {who} did not come in time; all ranks that are left must call shrink(). To wait for them again, "
                "call it again on all ranks",
                rank=own, peer=decision.late[0], op="shrink",
            )  # fmt: skip
        if own not in decision.members:
            raise Aborted(
                f"shrink: {self._name(decision.by)} and {len(decision.members) - 1} other ranks go on without this rank, "
                f"{self._name(own)}, which they cannot reach; end this process. `xvcomm doctor --reach` shows which hosts "
                "reach each other",
                rank=own, peer=decision.by, op="shrink",
            )  # fmt: skip

    def _name(self, world_rank: int) -> str:
        return self._context.diagnosis.name(self._context.ranks.index(world_rank))
