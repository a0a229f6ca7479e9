"""What stops a communicator: errors from below, and what rings and the native library report while no thread waits."""

from __future__ import annotations

from xvcomm.abc.collective import CollectiveStalled, CollectiveStopped
from xvcomm.abc.device import RingStalled, RingStopped
from xvcomm.engine.lifecycle import CLOSED, Lifecycle
from xvcomm.engine.session.diagnosis import Diagnosis
from xvcomm.engine.session.explaining import Explanation
from xvcomm.engine.session.rings import Rings
from xvcomm.errors import Aborted, ClosedError, DeadlineExceeded, PeerLost, XvcommError
from xvcomm.memory.ring import Reason
from xvcomm.system import limits
from xvcomm.trace.operation import NO_PEER, Operation
from xvcomm.types.opcode import OpCode
from xvcomm.types.topology import Topology

_OVER = (Reason.DEADLINE, Reason.ABORTED)
_CLOSED_EARLY = "on a communicator that was closed while it was under way; wait for asynchronous operations first"


class Failures:
    """Aborts one communicator for the right reason, and gives the error for the user. Thread-safe.

    Args:
        ranks, rank, topology: see `Context`.
    """

    def __init__(
        self, lifecycle: Lifecycle, diagnosis: Diagnosis, rings: Rings, ranks: tuple[int, ...], rank: int,
        topology: Topology,
    ) -> None:  # fmt: skip
        self._lifecycle, self._diagnosis, self._rings = lifecycle, diagnosis, rings
        self._ranks, self._rank, self._topology = ranks, rank, topology

    def explain(self, error: BaseException, operation: Operation) -> BaseException:
        """Abort the communicator because an operation ended by an error from below; gives the error for the user."""
        lifecycle, diagnosis = self._lifecycle, self._diagnosis
        stopped = isinstance(error, (RingStopped, CollectiveStopped))
        if stopped and lifecycle.closed and not lifecycle.aborted():
            return self._closed_early(operation)
        if known := lifecycle.word():
            lifecycle.abort(known)
        elif isinstance(error, (RingStopped, CollectiveStopped)):
            # A mismatch says more than that its rank is gone since. After a deadline or an abort, calls differ anyway.
            over = bool(error.word) and Reason.parse(error.word)[0] in _OVER
            differs = isinstance(error, RingStopped) and not over and error.end.mismatch()
            self._pass_on(+Reason.MISMATCH if differs else error.word)
        elif isinstance(error, (RingStalled, CollectiveStalled, DeadlineExceeded)):
            word, why, explanation = self._why_late(error, operation)
            lifecycle.abort(word, why)
            if explanation is not None and lifecycle.word() == word:
                self._diagnosis.tell(explanation)
        elif isinstance(error, (PeerLost, Aborted)) and error.peer is not None:  # the store told of another rank
            lifecycle.abort(diagnosis.passed_on(error), str(error))
        else:
            # It went wrong here, so that this rank has the story and the others need to be told.
            error = limits.named(error, f"do {operation}")
            lifecycle.abort(Reason.ABORTED.word(self._rank, self._rank), f"{type(error).__name__}: {error}")
            return error
        below = (RingStopped, CollectiveStopped, RingStalled, CollectiveStalled, XvcommError)
        if not isinstance(error, below):
            return error
        word = lifecycle.word()
        return diagnosis.error(word, operation) if word else self._closed_early(operation)  # closed by another thread

    def _closed_early(self, operation: Operation) -> ClosedError:
        closed = self._lifecycle.closed
        what = f"{operation} {_CLOSED_EARLY if closed == CLOSED else closed}"
        return ClosedError(what, rank=self._rank, op=str(operation.name), seq=operation.sequence)

    def _pass_on(self, word: int) -> None:
        """Tell all that a ring, or the native library, was stopped; they were the first to know why."""
        native = self._lifecycle.native
        if native is not None and native.failure and Reason.parse(word)[0] is not Reason.MISMATCH:
            self._lifecycle.abort(Reason.ABORTED.word(self._rank, self._rank), native.failure)
        else:
            word, why = self._diagnosis.found(word)
            if word and Reason.parse(word)[0] is Reason.LEFT:
                # Ranks of other hosts may wait for this rank alone, and would only see that it leaves, too.
                why = f"{self._diagnosis.name(Reason.parse(word)[1])} left"
            self._lifecycle.abort(word, why)

    def _why_late(self, error: BaseException, operation: Operation) -> tuple[int, str, Explanation | None]:
        """The abort word for a deadline that has passed, the reason in words, and what holds the whole job up."""
        diagnosis = self._diagnosis
        # What native libraries join over hosts was not compared before.
        differs = diagnosis.differing() if self._topology.spread and operation.peer == NO_PEER else None
        if differs is not None:
            return *differs, None
        late = diagnosis.late(operation, self._suspects(error))
        word = Reason.DEADLINE.word(late.ranks[0] if late.ranks else self._rank, self._rank)
        return word, late.why or f"{operation}: {error}", late.explanation

    def _suspects(self, error: BaseException) -> list[int]:
        if isinstance(error, RingStalled):
            return sorted({end.peer for end in error.ends})
        if isinstance(error, CollectiveStalled):
            island = self._topology.island_of(self._rank).ranks
            return [island[m] for m in error.missing]
        return [r for r, world in enumerate(self._ranks) if isinstance(error, XvcommError) and error.peer == world]

    def look(self) -> None:
        """Find out what no host thread waits for: rings and libraries that stopped; the caller holds `Lifecycle.lock`."""
        lifecycle = self._lifecycle
        for end in self._rings.ends():
            word = end.abort_word()
            if Reason.bad(word) and not lifecycle.aborted():
                self._pass_on(word)
        native, contract = lifecycle.native, lifecycle.contract
        if native is not None and contract is not None and Reason.bad(native.error()) and not lifecycle.aborted():
            if native.failure:
                lifecycle.abort(Reason.ABORTED.word(self._rank, self._rank), native.failure)
            else:  # the host is in a call of it past the deadline
                sequence, message = contract.newest()
                self.explain(CollectiveStalled(()), Operation(OpCode(message.op), sequence, message))
