"""Makes a communicator of the ranks that are left of another one, and again if ranks are lost meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from functools import partial

from xvcomm.engine.context import Context
from xvcomm.engine.session.survivors import Decision, Survivors
from xvcomm.errors import Aborted, DeadlineExceeded, PeerLost, StoreError
from xvcomm.types.deadline import Deadline
from xvcomm.types.opcode import OpCode

_REPLACED = {
    OpCode.SHRINK: "on a communicator that was shrunk; use the one that shrink() returned",
    OpCode.GROW: "on a communicator that was grown; use the one that grow() returned, or shrink() after it",
}
_NAMED = 16


class Shrinking:
    """The agreements of one communicator's ranks on the one that takes its place.

    Args:
        context: of the communicator.
        before: what has made this communicator of another one in the same job; None if it was made otherwise.

    Attributes:
        decision: that ranks may act on already, and `run` begins with; None if it agrees first.
    """

    def __init__(self, context: Context, before: Shrinking | None = None) -> None:
        self.context = context
        self._survivors: Survivors = Survivors(context.session, context.path) if before is None else before._survivors
        self._ranks, self._since = context.ranks, self._survivors.rounds
        self._departed, self._heard = set[int](), set[int]()  # the latter also of those that have come afterwards
        self._begun = self._done = False
        self.decision: Decision | None = None

    def run(self, deadline: Deadline, excluded: Collection[int] = ()) -> Context:
        """Close the communicator, and make the new one together with all ranks that are left.

        Args:
            excluded: ranks of the job that are left out, though they may live.

        Raises:
            XvcommError: names ranks by their numbers in the whole job.
            ClosedError: this rank has closed the communicator, or there is another one in its place.
            DeadlineExceeded: names the ranks that did not come; on all ranks that did.
            Aborted: the others have lost this rank, and go on without it; or another rank failed.
        """
        succession = self.context.session.succession
        while True:
            decision = self.decision or self.agree(OpCode.SHRINK, deadline, excluded)
            self.decision, generation = None, succession.generation
            try:
                return self.make(decision, OpCode.SHRINK, deadline)
            except PeerLost:
                if deadline.expired():
                    raise
            except StoreError:
                if deadline.expired():
                    raise
                succession.note_unreachable(generation)
            except DeadlineExceeded as error:
                if error.peer is not None or deadline.expired():  # else it is the store that does not answer
                    raise

    def agree(self, op: OpCode, deadline: Deadline, excluded: Collection[int] = ()) -> Decision:
        """Close the communicator, and agree with its ranks on those that go on.

        Args:
            op: what this rank does: GROW takes in processes that have asked to join.
        """
        lifecycle = self.context.lifecycle
        if self._done or not self._begun:
            lifecycle.ensure_open(op)
            self.context.look()
            self._begun = True
        come = partial(lifecycle.close, _REPLACED[op])
        decision = self._survivors.agree(
            self._ranks, self._departed, deadline, come, partial(self._hear, deadline), grows=op is OpCode.GROW,
            since=self._since, excluded=excluded,
        )  # fmt: skip
        self._check(decision, op)
        return decision

    def make(self, decision: Decision, op: OpCode, deadline: Deadline) -> Context:
        """Make the communicator of those that go on, in the same job.

        Raises:
            PeerLost: one of them is lost, too. Agree again.
        """
        self._ranks, self._departed = decision.members, set()
        path = f"{self._survivors.path}.shrunk-{decision.token}"
        made = Context(self.context.session, path, decision.members, deadline, op)
        self._done = True
        return made

    def end(self) -> None:
        """A communicator of another job has taken the place of this one."""
        self._done = True

    def lost(self, decision: Decision) -> int | None:
        """The first rank that does not go on."""
        return next((rank for rank in self._ranks if rank not in decision.members), None)

    def _hear(self, deadline: Deadline) -> None:
        """Note the ranks that have closed the communicator, by their numbers in the job; others than on this host tell it late.

        Those that could not make it together with this one have closed it, too, but go on to shrink it.
        """
        context = self.context
        closed = {context.ranks[rank] for rank in context.lifecycle.left()}
        new = (closed | context.session.supervision.departed(context.path)) - self._heard
        self._heard |= new
        made = context.session.guarded(f"comm/{context.path}", lambda: None)
        with contextlib.suppress(StoreError):
            if new and made.failure(deadline) is None:
                self._departed |= new

    def _check(self, decision: Decision, op: OpCode) -> None:
        """Raise if this rank cannot go on."""
        own = self.context.session.rank
        if decision.late:
            who = ", ".join(map(self.name, decision.late[:_NAMED]))
            raise DeadlineExceeded(
                f"{op}: {who} did not come in time; all ranks that are left must call {op}(). To wait for them again, "
                "call it again on all ranks",
                rank=own, peer=decision.late[0], op=str(op),
            )  # fmt: skip
        if own not in decision.members:
            raise Aborted(
                f"{op}: {self.name(decision.by)} and {len(decision.members) - 1} other ranks go on without this rank, "
                f"{self.name(own)}, which they exclude or cannot reach; end this process. `xvcomm doctor --reach` shows which "
                "hosts reach each other",
                rank=own, peer=decision.by, op=str(op),
            )  # fmt: skip

    def name(self, world_rank: int) -> str:
        """A rank of the job, for errors."""
        return self.context.diagnosis.name(self.context.ranks.index(world_rank))
