"""The context of one communicator's operations: they are numbered, recorded, and compared by the contract check."""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from xvcomm.abc.collective import Collective
from xvcomm.abc.message_mover import MessageMover, SupportsMessageMovers
from xvcomm.engine.cache import LaunchCache
from xvcomm.engine.failures import Failures
from xvcomm.engine.inflight.tracker import Tracker
from xvcomm.engine.lifecycle import Lifecycle
from xvcomm.engine.planner import Planner
from xvcomm.engine.session.attaching import attach
from xvcomm.engine.session.carried import carried
from xvcomm.engine.session.diagnosis import Diagnosis
from xvcomm.engine.session.equipment import collective_label
from xvcomm.engine.session.rings import Rings
from xvcomm.engine.session.session import Session
from xvcomm.errors import ArrayError, XvcommError
from xvcomm.memory.array_view import ArrayView
from xvcomm.memory.ring import Message, RingEnd
from xvcomm.memory.segment import Segment
from xvcomm.rendezvous.store.guarded import GuardedStore
from xvcomm.trace.callsite import find_call_site
from xvcomm.trace.contract import ContractCheck
from xvcomm.trace.format import DONE, Record, Share, Stage, State
from xvcomm.trace.operation import ANY_PEER, NO_PEER, Operation
from xvcomm.trace.recorder import hooks
from xvcomm.trace.stages import Progress
from xvcomm.types.deadline import Deadline
from xvcomm.types.opcode import OpCode
from xvcomm.types.topology import Topology, check_kinds

_INSIDE_SEND, _INSIDE_COLLECTIVE = 4, 5
"""Functions of xvcomm that are under way at the least when `begin` asks for the call site, itself included."""


class Context:
    """What the operations of one communicator need.

    Attributes:
        path: name in the store, equal on all its ranks and used once.
        ranks, rank: its ranks as numbers of the whole job; this process's number in it.
        enqueueing: lock that puts messages in order on rings; not held while they move.
        index, recorder: number of this rank's device, as DLPack has it; the rank's flight recorder.
        asynchronous: whether the host enqueues operations without waiting; `tracker` has those under way.
        sequence, place: number of the next collective; address of the contract check, see `ContractCheck.place`.
        lifecycle: whether operations may begin, and what stops them.
        stages: functions that know how far operations are which the device does not have, by their records.
    """

    def __init__(
        self, session: Session, path: str, ranks: tuple[int, ...], deadline: Deadline, made_by: OpCode = OpCode.SPLIT
    ) -> None:
        """Make it together with its other ranks.

        Args:
            made_by: the operation that makes it, for errors.

        Raises:
            XvcommError: names ranks by their numbers in the whole job.
        """
        self.session, self.path, self.ranks = session, path, ranks
        self.rank = ranks.index(session.rank)
        self.ident = zlib.crc32(path.encode()) & 0x7FFFFFFF
        self.enqueueing = threading.Lock()
        self.sequence = 0
        self.stages: list[Callable[[], dict[int, Stage]]] = []
        self._seen, self._enqueued = set[Operation](), set[Operation]()  # as far as `_called` knows
        self.launches = LaunchCache(enabled=bool(session.config.compiled_launch))
        self._made_by = made_by
        self.store = session.guarded(f"comm/{path}", self.check)
        labels = [collective_label(session.infos, r) for r in ranks]
        kinds = [session.infos[r].device for r in ranks]
        check_kinds(labels, kinds)
        self.topology = Topology.from_labels(labels, [session.infos[r].host for r in ranks])
        members = [session.member(r) for r in ranks]
        self.planner = Planner(
            self.topology,
            self.rank,
            session.config,
            gpus=set(kinds) != {"host"},
            rings=[m.sizes for m in members if m.sizes],
        )
        able = session.device.capabilities()
        self.index, self.asynchronous = able.index, able.asynchronous
        self.tracker = Tracker(self)
        self.device, self.recorder, self.kind = session.device, session.journal.recorder, session.backend.kind
        self._part = f"-{self.ident:x}"
        self.rings = Rings(
            session.config, session.job + self._part, _number(path), self.store, self.rank, session.transports,
            session.peer_rings, members,
        )  # fmt: skip
        self.diagnosis = Diagnosis(session, ranks, self.rank, self.ident, self.rings)
        self.lifecycle = Lifecycle(
            session, path, ranks, self.rank, self.topology, self.rings, self.tracker, self.diagnosis, self._part
        )
        self.lifecycle.on_close(lambda: session.supervision.remove(self))
        self._users = self.lifecycle.users
        self._failures = Failures(self.lifecycle, self.diagnosis, self.rings, ranks, self.rank, self.topology)
        session.supervision.add(self)
        making = session.guarded(f"comm/{path}", self._check_making)
        try:
            with session.telling(making):
                self._open_contract(making, deadline)
                session.ready()
                making.assemble(session.rank, ranks, deadline, self._gone)
                session.complete()
        except BaseException:
            self.lifecycle.close()
            raise

    def _gone(self) -> list[int]:
        """The ranks that have left or ended, as far as this one knows, as numbers of the whole job."""
        return [*(self.ranks[r] for r in sorted(self.lifecycle.departed)), *self.session.ended()]

    def _open_contract(self, store: GuardedStore, deadline: Deadline) -> None:
        infos = self.session.infos
        here = tuple(i for i, r in enumerate(self.ranks) if infos[r].host == infos[self.session.rank].host)
        config, key = self.session.config, f"contract/{here[0]}"
        if self.rank == here[0]:
            segment = Segment.create(config.shm_dir, self.session.job + self._part, ContractCheck.size(len(here)))
            with segment.named():
                store.publish(key, segment.name.encode(), deadline)
        else:
            segment = attach(self.session, store, key, self.ranks[here[0]], deadline)
        contract = ContractCheck(segment, here, self.rank, self.recorder, self.ident)
        self.place = contract.place
        self.lifecycle.map(contract)

    def check(self) -> None:
        """Raise if the communicator is finished; see `Lifecycle.check`."""
        self.lifecycle.check(self._made_by)

    def check_in_job(self) -> None:
        """`check`, but the error names ranks by their numbers in the whole job, as all do before a communicator is made."""
        try:
            self.check()
        except XvcommError as error:
            error.rank = self.session.rank
            error.peer = None if error.peer is None else self.ranks[error.peer]
            raise

    def _check_making(self) -> None:
        self.check_in_job()
        if self._made_by in (OpCode.SHRINK, OpCode.GROW):
            self.session.check_store()
        elif self.session.grown is not None:
            self.session.grown.check()

    def native(self, deadline: Deadline, sequence: int | None = None) -> Collective:
        """The native library of this rank's island; joins it on first use.

        Args:
            sequence: number of the collective that is about to call it, if one is.

        Raises:
            CollectiveStopped: a rank of the island has left before it came to that collective.
        """
        found = self.lifecycle.native
        if found is None:
            check = partial(self.lifecycle.check_island, self._made_by, sequence)
            check()
            island = self.topology.island_of(self.rank)
            found = self.session.backend.collective(
                self.session.config, self.session.job + self._part, self.topology.local(self.rank), island.size,
                f"native/{island.index}", self.session.guarded(f"comm/{self.path}", check), deadline,
            )  # fmt: skip
            self.lifecycle.join(found)
        elif sequence is not None and self.lifecycle.departed:
            self.lifecycle.check_members(sequence)
        return found

    def way(self, peer: int, op: int, nbytes: int) -> str:
        """See `Supervised.way`."""
        if peer in (self.rank, ANY_PEER):
            return ""
        if peer != NO_PEER:
            return self.rings.scheme(peer)
        native = self.topology.island_of(self.rank).ranks
        if not self.planner.calls_native(op, nbytes):
            native = (self.rank,)
        library = [self.session.backend.native] if len(native) > 1 else []
        return " + ".join(
            [*library, *sorted({self.rings.scheme(r) for r in range(len(self.ranks)) if r not in native})]
        )

    def carried(self, records: Sequence[Record]) -> dict[Record, tuple[Share, ...]]:
        """See `Supervised.carried`."""
        lock = self.lifecycle.lock  # so that no ring is unmapped meanwhile
        if not lock.acquire(blocking=False):
            return {}
        try:
            # Devices may hold messages back that have a record.
            in_order = not self.asynchronous and not self.enqueueing.locked()
            return carried(self.rings.ends(), records, in_order=in_order)
        finally:
            lock.release()

    def joined_native(self) -> Collective | None:
        """The native library, if it was joined."""
        return self.lifecycle.native

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

    def message_mover(self, end: RingEnd, name: OpCode) -> MessageMover | None:
        """What sends (`name` SEND) or receives single messages of a ring end, or None if
        the device has no message movers. While it has a message it is one of `Lifecycle.users`."""
        if not isinstance(self.device, SupportsMessageMovers):
            return None
        contract = self.lifecycle.contract
        assert contract is not None
        return self.device.message_mover(end, +name, self.recorder.handle, self.ident, contract.stop)

    def moved(self, message_mover: MessageMover) -> None:
        """A message mover has moved its message."""
        try:
            if hooks:
                self.recorder.tell(message_mover.record)
        finally:
            self._users.discard(message_mover)

    def replace(self, message_mover: MessageMover, name: OpCode, message: Message, peer: int) -> Operation:
        """An operation in place of a message mover that gave its message up; it must come to `fail`."""
        operation = Operation(name, self.sequence, message, peer, message_mover.record)
        self._users.add(operation)
        self._users.discard(message_mover)
        return operation

    def begin(self, name: OpCode, message: Message, peer: int = NO_PEER, call_site: int = 0) -> Operation:
        """Start an operation: number it, record it, and for collectives compare it with the others'; `end` or `fail` it.

        Args:
            call_site: where the user called it, from `find_call_site`; 0 if that is this thread's caller.

        Raises:
            MismatchError, PeerLost, Aborted, DeadlineExceeded, ClosedError: the communicator is finished.
        """
        call_site = call_site or find_call_site(_INSIDE_COLLECTIVE if peer == NO_PEER else _INSIDE_SEND)
        operation = Operation(name, self.sequence, message, peer)
        self.lifecycle.enter(operation, name)
        contract = self.lifecycle.contract
        assert contract is not None
        if peer != NO_PEER:
            _, dtype, nbytes, tag, _ = message
            operation.record = self.recorder.begin(
                self.ident, self.sequence, +name, dtype, nbytes, peer, tag, call_site
            )
            stopped = contract.abort_word() != 0
        else:
            self.sequence += 1
            number = contract.post(operation.sequence, message, call_site)
            stopped = number < 0
            operation.record = ~number if stopped else number
        if stopped:
            word = contract.abort_word()
            self.lifecycle.abort(word)
            failure = self.diagnosis.error(word, operation)
            self.end(operation, State.FAILED)
            raise failure
        return operation

    def end(self, operation: Operation, state: int = DONE) -> None:
        """An operation is over. If it failed, `fail` was called for it or for another one of the same group."""
        try:
            self.recorder.end(operation.record, state)
        finally:
            self._users.discard(operation)

    def end_all(self, operations: Sequence[Operation], state: int = DONE) -> None:
        """`end` of several at once."""
        try:
            self.recorder.end_all([operation.record for operation in operations], state)
        finally:
            self._users.difference_update(operations)

    def fail(self, error: BaseException, operation: Operation) -> NoReturn:
        """End an operation that a lower layer's error has ended: finishes the communicator, and raises the user's error."""
        try:
            raised = self.explain(error, operation)
        finally:
            self.end(operation, State.FAILED)
        if raised is error:
            raise error
        raise raised from None

    def explain(self, error: BaseException, operation: Operation) -> BaseException:
        """Finish the communicator, and give the user's error, for an operation that the device may still be in."""
        return self._failures.explain(error, operation)

    def look(self) -> None:
        """Act on what other ranks did, and on what is late or stopped on the device. Thread-safe; never waits for the device."""
        with self.lifecycle.lock:
            if self.lifecycle.look() and self.asynchronous:
                self.tracker.stop_late()
                self._failures.look()
                self._look_for_missing()

    def _look_for_missing(self) -> None:
        """Stop a native call that blocks the host because a rank of the island left before that collective.

        Collectives that are enqueued may still end; then the tracker does this.
        """
        if self.lifecycle.departed and self.lifecycle.native is not None and not self.tracker.collective():
            collectives = [operation.sequence for operation in self.under_way() if operation.peer == NO_PEER]
            if collectives and self.lifecycle.missing_members(min(collectives)):
                self.lifecycle.miss(min(collectives))

    def under_way(self) -> list[Operation]:
        """The operations that Python has begun and that have not ended; what stands for compiled code has no number."""
        return [user for user in list(self._users) if isinstance(user, Operation) and user.sequence >= 0]

    def progress(self) -> Progress:
        """See `Supervised.progress`."""
        with self.lifecycle.lock:  # so that no ring is unmapped meanwhile
            if self.lifecycle.closed:
                return Progress()
            found = self.tracker.progress()
            others = {number: stage for known in self.stages for number, stage in known().items()}
            return found._replace(others={**found.others, **self._called(), **others})

    def _called(self) -> dict[int, Stage]:
        """Those that the host has not enqueued yet, and had not when this was called last."""
        if not self.asynchronous:
            return {}
        seen, self._seen = self._seen, set(self.under_way())
        self._enqueued &= self._seen
        called = (seen & self._seen) - self._enqueued
        if called:
            self._enqueued |= called & self.tracker.operations()
        return {operation.record: Stage.CALLED for operation in called - self._enqueued}

    def after_fork(self) -> None:
        """End in a forked child."""
        self.enqueueing = threading.Lock()  # a thread of the parent's may hold the parent's
        self.lifecycle.after_fork()

    def awaits(self, operation: Operation) -> bool:
        """Whether a rank has not come to a collective yet, as far as this host can tell."""
        contract = self.lifecycle.contract
        return operation.peer == NO_PEER and contract is not None and bool(contract.absent(operation.sequence))

    def stopped(self, newest: Callable[[], Operation]) -> int:
        """0, or the abort word that says that a native collective gave no result, however its kernels ended."""
        return self.lifecycle.stopped(lambda: newest().sequence)

    def miss(self, newest: Callable[[], Operation]) -> None:
        """Stop a collective that goes on behind the host, if a rank left before it came to it."""
        if self.lifecycle.departed:
            self.lifecycle.miss(newest().sequence)


def _number(path: str) -> int:
    """A number of 62 bits that no other communicator of the job has."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "little") >> 2
