"""From open to closed: who may use a communicator's memory and native library, and how all of it stops together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from xvcomm.abc.collective import Collective, CollectiveStopped
from xvcomm.abc.message_mover import MessageMover
from xvcomm.engine.inflight.tracker import Tracker
from xvcomm.engine.session.diagnosis import Diagnosis
from xvcomm.engine.session.elsewhere import Stop
from xvcomm.engine.session.rings import Rings
from xvcomm.engine.session.session import Session
from xvcomm.errors import ClosedError
from xvcomm.memory.ring import Message, Reason
from xvcomm.system.forking import FORKED
from xvcomm.trace.contract import ContractCheck
from xvcomm.trace.operation import Operation
from xvcomm.types.deadline import Deadline
from xvcomm.types.opcode import OpCode

_CLOSED = "on a communicator that was closed; make a new one"
_DRAIN_SECONDS, _SETTLE_SECONDS, _TELL_SECONDS, _PAUSE_SECONDS = 10.0, 1.0, 0.3, 0.0005
_NOTHING = Message(0, 0, 0, 0)


class Lifecycle:
    """One communicator on this rank: open, then aborted, or closed, or both. Thread-safe.

    Attributes:
        lock: held to stop the communicator or to unmap its memory, so that no thread writes to unmapped memory.
        users: operations and message movers under way, and what stands for compiled code that may be in the communicator's
            memory: `close` unmaps nothing before it is empty. `enter` adds to it; to leave, discard from it.
        closed: empty, or in words why no operation may begin on this rank any more.
        contract: the contract check, while it is mapped.
        native: the native library, while it is joined.
        departed: the ranks of this host that have closed the communicator, as far as this rank has seen.
    """

    def __init__(
        self, session: Session, path: str, ranks: tuple[int, ...], rank: int, island: tuple[int, ...], rings: Rings,
        tracker: Tracker, diagnosis: Diagnosis, part: str,
    ) -> None:  # fmt: skip
        """An open communicator.

        Args:
            path, ranks, rank: see `Context`.
            island: the ranks that join one native library with this rank.
            part: what tells its segments from those of other communicators, see `Session.sweep`.
        """
        self._session, self._path, self._ranks, self._rank, self._island = session, path, ranks, rank, island
        self._rings, self._tracker, self._diagnosis, self._part = rings, tracker, diagnosis, part
        self.lock = threading.RLock()
        self.users: set[Operation | MessageMover] = set()
        self.closed = ""
        self.contract: ContractCheck | None = None
        self.native: Collective | None = None
        self.departed: set[int] = set()
        self._word = 0
        self._callbacks: list[Callable[[], None]] = []

    def map(self, contract: ContractCheck) -> None:
        """Add the contract check to what stops together."""
        with self.lock:
            self.contract = self._diagnosis.contract = contract
            if self._word:
                contract.abort(self._word)

    def join(self, native: Collective) -> None:
        """Add the native library to what stops together."""
        with self.lock:
            self.native = native
            word = self._word or self._gone_member()
            if word:
                native.abort(word)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Let `close` call a function after it has stopped operations and before it unmaps memory."""
        self._callbacks.append(callback)

    def enter(self, user: Operation | MessageMover, name: OpCode) -> None:
        """Add to `users`.

        Raises:
            ClosedError: this rank has closed the communicator; nothing was added.
        """
        self.users.add(user)
        if self.closed:
            self.users.discard(user)
            self.ensure_open(name)

    def ensure_open(self, name: OpCode) -> None:
        """Raise ClosedError after `close`."""
        if self.closed:
            raise ClosedError(f"{name} {self.closed}", rank=self._rank, op=str(name))

    def word(self) -> int:
        """0, or the abort word that says why the communicator is finished; the contract check was told first."""
        with self.lock:
            return (self.contract.abort_word() if self.contract is not None else 0) or self._word

    def aborted(self) -> bool:
        """Whether this rank has acted on an abort; `word` may be set before."""
        return self._word != 0

    def check(self, name: OpCode) -> None:
        """Raise if the communicator is finished.

        Args:
            name: the operation that fails by it.

        Raises:
            PeerLost, Aborted, DeadlineExceeded, MismatchError: why.
            ClosedError: this rank has closed it.
        """
        word = self.word()
        self.ensure_open(name)
        if word:
            raise self._diagnosis.error(word, Operation(name, -1, _NOTHING))

    def check_island(self, name: OpCode) -> None:
        """`check`, and raise CollectiveStopped if a rank left that the native library would wait for."""
        self.check(name)
        word = self._gone_member()
        if word:
            raise CollectiveStopped(word)

    def _gone_member(self) -> int:
        """0, or the abort word for the first rank of this island that closed the communicator."""
        gone = self.departed.intersection(self._island)
        if self.closed:
            gone.add(self._rank)
        return Reason.LEFT.word(min(gone)) if gone else 0

    def look(self) -> bool:
        """Act on what the other ranks published in the contract check; False after `close`. The caller holds `lock`."""
        contract = self.contract
        if self.closed or contract is None:
            return False
        word, why = contract.abort_word(), ""
        if not word:
            word, why = self._diagnosis.found(self._rings.told())
        if word and not self._word:
            self.abort(word, why)
        if contract.departures() != len(self.departed):
            for rank in contract.departed():
                self._depart(rank)
        return True

    def lose(self, world_rank: int) -> None:
        """A process of the job ended; if it died, stop everything it belonged to."""
        if world_rank not in self._ranks:
            return
        rank = self._ranks.index(world_rank)
        with self.lock:
            if self.closed:
                return
            self.look()  # first, what it may have told before it left
            if self._session.journal.left(world_rank):
                self._depart(rank)
            else:
                self.abort(Reason.PEER_LOST.word(rank))

    def _depart(self, rank: int) -> None:
        """A rank left in good order: only who still waits for it fails."""
        if rank in self.departed:
            return
        self.departed.add(rank)
        word = Reason.LEFT.word(rank)
        self._rings.lose(rank, word)
        if self.native is not None and rank in self._island:
            self.native.abort(word)

    def abort(self, word: int, why: str = "") -> None:
        """Stop the communicator on all ranks; of each host the first reason stays.

        Without effect after `close`.

        Args:
            word: reason and rank; see `Reason`.
            why: in words, for the others.
        """
        with self.lock:
            if self.closed:
                return
            first, tells = not self._word, bool(why) or Reason.parse(word) == (Reason.ABORTED, self._rank)
            if self.contract is not None:
                if why and first:
                    self.contract.explain(why)
                self.contract.abort(word)
                tells = tells and word == self.contract.abort_word()
                word = self.contract.abort_word()
            self._word = self._word or word
            abroad, found = self._diagnosis.abroad(word)
            self._stop(abroad)
            if not first or not (tells or found):
                return
            self._session.announce(Stop(self._path, abroad, why or found), self._ranks)
        # What this rank tells others from now on, they hear later than this.
        self._rings.tell(Deadline.after(_TELL_SECONDS))

    def hear(self, world_rank: int, word: int, why: str) -> None:
        """A rank of another host has stopped the communicator, with the reason in words."""
        self._diagnosis.hear(self._ranks.index(world_rank), why)
        self.abort(word)

    def _stop(self, word: int) -> None:
        self._rings.abort(word)
        if self.native is not None:
            self.native.abort(word)

    def close(self, why: str = _CLOSED) -> None:
        """Leave: who still waits for this rank raises PeerLost. Idempotent.

        Args:
            why: in words, why no operation may begin any more.

        What blocking operations have put on the device's streams is waited for, but not for long: this also runs when
        the process ends by an error.
        """
        if not self.closed and not self._word:
            self._tracker.drain(Deadline.after(_DRAIN_SECONDS))
        with self.lock:
            if self.closed:
                return
            self.closed = why
            word = self._diagnosis.abroad(self.word())[0] or Reason.LEFT.word(self._rank)
            if self.contract is not None:
                self.contract.leave()
            self._stop(Reason.LEFT.word(self._rank))
            self._rings.leave(word)
        for callback in self._callbacks:
            callback()
        if not self._settled():
            return  # a thread, or the device, is still inside; what it may touch stays mapped as long as the process lives
        with self.lock:
            self._rings.close()
            if self.native is not None:
                self.native.close()
            if self.contract is not None:
                left = {self._ranks[r] for r in self.contract.departed()}
                self._session.sweep_if_last([self._ranks[r] for r in self.contract.ranks], left, self._part)
                self.contract.close()
            self.contract = self._diagnosis.contract = self.native = None

    def _settled(self) -> bool:
        """Wait until no operation is under way; whether that came about."""
        deadline = Deadline.after(_SETTLE_SECONDS)
        while self.users or self._tracker:
            if deadline.expired():
                return False
            self._tracker.look()
            time.sleep(_PAUSE_SECONDS)
        return True

    def after_fork(self) -> None:
        """End in a forked child, whose shared memory is its own by now: compiled code finds it aborted."""
        self.closed = FORKED
        self.lock = threading.RLock()  # a thread of the parent's may hold the parent's
        if self.contract is not None:
            self.contract.abort(Reason.LEFT.word(self._rank))
