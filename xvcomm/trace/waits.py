"""Which ranks wait for which others, derived from the ranks' flight recorders.

A rank's own records show the operations that it is in. The records of the other ranks show which of them it waits for. Ranks
are numbers of the whole job here.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from xvcomm.trace import stack
from xvcomm.trace.format import Life, Record, Stage, State
from xvcomm.trace.operation import ANY_PEER, NO_PEER
from xvcomm.trace.snapshot import Group, RankState, Snapshot
from xvcomm.types.opcode import OpCode

_JUST_NOW = 5_000_000_000
"""Nanoseconds for which an operation that has failed counts as one that is waited in, if nothing came after it."""
_ANY_TAG = -1


class Condition(enum.Enum):
    """What a rank does, as far as other ranks depend on it."""

    WAITS = "waits in an operation"
    LISTENS = "waits for any rank"
    BUSY = "is outside xvcomm"
    ELSEWHERE = "is outside xvcomm, with operations under way"
    STOPPED = "is stopped by a signal"
    GONE = "has ended"
    LEFT = "has left in good order"
    SILENT = "does not answer"


class Why(enum.Enum):
    """Why a rank waits for another one."""

    ABSENT = "has not called it"
    DIFFERS = "has called something else in its place"
    BEHIND = "has enqueued it behind another collective"
    NO_RECEIVE = "does not receive"
    NO_SEND = "does not send"
    INSIDE = "is in it, too"


@dataclass(frozen=True)
class Wait:
    """A rank that is in an operation.

    Attributes:
        group: the communicator, if it is known.
        peers: the ranks that it waits for; of a receive from any rank all that may send.
    """

    rank: int
    record: Record
    group: Group | None
    why: Why
    peers: tuple[int, ...]


class Waits:
    """Those of a snapshot."""

    def __init__(self, snapshot: Snapshot, known: Sequence[Group] = ()) -> None:
        """Those of a snapshot.

        Args:
            known: communicators that ranks may not have told of.
        """
        self.snapshot = snapshot
        self._states = snapshot.ranks
        told = {group.ident: group for state in snapshot.ranks.values() for group in state.groups if group.ranks}
        self.groups = {group.ident: group for group in known} | told

    def now(self, state: RankState) -> int:
        """When a rank's state was read, by its own clock."""
        return state.taken or self.snapshot.taken + state.ahead

    @cached_property
    def all(self) -> dict[int, tuple[Wait, ...]]:
        """Of each rank those that it is in, oldest first."""
        return {rank: tuple(self._wait(rank, record) for record in pending) for rank, pending in self._pending.items()}

    @cached_property
    def conditions(self) -> dict[int, Condition]:
        """Of each rank of the snapshot."""
        return {rank: self._condition(rank) for rank in self._states}

    def condition(self, rank: int) -> Condition:
        """Of any rank; one of which nothing is known is silent."""
        return self.conditions.get(rank, Condition.SILENT)

    def since(self, wait: Wait) -> int:
        """When a rank called the operation that it is in, by the reader's clock."""
        return self._called(wait.rank, wait.record)

    def unknown(self, wait: Wait) -> tuple[int, ...]:
        """The ranks of which it is not known whether they have come to an operation."""
        others = wait.group.ranks if wait.group is not None else ()
        if wait.record.peer != NO_PEER:
            return tuple(rank for rank in others if rank not in self._states)
        return tuple(rank for rank in others if rank != wait.rank and self._has_come(rank, wait.record) is None)

    def first_difference(self) -> tuple[tuple[int, Record], tuple[int, Record]] | None:
        """The oldest collective that two ranks called differently, with both calls."""
        found = []
        said: dict[tuple[int, int], tuple[int, Record]] = {}
        for rank, state in self._states.items():
            for record in state.records:
                if record.peer == NO_PEER and record.op != OpCode.PROBE:
                    first = said.setdefault((record.communicator, record.sequence), (rank, record))
                    if not _agree(first[1], record):
                        found.append((first, (rank, record)))
        return min(found, key=lambda pair: self._called(*pair[0]), default=None)

    def _called(self, rank: int, record: Record) -> int:
        return record.posted - self._states[rank].ahead

    @cached_property
    def _pending(self) -> dict[int, list[Record]]:
        return {rank: self._pending_of(state) for rank, state in self._states.items()}

    def _pending_of(self, state: RankState) -> list[Record]:
        if state.life is Life.CLOSED and not state.ending:
            return []
        if state.ending and not _has_failed(state):
            return []
        now = self.now(state)
        return [
            record
            for record in state.records
            if (record.state == State.POSTED and record.stage is not Stage.OVER)
            or (
                record.state == State.FAILED
                and record.ended > now - _JUST_NOW
                and record.ended >= state.records[-1].posted
            )
        ]

    def _condition(self, rank: int) -> Condition:
        state = self._states[rank]
        if state.ending and not self._pending[rank]:
            return Condition.GONE
        if state.life is Life.CLOSED and not state.ending:
            return Condition.LEFT
        if state.stopped:
            return Condition.STOPPED
        if not state.answered:
            return Condition.SILENT
        pending = self._pending[rank]
        if not pending:
            return Condition.BUSY
        on_gpu = self.snapshot.infos[rank].device != "host"  # its host may wait for the GPU, which no stack tells
        if not on_gpu and (stack.busy(state.stack) or (not state.stack and pending[-1] is not state.records[-1])):
            return Condition.ELSEWHERE
        return Condition.LISTENS if pending[-1].peer == ANY_PEER else Condition.WAITS

    def _wait(self, rank: int, record: Record) -> Wait:
        group = self.groups.get(record.communicator)
        if record.peer != NO_PEER:
            return self._message(rank, record, group)
        others = [r for r in (group.ranks if group is not None else ()) if r != rank]
        absent = tuple(r for r in others if self._has_come(r, record) is False)
        if absent:
            return Wait(rank, record, group, Why.ABSENT, absent)
        same = {r: self._same_call(r, record) for r in others}
        differ = tuple(r for r, theirs in same.items() if theirs is not None and not _agree(theirs, record))
        if differ:
            return Wait(rank, record, group, Why.DIFFERS, differ)
        behind = tuple(r for r, theirs in same.items() if theirs is not None and self._is_behind(r, theirs))
        if behind and not self._is_behind(rank, record):
            return Wait(rank, record, group, Why.BEHIND, behind)
        inside = tuple(r for r, theirs in same.items() if theirs is not None and theirs in self._in_progress(r))
        return Wait(rank, record, group, Why.INSIDE, inside)

    def _is_behind(self, rank: int, record: Record) -> bool:
        """Whether a GPU has an older collective under way, so that it has not begun this one if both are on one stream."""
        if self.snapshot.infos[rank].device == "host":
            return False
        older = [other for other in self._pending[rank] if other.peer == NO_PEER]
        return record in older and older[0] is not record

    def _in_progress(self, rank: int) -> Sequence[Record]:
        """What a rank is in, or was in when it ended."""
        return [record for record in self._states[rank].records if record.state != State.DONE]

    def _has_come(self, rank: int, record: Record) -> bool | None:
        """Whether a rank has called a collective, None if that is not known."""
        state = self._states.get(rank)
        if state is None:
            return None  # it was not asked
        same = [other for other in state.records if other.communicator == record.communicator]
        newest = next((group.newest for group in state.groups if group.ident == record.communicator), None)
        # the record of a message has the number of the next collective
        called = max((other.sequence - (other.peer != NO_PEER) for other in same), default=-1)
        if max(called, -1 if newest is None else newest) >= record.sequence:
            return True
        # behind a record that has ended all newer ones are there
        known = newest is not None or not state.dropped or any(other.state != State.POSTED for other in same)
        return False if known else None

    def _same_call(self, rank: int, record: Record) -> Record | None:
        state = self._states.get(rank)
        for other in state.records if state is not None else ():
            if (other.communicator, other.sequence, other.peer) == (record.communicator, record.sequence, NO_PEER):
                return other
        return None

    def _message(self, rank: int, record: Record, group: Group | None) -> Wait:
        sends = record.op == OpCode.SEND
        why = Why.NO_RECEIVE if sends else Why.NO_SEND
        if group is None or rank not in group.ranks:
            return Wait(rank, record, group, why, ())
        if record.peer == ANY_PEER:
            peers = tuple(r for r in group.ranks if r != rank)
        else:
            peers = (group.ranks[record.peer],) if record.peer < len(group.ranks) else ()
        me = group.ranks.index(rank)
        matching = tuple(
            peer
            for peer in peers
            if any(
                _match(record, me, other, sends) and not self._is_taken(rank, record, peer, other, me)
                for other in self._pending.get(peer, ())
            )
        )
        return Wait(rank, record, group, Why.INSIDE if matching else why, matching or peers)

    def _is_taken(self, rank: int, record: Record, peer: int, other: Record, me: int) -> bool:
        """Whether an earlier message took a rank's end of one, which only looks as if it were under way.

        A GPU may have passed a message long before its host sees that. It lies before a collective that this rank called before
        its own end, and this rank has called at least as many ends as the other one.
        """
        mine, theirs = self._states[rank], self._states[peer]
        if other.sequence >= record.sequence or record.peer == ANY_PEER or mine.dropped or theirs.dropped:
            return False
        called = [one for one in mine.records if _alike(one, record) and one.peer == record.peer]
        return called.index(record) >= sum(_alike(one, other) and one.peer in (me, ANY_PEER) for one in theirs.records)


def _has_failed(state: RankState) -> bool:
    """Whether the last operation failed, so that the rank may have ended because of another one."""
    return bool(state.records) and state.records[-1].state == State.FAILED


def _agree(one: Record, other: Record) -> bool:
    return (one.op, one.dtype, one.nbytes, one.tag) == (other.op, other.dtype, other.nbytes, other.tag)


def _alike(one: Record, other: Record) -> bool:
    """Whether two records are of one operation on one communicator."""
    return (one.communicator, one.op) == (other.communicator, other.op)


def _match(record: Record, me: int, other: Record, sends: bool) -> bool:
    """Whether another rank is in the other end of a message."""
    wanted = OpCode.RECV if sends else OpCode.SEND
    tags = record.tag == other.tag or _ANY_TAG in (record.tag, other.tag)
    return other.communicator == record.communicator and other.op == wanted and other.peer in (me, ANY_PEER) and tags
