"""One communicator's inside: its rings, board and native library, and what to say when they stop."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from xvcomm.abc.collective import Collective, CollectiveStalled, CollectiveStopped
from xvcomm.abc.device import RingStalled, RingStopped
from xvcomm.abc.store import PrefixStore, Store
from xvcomm.board import Board
from xvcomm.deadline import Deadline
from xvcomm.dtype import BY_CODE, ReduceOp
from xvcomm.errors import (
    Aborted,
    ArgumentError,
    ClosedError,
    DeadlineExceeded,
    MismatchError,
    PeerLost,
    XvcommError,
)
from xvcomm.links import Links
from xvcomm.opcode import OpCode
from xvcomm.planner import Planner
from xvcomm.ring import Message, Reason, RingEnd
from xvcomm.session import Session
from xvcomm.shm import Segment
from xvcomm.topology import Topology
from xvcomm.trace import State

_LOOK_SECONDS = 0.1


@dataclass(slots=True)
class Operation:
    """An operation under way, for messages and for the flight recorder."""

    name: OpCode
    sequence: int
    record: int
    message: Message
    missing: list[int] = field(default_factory=list)


def pack_detail(root: int, op: int, counts: tuple[int, ...] = ()) -> int:
    """Root, reduction and uneven counts in one word, for ledgers; equal words mean equal calls."""
    digest = zlib.crc32(repr(counts).encode()) if counts else 0
    return (root + 1) | (int(op) << 20) | (digest << 28)


def describe(message: Message) -> str:
    """A collective as a ledger describes it: `all_reduce(sum) of 4096 x float32`."""
    op, root = (message.detail >> 20) & 0xFF, (message.detail & 0xFFFFF) - 1
    dtype = BY_CODE.get(message.dtype)
    text = str(OpCode(message.op))
    text += f"({ReduceOp(op)})" if op else ""
    text += f" of {message.nbytes // dtype.itemsize} x {dtype}" if dtype else ""
    text += f" with root {root}" if root >= 0 else ""
    return text + (" and uneven counts" if message.detail >> 28 else "")


class _GuardedStore(PrefixStore):
    """A communicator's part of the store; waiting in it ends when the communicator does."""

    def __init__(self, prefix: str, store: Store, check: Callable[[], None]) -> None:
        super().__init__(prefix, store)
        self._check = check

    def get(self, key: str, deadline: Deadline) -> bytes:
        """See `Store.get`; also raises what finished the communicator."""
        self.wait([key], deadline)
        return super().get(key, deadline)

    def wait(self, keys: Iterable[str], deadline: Deadline) -> None:
        """See `Store.wait`; also raises what finished the communicator."""
        names = list(keys)
        while True:
            try:
                return super().wait(names, Deadline.after(deadline.sooner(_LOOK_SECONDS)))
            except DeadlineExceeded:
                self._check()
                if deadline.expired():
                    raise


class Context:
    """What the ranks of one communicator share.

    Attributes:
        path: name in the store, equal on all its ranks and used once.
        ranks: this communicator's ranks as numbers of the whole job.
        rank: this process's number in it.
    """

    def __init__(self, session: Session, path: str, ranks: tuple[int, ...], deadline: Deadline) -> None:
        self.session, self.path, self.ranks = session, path, ranks
        self.rank = ranks.index(session.rank)
        self.ident = zlib.crc32(path.encode()) & 0x7FFFFFFF
        self._closed = False
        self._word = 0
        self.board: Board | None = None
        self.store: Store = _GuardedStore(f"comm/{path}", session.store, self.check)
        labels = [session.collective_label(r) for r in ranks]
        self._check_islands(labels)
        self.topology = Topology.from_labels(labels, [session.infos[r].host for r in ranks])
        self.planner = Planner(self.topology, self.rank, session.config)
        self.device = session.device
        self.links = Links(
            session.config, self.store, self.rank, session.transports, [session.offers[r] for r in ranks]
        )
        self.lock = threading.RLock()
        self._sequence = 0
        self._native: Collective | None = None
        session.add(self)
        self.board = self._open_board(deadline)
        if self._word:
            self.board.abort(self._word)

    def _check_islands(self, labels: list[str]) -> None:
        kinds: dict[str, str] = {}
        for rank, label in zip(self.ranks, labels, strict=True):
            kind = self.session.infos[rank].device
            if kinds.setdefault(label, kind) != kind:
                raise ArgumentError(
                    f"island {label!r} holds ranks on {kinds[label]} and on {kind}: no native library joins them; "
                    "give them different labels (XVCOMM_ISLAND)"
                )

    def _open_board(self, deadline: Deadline) -> Board:
        infos = self.session.infos
        here = tuple(i for i, r in enumerate(self.ranks) if infos[r].host == infos[self.session.rank].host)
        config, key = self.session.config, f"board/{here[0]}"
        if self.rank == here[0]:
            segment = Segment.create(config.shm_dir, self.session.job, Board.size(len(here)))
            self.store.set(key, segment.name.encode())
        else:
            segment = Segment.attach(config.shm_dir, self.store.get(key, deadline).decode())
        return Board(segment, here, self.rank)

    def native(self, deadline: Deadline) -> Collective:
        """The native library of this rank's island; joins it on first use."""
        if self._native is None:
            island = self.topology.island_of(self.rank)
            me = self.topology.local(self.rank)
            self._native = self.session.backend.collective(
                self.session.config, self.session.job, me, island.size, f"native/{island.index}", self.store, deadline
            )
            if self._word:
                self._native.abort(self._word)
        return self._native

    def begin(self, name: OpCode, message: Message, peer: int = -1) -> Operation:
        """Start an operation: number it, record it, and for collectives compare it with the others'.

        Raises:
            MismatchError, PeerLost, Aborted, DeadlineExceeded, ClosedError: the communicator is finished.
        """
        if self._closed:
            raise ClosedError(f"{name} on a closed communicator", rank=self.rank, op=str(name))
        record = self.session.recorder.begin(
            self.ident, self._sequence, name, message.dtype, message.nbytes, peer, message.tag
        )
        operation = Operation(name, self._sequence, record, message)
        if peer >= 0:
            word = self._abort_word()
            if word:
                raise self.explain(word, operation)
            return operation
        self._sequence += 1
        if self.board is not None and not self.board.post(operation.sequence, message):
            raise self.explain(self._abort_word(), operation)
        return operation

    def translate(self, error: BaseException, operation: Operation) -> BaseException:
        """The user's error for one from below; the communicator is finished by it."""
        with contextlib.suppress(ValueError):  # the recorder may be closed
            self.session.recorder.end(operation.record, State.FAILED)
        if isinstance(error, (RingStopped, CollectiveStopped)):
            # The board may know more than the place that stopped: it was told first.
            self.abort(error.word)
            return self.explain(self._abort_word() or error.word, operation)
        if isinstance(error, (RingStalled, CollectiveStalled)):
            if isinstance(error, RingStalled):
                missing = sorted({end.peer for end in error.ends})
            else:
                members = self.topology.island_of(self.rank).ranks
                missing = [members[m] for m in error.missing]
            operation.missing = missing
            word = Reason.DEADLINE.word(missing[0] if missing else self.rank)
            self.abort(word)
            return self.explain(word, operation)
        if isinstance(error, DeadlineExceeded):
            self.abort(Reason.DEADLINE.word(self.rank))
        elif not isinstance(error, XvcommError):
            self.abort(Reason.ABORTED.word(self.rank))
        return error

    def _quarrel(self, operation: Operation) -> XvcommError:
        """The error for two descriptions that differ: on the board, or in the ledger of one of this rank's rings."""
        on_board = self.board.quarrel() if self.board is not None else None
        text = ""
        if on_board is not None:
            (a, one), (b, other) = on_board
            text = f"{self.name(a)} called {describe(one)}; {self.name(b)} called {describe(other)}"
        for end in () if text else self.links.ends():
            dispute = end.dispute()
            if dispute is not None:
                text = self._tell(end, *dispute)
                operation.missing = [end.peer]
        return MismatchError(
            (text or "two other ranks described the same message differently")
            + "; all ranks must make the same calls in order",
            rank=self.rank, op=str(operation.name), seq=operation.sequence,
            peer=operation.missing[0] if operation.missing else None,
        )  # fmt: skip

    def _tell(self, end: RingEnd, mine: Message, theirs: Message) -> str:
        if mine.op != OpCode.SEND or theirs.op != OpCode.SEND:
            return f"{self.name(self.rank)} called {describe(mine)}; {self.name(end.peer)} called {describe(theirs)}"
        sent, expected = (mine, theirs) if end.producer else (theirs, mine)
        source, target = (self.rank, end.peer) if end.producer else (end.peer, self.rank)
        return f"{self.name(source)} sent {sent.describe()}; {self.name(target)} expected {expected.describe()}"

    def explain(self, word: int, operation: Operation) -> XvcommError:
        """The error that an abort word stands for."""
        what = f"{operation.name} #{operation.sequence} on {self.name(self.rank)}"
        known: dict[str, Any] = {"rank": self.rank, "op": str(operation.name), "seq": operation.sequence}
        reason, about = Reason.parse(word)
        if reason is Reason.MISMATCH:
            return self._quarrel(operation)
        if reason is Reason.DEADLINE:
            missing = operation.missing or [about]
            names = ", ".join(self.name(r) for r in missing)
            return DeadlineExceeded(
                f"{what} did not finish in time; waiting for {names}; {self._last_words(missing)}; "
                "the communicator is finished: close it and make a new one",
                peer=missing[0],
                **known,
            )
        if reason is Reason.ABORTED:
            return Aborted(f"{what}: {self.name(about)} aborted the communicator", peer=about, **known)
        verb = "left" if reason is Reason.LEFT or self.session.left(self.ranks[about]) else "was lost"
        return PeerLost(
            f"{what}: {self.name(about)} {verb}; {self.session.last_words(self.ranks[about])}",
            peer=about,
            **known,
        )

    def _last_words(self, ranks: list[int]) -> str:
        return "; ".join(f"rank {r}: {self.session.last_words(self.ranks[r])}" for r in ranks[:4])

    def name(self, rank: int) -> str:
        """`rank 1 on node7`, with the number in the whole job where that differs."""
        world = self.ranks[rank]
        other = f" (rank {world} of the job)" if world != rank else ""
        return f"rank {rank}{other} on {self.session.infos[world].hostname}"

    def _abort_word(self) -> int:
        """0, or why the communicator is finished; the board was told first."""
        return (self.board.abort_word() if self.board is not None else 0) or self._word

    def check(self) -> None:
        """Raise if the communicator is finished.

        Raises:
            PeerLost, Aborted, DeadlineExceeded, MismatchError: why.
        """
        word = self._abort_word()
        if word:
            raise self.explain(word, Operation(OpCode.SEND, self._sequence, 0, Message(0, 0, 0, 0)))

    def lose(self, world_rank: int) -> None:
        """A process of the job ended; if it died, stop everything it belonged to. Safe from any thread."""
        if world_rank not in self.ranks or self._closed:
            return
        rank = self.ranks.index(world_rank)
        if self.session.left(world_rank):
            self.links.lose(rank, Reason.LEFT.word(rank))
        else:
            self.abort(Reason.PEER_LOST.word(rank))

    def abort(self, word: int) -> None:
        """Stop the communicator on this rank and on all that share memory with it. Safe from any thread."""
        self._word = self._word or word
        if self.board is not None:
            self.board.abort(word)
        self._leave(word)

    def leave(self) -> None:
        """Make this rank's own calls return, and those of who waits for it."""
        self._leave(Reason.LEFT.word(self.rank))

    def _leave(self, word: int) -> None:
        self.links.abort(word)
        if self._native is not None:
            self._native.abort(word)

    def close(self) -> None:
        """Leave: who still waits for this rank raises PeerLost. Idempotent."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self.leave()
            self.links.close()
            if self._native is not None:
                self._native.close()
            if self.board is not None:
                self.board.close()
