"""Converts the reason why a communicator stopped into an error that names the responsible rank."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

from xvcomm.engine.session.explaining import Explanation
from xvcomm.engine.session.rings import Rings
from xvcomm.engine.session.session import Session
from xvcomm.errors import Aborted, ClosedError, DeadlineExceeded, MismatchError, PeerLost, XvcommError
from xvcomm.memory.ring import Message, Reason, RingEnd
from xvcomm.trace.contract import ContractCheck
from xvcomm.trace.format import Record
from xvcomm.trace.operation import NO_PEER, Operation, describe
from xvcomm.trace.snapshot import Group
from xvcomm.types.deadline import Deadline
from xvcomm.types.opcode import OpCode

_NAMED = 4
"""Maximum number of late ranks whose last operation is named."""
_LATE_SECONDS = 1.5
"""Time limit of the search for late ranks on other hosts."""
_ABSENT_SECONDS = 0.5
"""How long ranks of other hosts have to tell what they have called."""
_COMPARED, _COMPARED_RECORDS, _OWN_RECORDS = 16, 64, 1024
"""Maximum number of ranks whose calls are compared with this rank's, and of records of each and of this one."""
_HEAR_SECONDS = 0.3
"""How long an error waits for the reason in words that a rank of another host gives."""
_logger = logging.getLogger("xvcomm")
_UNHEARD = "its reason has not come to this host; see that rank's own error"
_DIFFERENTLY = "two other ranks made different calls"


class Lateness(NamedTuple):
    """Who delays an operation.

    Attributes:
        ranks: of the communicator; empty if nothing is known.
        why: in words, for all ranks; empty if nothing is known.
        explanation: of the whole job, if the operation is recorded.
    """

    ranks: tuple[int, ...]
    why: str
    explanation: Explanation | None


class Diagnosis:
    """Converts abort words into errors. It reads the contract check, the rings' ledgers and the flight recorders.

    Args:
        ranks: the communicator's ranks as ranks of the whole job.
        ident: the communicator's number in flight recorders.

    Attributes:
        contract: the communicator's contract check, once it is mapped.
    """

    def __init__(self, session: Session, ranks: tuple[int, ...], rank: int, ident: int, rings: Rings) -> None:
        self._session, self._ranks, self._rank, self._ident, self._rings = session, ranks, rank, ident, rings
        self.contract: ContractCheck | None = None
        self._heard: dict[int, str] = {}
        self._hearing = threading.Condition()

    def hear(self, rank: int, why: str) -> None:
        """A rank of another host has stopped the communicator, and gives the reason in words."""
        with self._hearing:
            self._heard[rank] = why
            self._hearing.notify_all()

    def found(self, word: int) -> tuple[int, str]:
        """The abort word of a ring as others need it, and the text that this rank must tell them with it: the compiled code that
        finds a mismatch does not say whose message it is.
        """
        mismatch = self.mismatch() if word and Reason.parse(word)[0] is Reason.MISMATCH else None
        return (word, "") if mismatch is None else (_differ(self._rank, mismatch[1]), mismatch[0])

    def abroad(self, word: int) -> tuple[int, str]:
        """An abort word as ranks of other hosts understand it, and the text that this rank must tell them with it."""
        found = self.contract.mismatch() if self.contract is not None else None
        if found is None:
            return word, ""
        (finder, _), (other, _) = found
        return _differ(finder, other), self._calls(*found) if finder == self._rank else ""

    def error(self, word: int, operation: Operation) -> XvcommError:
        """The error that an operation raises on a communicator that was stopped for the reason `word`."""
        reason, about = Reason.parse(word)
        sequence = operation.sequence if operation.sequence >= 0 else None
        known: dict[str, Any] = {"rank": self._rank, "op": str(operation.name), "seq": sequence}
        what = f"{operation} on {self.name(self._rank)}"
        if reason is Reason.MISMATCH:
            text, peer = self._mismatch(about, Reason.reporter(word) - 1)
            record = self._session.journal.record(operation.record) if sequence is not None else None
            here = f" (raised in {operation} at {record.call_site})" if record is not None else ""
            return MismatchError(f"{text}; all ranks must make the same calls in order{here}", peer=peer, **known)
        if reason is Reason.DEADLINE:
            reporter = Reason.reporter(word)
            peer = None if about == reporter else about  # no rank waits for itself
            text = f"{what}: {self._lateness(about, reporter)}; the communicator is unusable: close it and create a new one"
            return DeadlineExceeded(text, peer=peer, **known)
        if reason is Reason.ABORTED:
            why = self._told(Reason.reporter(word))
            text = f"{what}: {self.name(about)} aborted the communicator" + (f": {why}" if why else "")
            return Aborted(f"{text}; close it and create a new one", peer=about, **known)
        if reason is Reason.SERVER_LOST:
            return PeerLost(
                f"{what}: {self._session.server_lost()}; close the communicator, and restart the job", **known
            )
        if reason is Reason.LEFT and self._session.join_requests.joining:
            return ClosedError(
                f"{what}: the job has grown; make the communicator anew by split() of what grow() returned", **known
            )
        left = reason is Reason.LEFT or self._session.journal.left(self._ranks[about])
        text = f"{what}: {self.name(about)} {'left' if left else 'was lost'}; {self._last_words(about)}"
        return PeerLost(
            f"{text}; go on without it by shrink(), or close the communicator and restart the job", peer=about, **known
        )

    def passed_on(self, error: PeerLost | Aborted) -> int:
        """The abort word for an error that names another rank, as a rank of the whole job."""
        assert error.peer is not None
        # the only rank outside the communicator that it depends on is the one that serves the store
        if error.peer not in self._ranks:
            return Reason.SERVER_LOST.word(error.peer, self._rank)
        reason = Reason.PEER_LOST if isinstance(error, PeerLost) else Reason.ABORTED
        return reason.word(self._ranks.index(error.peer), self._rank)

    def name(self, rank: int) -> str:
        """For instance `rank 1 on node7`, with the rank in the whole job if that differs."""
        world = self._ranks[rank]
        other = f" (rank {world} of the job)" if world != rank else ""
        return f"rank {rank}{other} on {self._session.infos[world].hostname}"

    def mismatch(self) -> tuple[str, int] | None:
        """A message that the two ends of one of this rank's rings described differently, as text, and the other rank."""
        for end in self._rings.ends():
            found = end.mismatch()
            if found is not None:
                return self._tell(end, *found), end.peer
        return None

    def late(self, operation: Operation, suspects: Sequence[int] = ()) -> Lateness:
        """The ranks that really delay an operation: those at the ends of the chains of waits that begin at it, if they are in
        this communicator; else the suspects.
        """
        record = self._record(operation)
        if record is None:
            return self._lateness_of(operation, tuple(suspects), None)
        world = tuple(map(int, self._ranks))
        first = [world[r] for r in suspects] + [r for r in world if r in self._session.neighbours] + list(world)
        group = Group(self._ident, "", world)
        try:
            explanation = self._session.explaining.explain(Deadline.after(_LATE_SECONDS), first, record, group)
        except Exception:  # the error itself matters more
            _logger.exception("xvcomm: cannot find out what holds %s up", operation)
            return self._lateness_of(operation, tuple(suspects), None)
        found = tuple(self._ranks.index(world) for world in explanation.verdict.ranks if world in self._ranks)
        late = tuple(r for r in found if r != self._rank) or tuple(suspects)
        return self._lateness_of(operation, late, explanation)

    def tell(self, explanation: Explanation) -> None:
        """Print a report."""
        self._session.explaining.tell(explanation)

    def _record(self, operation: Operation) -> Record | None:
        """The record of an operation, which may not have its number: of one in which the host is stuck."""

        def is_it(record: Record) -> bool:
            found = record.communicator, record.op, record.sequence, record.peer
            return found == (self._ident, operation.name, operation.sequence, operation.peer)

        found = self._session.journal.record(operation.record)
        if found is not None and is_it(found):
            return found
        kept = self._session.journal.newest(self._ranks[self._rank], _OWN_RECORDS)
        return next(filter(is_it, reversed(kept)), None)

    def _lateness_of(self, operation: Operation, late: tuple[int, ...], explanation: Explanation | None) -> Lateness:
        said = [explanation.verdict.text.rstrip(".")] if explanation is not None else []
        said += [f"{operation} was waiting for {', '.join(map(self.name, late))}"] if late else []
        said += [f"rank {r}: {self._last_words(r)}" for r in late[:_NAMED]]
        carried = self._carried(operation.record)
        said += [f"carried so far: {carried}"] if carried else []
        return Lateness(late, "; ".join(said), explanation)

    def _carried(self, number: int) -> str:
        """What connections have carried of an operation of this rank, by its number in the flight recorder, as text."""
        found = self._session.journal.record(number)
        same = (
            r
            for r in reversed(self._session.history())
            if found is not None and (r.posted, r.op) == (found.posted, found.op)
        )
        return "; ".join(str(share) for share in next((r.shares for r in same), ()))

    def differing(self) -> tuple[int, str] | None:
        """The abort word for the first collective that a rank of another host has called differently, and what both called.

        None if the flight recorders of the ranks that are asked show none.
        """
        journal, recorders, world = self._session.journal, self._session.recorders, self._ranks[self._rank]
        mine = {r.sequence: r for r in journal.newest(world, _OWN_RECORDS) if self._is_collective(r)}
        asked = [r for r in self._by_host() if not recorders.silent(self._ranks[r])][:_COMPARED]
        found = recorders.newest([self._ranks[r] for r in asked], Deadline.after(_ABSENT_SECONDS), _COMPARED_RECORDS)
        differing = [
            (theirs.sequence, rank, theirs)
            for rank in asked
            if self._ranks[rank] in found
            for theirs in found[self._ranks[rank]].records
            if self._is_collective(theirs) and theirs.sequence in mine and _call(theirs) != _call(mine[theirs.sequence])
        ]
        if not differing:
            return None
        sequence, other, theirs = min(differing, key=itemgetter(0))
        calls = ((self._rank, mine[sequence]), (other, theirs))
        return _differ(self._rank, other), "; ".join(f"{self.name(r)} called {one.describe()}" for r, one in calls)

    def _is_collective(self, record: Record) -> bool:
        return record.communicator == self._ident and record.peer == NO_PEER

    def _by_host(self) -> list[int]:
        """The ranks of other hosts, the first of each host first: those of one host have compared what they call."""
        ranks_of: defaultdict[str, list[int]] = defaultdict(list)
        for rank, world in enumerate(self._ranks):
            if world not in self._session.neighbours:
                ranks_of[self._session.infos[world].host].append(rank)
        return [rank for row in zip_longest(*ranks_of.values()) for rank in row if rank is not None]

    def _mismatch(self, finder: int, other: int) -> tuple[str, int | None]:
        """What differs, and the other rank if this one is concerned; see `_differ`."""
        mismatch = self.contract.mismatch() if self.contract is not None else None
        if mismatch is not None:
            (a, _), (b, _) = mismatch
            return self._calls(*mismatch), {a: b, b: a}.get(self._rank)
        own = self.mismatch()
        if own is not None:
            return own
        told = self._told(finder)
        if told in ("", _UNHEARD):
            told = f"{self.name(finder)} and {self.name(other)} made different calls" if other >= 0 else _DIFFERENTLY
        return told, {finder: other, other: finder}.get(self._rank) if other >= 0 else None

    def _calls(self, one: tuple[int, Message], other: tuple[int, Message]) -> str:
        """What two ranks called."""
        return "; ".join(f"{self.name(rank)} called {describe(message)}" for rank, message in (one, other))

    def _told(self, rank: int) -> str:
        """The text that a rank published when it stopped the communicator; waits for one that comes from another host."""
        world = self._ranks[rank]
        if world in self._session.neighbours:
            return self.contract.explanation(rank) if self.contract is not None else ""
        patience = _HEAR_SECONDS if self._session.hears(world) else 0
        with self._hearing:
            self._hearing.wait_for(lambda: rank in self._heard, patience)
            return self._heard.setdefault(rank, _UNHEARD)

    def _tell(self, end: RingEnd, mine: Message, theirs: Message) -> str:
        me, peer = self.name(self._rank), self.name(end.peer)
        if mine.op != OpCode.SEND or theirs.op != OpCode.SEND:
            return f"{me} called {describe(mine)}; {peer} called {describe(theirs)}"
        channel = f" (channel {end.channel})" if end.channel else ""
        if end.producer:
            return f"{me} sent {mine.describe()}; {peer} expected {theirs.describe()}{channel}"
        return f"{peer} sent {theirs.describe()}; {me} expected {mine.describe()}{channel}"

    def _lateness(self, about: int, reporter: int) -> str:
        told = self._told(reporter)
        if reporter == self._rank:
            return f"did not finish in time: {told}"
        whom = "" if about == reporter else "for this rank " if about == self._rank else "for another "
        return f"{self.name(reporter)} waited {whom}until its deadline: {told}"

    def _last_words(self, rank: int) -> str:
        return self._session.liveness.last_words(self._ranks[rank])


def _differ(finder: int, other: int) -> int:
    """The abort word for two ranks that differ, for ranks that cannot see what they called. Compiled code names no other one."""
    return Reason.MISMATCH.word(finder, other + 1)


def _call(record: Record) -> tuple[int, int, int]:
    """What the ranks of a collective must agree on, as far as it is recorded."""
    return record.op, record.dtype, record.nbytes
