"""From open to closed: who may use a communicator's memory and native library, and how all of it stops together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from xvcomm.abc.collective import Collective, CollectiveStopped
from xvcomm.abc.message_mover import MessageMover
from xvcomm.engine.inflight.tracker import Tracker
from xvcomm.engine.session.diagnosis import Diagnosis
from xvcomm.engine.session.elsewhere import Departure, Stop
from xvcomm.engine.session.rings import Rings
from xvcomm.engine.session.session import Session
from xvcomm.errors import ClosedError
from xvcomm.memory.ring import Message, Reason
from xvcomm.system.forking import FORKED
from xvcomm.trace.contract import ContractCheck
from xvcomm.trace.operation import Operation
from xvcomm.types.deadline import Deadline
from xvcomm.types.opcode import OpCode
from xvcomm.types.topology import Topology

CLOSED = "on a communicator that was closed; make a new one"
_DRAIN_SECONDS, _SETTLE_SECONDS, _TELL_SECONDS, _PAUSE_SECONDS = 10.0, 1.0, 1.0, 0.0005
_HEAD_START_SECONDS = 0.3
"""How long ranks of other hosts have to hear why a communicator stops before the native library is stopped: their kernels end
by that, as on success.
"""
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
        departed: the ranks that have closed the communicator, as far as this rank has seen.
    """

    def __init__(
        self, session: Session, path: str, ranks: tuple[int, ...], rank: int, topology: Topology, rings: Rings,
        tracker: Tracker, diagnosis: Diagnosis, part: str,
    ) -> None:  # fmt: skip
        """An open communicator.

        Args:
            path, ranks, rank, topology: see `Context`.
            part: what tells its segments from those of other communicators, see `Session.sweep`.
        """
        self._session, self._path, self._ranks, self._rank = session, path, ranks, rank
        self._island, self._spread = topology.island_of(rank).ranks, topology.spread
        self._rings, self._tracker, self._diagnosis, self._part = rings, tracker, diagnosis, part
        self.lock = threading.RLock()
        self.users: set[Operation | MessageMover] = set()
        self.closed = ""
        self.contract: ContractCheck | None = None
        self.native: Collective | None = None
        self.departed: set[int] = set()
        self._departures = 0
        self._called: dict[int, int] = {}  # of departed ranks of other hosts: how many collectives they had called
        self._head_start = _HEAD_START_SECONDS if self._spread else 0.0
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
            word = self._word or (Reason.LEFT.word(self._rank) if self.closed else 0)
            if word:
                native.abort(word)
            for rank in sorted(self.departed):
                self._refuse(rank)

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

    def left(self) -> set[int]:
        """`departed`, and the rank whose departure has ended an operation: of another host, it may not have told everyone yet."""
        word = self.word()
        return self.departed | ({Reason.parse(word)[1]} if word and not Reason.bad(word) else set())

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

    def check_island(self, name: OpCode, sequence: int | None) -> None:
        """`check`, and `check_members`."""
        self.check(name)
        self.check_members(sequence)

    def check_members(self, sequence: int | None) -> None:
        """Raise CollectiveStopped if a rank of this island left before collective number `sequence`; with None, if one left."""
        missing = self.missing_members(sequence)
        if missing:
            raise CollectiveStopped(Reason.LEFT.word(min(missing)))

    def missing_members(self, sequence: int | None) -> list[int]:
        """The ranks of this island that left before they came to a collective, or left the job without telling."""
        gone = self.departed.intersection(self._island)
        left = self._session.journal.left
        return [r for r in gone if sequence is None or self._lacks(r, sequence, unknown=left(self._ranks[r]))]

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
        departures = contract.departures()
        if departures != self._departures:
            self._departures = departures
            for rank in set(contract.departed()) - self.departed:
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
                self._refuse(rank, session_closed=True)
            else:
                self.abort(Reason.PEER_LOST.word(rank))

    def _depart(self, rank: int) -> None:
        """A rank left in good order, and all that it sent has come: only who still waits for it fails."""
        self._rings.lose(rank, Reason.LEFT.word(rank))
        self._leave_out(rank)

    def _leave_out(self, rank: int) -> None:
        """A rank calls no collective any more."""
        self.departed.add(rank)
        self._refuse(rank)

    def _refuse(self, rank: int, *, session_closed: bool = False) -> None:
        """Let the native library begin nothing more with a rank that left.

        An eager one may still have to begin what that rank has finished, unless it has left the job, since what it was to send
        may be gone. `check_members` and `miss` stop later collectives.
        """
        if self.native is not None and rank in self._island and (session_closed or not self.native.eager):
            self.native.abort(Reason.LEFT.word(rank))

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
            tells = first and (tells or bool(found))
            if tells:
                self._session.announce(Stop(self._path, abroad, why or found), self._ranks)
        if tells:  # What this rank tells others from now on, they hear later than this.
            self._rings.tell(Deadline.after(_TELL_SECONDS))
        if first:
            self._session.explaining.dump("")

    def hear(self, world_rank: int, news: Stop | Departure) -> None:
        """A rank of another host has stopped or closed the communicator."""
        rank = self._ranks.index(world_rank)
        if isinstance(news, Stop):
            self._diagnosis.hear(rank, news.why)
            self.abort(news.word)
            return
        with self.lock:
            # What it sent by rings may still be on its way; they tell of its departure behind that.
            self._called[rank] = news.called
            self._leave_out(rank)

    def miss(self, sequence: int) -> None:
        """Stop collective number `sequence`, which goes on behind the host, if a rank left before it came to it."""
        missing = self._missing(sequence)
        if missing:
            native = self.native
            self.abort(Reason.LEFT.word(min(missing)))
            if native is not None:  # for a mere departure it lets those finish who still can
                native.abort(Reason.PEER_LOST.word(min(missing)), self._head_start)

    def stopped(self, number: Callable[[], int]) -> int:
        """The abort word as far as it concerns a collective; 0 where ranks merely left after they had come to that collective.

        Args:
            number: gives the collective's number; called only where it is needed.
        """
        with self.lock:
            word = self.word()
            if not word or Reason.bad(word) or self.contract is None:
                return word
            rank, sequence = Reason.parse(word)[1], number()
            told_soon = self._spread and self._session.hears(self._ranks[rank])
            return word if self._lacks(rank, sequence, unknown=told_soon) or self._missing(sequence) else 0

    def _missing(self, sequence: int) -> list[int]:
        """The ranks that left before they came to a collective, as far as this rank knows."""
        return [rank for rank in list(self.departed) if self._lacks(rank, sequence, unknown=False)]

    def _lacks(self, rank: int, sequence: int, *, unknown: bool) -> bool:
        """Whether a rank that has left did so before it came to a collective.

        Args:
            unknown: the answer for a rank of another host that has not told.
        """
        contract = self.contract
        if contract is not None and rank in contract.ranks:
            return rank in contract.absent(sequence)
        called = self._called.get(rank)
        return unknown if called is None else called <= sequence

    def _stop(self, word: int) -> None:
        self._rings.abort(word)
        if self.native is not None:
            self.native.abort(word, self._head_start)

    def close(self, why: str = CLOSED) -> None:
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
                if self._spread and not Reason.bad(word):
                    self._session.announce(Departure(self._path, self.contract.newest()[0] + 1), self._ranks)
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
                self._session.liveness.sweep_if_last([self._ranks[r] for r in self.contract.ranks], left, self._part)
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
