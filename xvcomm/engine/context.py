"""One communicator's state: its rings, contract check and native library, and how they stop together."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence

from xvcomm.abc.collective import Collective, CollectiveStalled, CollectiveStopped
from xvcomm.abc.device import Courier, RingStalled, RingStopped
from xvcomm.engine.inflight.tracker import Tracker
from xvcomm.engine.planner import Planner
from xvcomm.engine.session.diagnosis import Diagnosis
from xvcomm.engine.session.rings import Rings
from xvcomm.engine.session.session import Session
from xvcomm.errors import Aborted, ArrayError, ClosedError, DeadlineExceeded, PeerLost, XvcommError
from xvcomm.memory.array import ArrayView
from xvcomm.memory.ring import Message, Reason, RingEnd
from xvcomm.memory.segment import Segment
from xvcomm.system import limits
from xvcomm.system.forking import FORKED
from xvcomm.trace.contract import ContractCheck
from xvcomm.trace.operation import NO_PEER, Operation
from xvcomm.trace.recorder import DONE, State, call_site, hooks
from xvcomm.types.deadline import Deadline
from xvcomm.types.opcode import OpCode
from xvcomm.types.topology import Topology, check_kinds

_CLOSED = "on a communicator that was closed; make a new one"
_CLOSED_EARLY = "on a communicator that was closed while it was under way; wait for asynchronous operations first"
_DRAIN_SECONDS, _SETTLE_SECONDS, _PAUSE_SECONDS = 10.0, 1.0, 0.0005
_INSIDE_SEND, _INSIDE_COLLECTIVE = 4, 5
"""Functions of xvcomm that are under way at the least when `begin` asks for the call site, itself included."""
_NOTHING = Message(0, 0, 0, 0)


class Context:
    """What the ranks of one communicator share.

    Attributes:
        path: name in the store, equal on all its ranks and used once.
        ranks, rank: its ranks as numbers of the whole job; this process's number in it.
        enqueueing: lock that puts messages in order on rings; not held while they move.
        index, recorder: number of this rank's device, as DLPack has it; the rank's flight recorder.
        asynchronous: whether the host enqueues operations without waiting; `tracker` has those under way.
        departed: the ranks of this host that have closed it, as far as this rank has seen.
        sequence, place: number of the next collective; address of the contract check, see `ContractCheck.place`.
        closing: functions that `close` calls after it has stopped operations and before it unmaps memory.
    """

    def __init__(self, session: Session, path: str, ranks: tuple[int, ...], deadline: Deadline) -> None:
        self.session, self.path, self.ranks = session, path, ranks
        self.rank = ranks.index(session.rank)
        self.ident = zlib.crc32(path.encode()) & 0x7FFFFFFF
        self.enqueueing = threading.Lock()
        self.closing: list[Callable[[], None]] = []
        # Held to stop the communicator or to unmap it, so that no thread writes to unmapped memory.
        self._gate = threading.RLock()
        self._active: set[Operation | Courier] = set()
        self._closed = ""  # or why, in words
        self.departed: set[int] = set()
        self.sequence = self._word = 0
        self._contract: ContractCheck | None = None
        self._native: Collective | None = None
        self.store = session.guarded(f"comm/{path}", self.check)
        labels = [session.collective_label(r) for r in ranks]
        kinds = [session.infos[r].device for r in ranks]
        check_kinds(labels, kinds)
        self.topology = Topology.from_labels(labels, [session.infos[r].host for r in ranks])
        self.planner = Planner(self.topology, self.rank, session.config, gpus=set(kinds) != {"host"})
        able = session.device.capabilities()
        self.index, self.asynchronous = able.index, able.asynchronous
        self.tracker = Tracker(self)
        self.device, self.recorder, self.kind = session.device, session.recorder, session.backend.kind
        self._part = f"-{self.ident:x}"
        self.rings = Rings(
            session.config, session.job + self._part, self.store, self.rank, session.transports, session.peer_rings,
            [session.member(r) for r in ranks],
        )  # fmt: skip
        self.diagnosis = Diagnosis(session, ranks, self.rank, self.ident, self.rings)
        session.add(self)
        try:
            with session.telling(self.store):
                self._open_contract(deadline)
                self.store.assemble(session.rank, ranks, deadline, lambda: [ranks[r] for r in sorted(self.departed)])
        except BaseException:
            self.close()
            raise

    def _open_contract(self, deadline: Deadline) -> None:
        infos = self.session.infos
        here = tuple(i for i, r in enumerate(self.ranks) if infos[r].host == infos[self.session.rank].host)
        config, key = self.session.config, f"board/{here[0]}"
        if self.rank == here[0]:
            segment = Segment.create(config.shm_dir, self.session.job + self._part, ContractCheck.size(len(here)))
            with segment.named():
                self.store.set(key, segment.name.encode(), deadline)
        else:
            segment = self.session.attach(self.store, key, self.ranks[here[0]], deadline)
        contract = ContractCheck(segment, here, self.rank, self.recorder, self.ident)
        self.place = contract.place
        with self._gate:
            self._contract = self.diagnosis.contract = contract
            if self._word:
                contract.abort(self._word)

    def native(self, deadline: Deadline) -> Collective:
        """The native library of this rank's island; joins it on first use."""
        if self._native is None:
            self._check_members()
            island = self.topology.island_of(self.rank)
            native = self.session.backend.collective(
                self.session.config, self.session.job + self._part, self.topology.local(self.rank), island.size,
                f"native/{island.index}", self.session.guarded(f"comm/{self.path}", self._check_members), deadline,
            )  # fmt: skip
            with self._gate:
                self._native = native
                word = self._word or self._gone_member()
                if word:
                    native.abort(word)
        return self._native

    def joined_native(self) -> Collective | None:
        """The native library, if it was joined."""
        return self._native

    def _check_members(self) -> None:
        """Raise if the communicator is finished, or if a rank left that the native library would wait for."""
        self.check()
        word = self._gone_member()
        if word:
            raise CollectiveStopped(word)

    def _gone_member(self) -> int:
        """0, or the abort word for the first rank of this island that closed the communicator."""
        gone = self.departed.intersection(self.topology.island_of(self.rank).ranks)
        if self._closed:
            gone.add(self.rank)
        return Reason.LEFT.word(min(gone)) if gone else 0

    def admit(self, view: ArrayView) -> None:
        """Raise ArrayError for an array that is not in this rank's memory."""
        if view.device != self.kind:
            raise ArrayError(
                f"the array lies in {view.device} memory but this rank's device is {self.kind}; move the array, or set "
                f"XVCOMM_DEVICE={view.device}"
            )
        if view.index != self.index and self.asynchronous:
            raise ArrayError(
                f"the array lies on {self.kind}:{view.index} but this rank's device is {self.kind}:{self.index}; move the "
                f"array, or join with xvcomm.init(device='{self.kind}:{view.index}')"
            )

    def ensure_open(self, name: OpCode) -> None:
        """Raise ClosedError after `close`."""
        if self._closed:
            raise ClosedError(f"{name} {self._closed}", rank=self.rank, op=str(name))

    def courier(self, end: RingEnd, name: OpCode) -> Courier:
        """What sends (`name` SEND) or receives single messages of a ring end; for its use see `enter`."""
        assert self._contract is not None
        return self.device.courier(end, +name, self.recorder.handle, self.ident, self._contract.stop)

    def enter(self, courier: Courier | Operation, name: OpCode) -> int:
        """Let a courier, or a look, go on: until it leaves nothing is unmapped. Gives the number of the next collective.

        Raises:
            ClosedError: this rank has closed the communicator.
        """
        self._active.add(courier)
        if self._closed:
            self._active.discard(courier)
            self.ensure_open(name)
        return self.sequence

    def leave(self, courier: Courier | Operation, *, moved: bool = True) -> None:
        """A courier has `moved` a message, or has begun none."""
        try:
            if moved and hooks:
                self.recorder.tell(courier.record)
        finally:
            self._active.discard(courier)

    def replace(self, courier: Courier, name: OpCode, message: Message, peer: int) -> Operation:
        """An operation in place of a courier that gave its message up; it must come to `fail`."""
        operation = Operation(name, self.sequence, message, peer, courier.record)
        self._active.add(operation)
        self._active.discard(courier)
        return operation

    def begin(self, name: OpCode, message: Message, peer: int = NO_PEER, site: int = 0) -> Operation:
        """Start an operation: number it, record it, and for collectives compare it with the others'; `end` or `fail` it.

        Args:
            site: where the user called it, from `call_site`; 0 if that is this thread's caller.

        Raises:
            MismatchError, PeerLost, Aborted, DeadlineExceeded, ClosedError: the communicator is finished.
        """
        site = site or call_site(_INSIDE_COLLECTIVE if peer == NO_PEER else _INSIDE_SEND)
        operation = Operation(name, self.sequence, message, peer)
        self._active.add(operation)
        contract = self._contract
        if self._closed or contract is None:
            self._active.discard(operation)
            self.ensure_open(name)
        assert contract is not None
        if peer != NO_PEER:
            _, dtype, nbytes, tag, _ = message
            operation.record = self.recorder.begin(self.ident, self.sequence, +name, dtype, nbytes, peer, tag, site)
            stopped = contract.abort_word() != 0
        else:
            self.sequence += 1
            number = contract.post(operation.sequence, message, site)
            stopped = number < 0
            operation.record = ~number if stopped else number
        if stopped:
            word = contract.abort_word()
            self.abort(word)
            failure = self.diagnosis.error(word, operation)
            self.end(operation, State.FAILED)
            raise failure
        return operation

    def end(self, operation: Operation, state: int = DONE) -> None:
        """An operation is over. If it failed, `fail` was called for it or for another one of the same group."""
        try:
            self.recorder.end(operation.record, state)
        finally:
            self._active.discard(operation)

    def end_all(self, operations: Sequence[Operation], state: int = DONE) -> None:
        """`end` of several at once."""
        try:
            self.recorder.end_all([operation.record for operation in operations], state)
        finally:
            self._active.difference_update(operations)

    def fail(self, error: BaseException, operation: Operation) -> BaseException:
        """An operation ended by an error from below: finishes the communicator and gives the error for the user."""
        try:
            return self.explain(error, operation)
        finally:
            self.end(operation, State.FAILED)

    def explain(self, error: BaseException, operation: Operation) -> BaseException:
        """`fail` for an operation that the device may still be in."""
        stopped = isinstance(error, (RingStopped, CollectiveStopped))
        if stopped and self._closed and not self._word:
            what = f"{operation} {FORKED if self._closed is FORKED else _CLOSED_EARLY}"
            return ClosedError(what, rank=self.rank, op=str(operation.name), seq=operation.sequence)
        if known := self.word():
            self.abort(known)
        elif isinstance(error, (RingStopped, CollectiveStopped)):
            # A dispute says more than that its rank left since.
            differs = isinstance(error, RingStopped) and error.end.mismatch()
            self._pass_on(Reason.MISMATCH.word(self.rank) if differs else error.word)
        elif isinstance(error, (RingStalled, CollectiveStalled, DeadlineExceeded)):
            late = self.diagnosis.late(operation, self._suspects(error))
            why = self.diagnosis.waited(operation, late) if late else f"{operation}: {error}"
            self.abort(Reason.DEADLINE.word(late[0] if late else self.rank, self.rank), why)
        elif isinstance(error, (PeerLost, Aborted)) and error.peer is not None:  # the store told of another rank
            self.abort(self.diagnosis.passed_on(error), str(error))
        else:
            # It went wrong here, so that this rank has the story and the others need to be told.
            error = limits.named(error, f"do {operation}")
            self.abort(Reason.ABORTED.word(self.rank, self.rank), f"{type(error).__name__}: {error}")
            return error
        below = (RingStopped, CollectiveStopped, RingStalled, CollectiveStalled, XvcommError)
        return error if not isinstance(error, below) else self.diagnosis.error(self.word(), operation)

    def _pass_on(self, word: int) -> None:
        """Tell all that a ring, or the native library, was stopped; they were the first to know why."""
        if Reason.parse(word)[0] is Reason.MISMATCH:
            found = self.diagnosis.mismatch()
            self.abort(Reason.MISMATCH.word(self.rank), found[0] if found else "")
        elif self._native is not None and self._native.failure:
            self.abort(Reason.ABORTED.word(self.rank, self.rank), self._native.failure)
        else:
            self.abort(word)

    def _suspects(self, error: BaseException) -> list[int]:
        if isinstance(error, RingStalled):
            return sorted({end.peer for end in error.ends})
        if isinstance(error, CollectiveStalled):
            members = self.topology.island_of(self.rank).ranks
            return [members[m] for m in error.missing]
        return [r for r, world in enumerate(self.ranks) if isinstance(error, XvcommError) and error.peer == world]

    def word(self) -> int:
        """0, or the abort word that says why the communicator is finished; the contract check was told first."""
        with self._gate:
            return (self._contract.abort_word() if self._contract is not None else 0) or self._word

    def check(self) -> None:
        """Raise if the communicator is finished.

        Raises:
            PeerLost, Aborted, DeadlineExceeded, MismatchError: why.
            ClosedError: this rank has closed it.
        """
        word, name = self.word(), OpCode.INIT if self.path == "0" else OpCode.SPLIT
        self.ensure_open(name)
        if word:
            raise self.diagnosis.error(word, Operation(name, -1, _NOTHING))

    def look(self) -> None:
        """Act on what the other ranks published in the contract check. Safe from any thread; never waits for the device."""
        with self._gate:
            if self._closed or self._contract is None:
                return
            word = self._contract.abort_word()
            if word and not self._word:
                self.abort(word)
            if self._contract.departures() != len(self.departed):
                for rank in self._contract.departed():
                    self._depart(rank)
            if self.asynchronous:
                self._look_beside_device()

    def _look_beside_device(self) -> None:
        """Find out what no host thread waits for: rings and libraries that stopped, and what is late."""
        self.tracker.stop_late()
        for end in self.rings.ends():
            word = end.abort_word()
            if Reason.bad(word) and not self._word:
                self._pass_on(word)
        native, contract = self._native, self._contract
        if native is not None and contract is not None and Reason.bad(native.error()) and not self._word:
            if native.failure:
                self.abort(Reason.ABORTED.word(self.rank, self.rank), native.failure)
            else:  # the host is in a call of it past the deadline
                sequence, message = contract.newest(self.sequence)
                self.explain(CollectiveStalled(()), Operation(OpCode(message.op), sequence, message))

    def lose(self, world_rank: int) -> None:
        """A process of the job ended; if it died, stop everything it belonged to. Safe from any thread."""
        if world_rank not in self.ranks:
            return
        rank = self.ranks.index(world_rank)
        with self._gate:
            if self._closed:
                return
            if self.session.left(world_rank):
                self._depart(rank)
            else:
                self.abort(Reason.PEER_LOST.word(rank))

    def awaits(self, operation: Operation) -> bool:
        """Whether a rank has not come to a collective yet, as far as this host can tell."""
        return (
            operation.peer == NO_PEER and self._contract is not None and bool(self._contract.absent(operation.sequence))
        )

    def stopped(self, newest: Callable[[], Operation]) -> int:
        """0, or the abort word that says that a native collective gave no result, however its kernels ended."""
        with self._gate:
            return self._contract.stopped(lambda: newest().sequence) if self._contract is not None else self._word

    def miss(self, newest: Callable[[], Operation]) -> None:
        """Stop a collective that goes on behind the host, if a rank left before it came to it."""
        if self.departed and self._contract is not None:
            missing = self.departed.intersection(self._contract.absent(newest().sequence))
            if missing:
                self.abort(Reason.LEFT.word(min(missing)))
                if self._native is not None:  # for a mere departure it lets those finish who still can
                    self._native.abort(Reason.PEER_LOST.word(min(missing)))

    def _depart(self, rank: int) -> None:
        """A rank left in good order: only who still waits for it fails."""
        if rank in self.departed:
            return
        self.departed.add(rank)
        word = Reason.LEFT.word(rank)
        self.rings.lose(rank, word)
        if self._native is not None and rank in self.topology.island_of(self.rank).ranks:
            self._native.abort(word)

    def abort(self, word: int, why: str = "") -> None:
        """Stop the communicator on this rank and on all that share memory with it; the first reason stays.

        Safe from any thread, and without effect after `close`.

        Args:
            word: reason and rank; see `Reason`.
            why: in words, for the others.
        """
        with self._gate:
            if self._closed:
                return
            if self._contract is not None:
                if why and not self._word:
                    self._contract.explain(why)
                self._contract.abort(word)
                word = self._contract.abort_word()
            self._word = self._word or word
            self._stop(word)

    def _stop(self, word: int) -> None:
        self.rings.abort(word)
        if self._native is not None:
            self._native.abort(word)

    def close(self) -> None:
        """Leave: who still waits for this rank raises PeerLost. Idempotent.

        What blocking operations have put on the device's streams is waited for, but not for long: this also runs when
        the process ends by an error.
        """
        if not self._closed and not self._word:
            self.tracker.drain(Deadline.after(_DRAIN_SECONDS))
        with self._gate:
            if self._closed:
                return
            self._closed = _CLOSED
            if self._contract is not None:
                self._contract.leave()
            self._stop(Reason.LEFT.word(self.rank))
        self.session.remove(self)
        for callback in self.closing:
            callback()
        if not self._settled():
            return  # a thread, or the device, is still inside; what it may touch stays mapped as long as the process lives
        with self._gate:
            self.rings.close()
            if self._native is not None:
                self._native.close()
            if self._contract is not None:
                left = {self.ranks[r] for r in self._contract.departed()}
                self.session.sweep_if_last([self.ranks[r] for r in self._contract.ranks], left, self._part)
                self._contract.close()
            self._contract = self.diagnosis.contract = self._native = None

    def after_fork(self) -> None:
        """End in a forked child, whose shared memory is its own by now: compiled code finds it aborted."""
        self._closed = FORKED
        self._gate, self.enqueueing = threading.RLock(), threading.Lock()  # threads of the parent's may hold its own
        if self._contract is not None:
            self._contract.abort(Reason.LEFT.word(self.rank))

    def _settled(self) -> bool:
        """Wait until no operation is under way; whether that came about."""
        deadline = Deadline.after(_SETTLE_SECONDS)
        while self._active or self.tracker:
            if deadline.expired():
                return False
            self.tracker.look()
            time.sleep(_PAUSE_SECONDS)
        return True
