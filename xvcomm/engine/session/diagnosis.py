"""Converts the reason why a communicator stopped into an error that names the responsible rank."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from xvcomm.engine.session.rings import Rings
from xvcomm.engine.session.session import Session
from xvcomm.errors import Aborted, DeadlineExceeded, MismatchError, PeerLost, XvcommError
from xvcomm.memory.ring import Message, Reason, RingEnd
from xvcomm.trace.contract import ContractCheck
from xvcomm.trace.format import Record, State
from xvcomm.trace.operation import ANY_PEER, NO_PEER, Operation, describe
from xvcomm.types.deadline import Deadline
from xvcomm.types.opcode import OpCode

_NAMED = 4
"""Maximum number of late ranks whose last operation is named."""
_LATE_SECONDS = 1.5
"""Time limit of the search for late ranks on other hosts."""
_ABSENT_SECONDS = 0.5
"""A rank that does not answer within this time counts as one that has not called a collective."""
_ASKED, _LATE_RECORDS = 64, 16
"""Maximum number of ranks that are asked, and of records that each rank answers with."""
_LEAST_SECONDS = 0.2
"""A rank that does not answer is named only if it had this long."""
_HEAR_SECONDS = 0.3
"""How long an error waits for the reason in words that a rank of another host gives."""
_UNHEARD = "its reason has not come to this host; see that rank's own error"
_DIFFERENTLY = "two other ranks made different calls"


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
            text, peer = (
                self._lateness(about, reporter),
                None if about == reporter else about,
            )  # no rank waits for itself
            return DeadlineExceeded(
                f"{what}: {text}; the communicator is unusable: close it and create a new one", peer=peer, **known
            )
        if reason is Reason.ABORTED:
            why = self._told(Reason.reporter(word))
            text = f"{what}: {self.name(about)} aborted the communicator" + (f": {why}" if why else "")
            return Aborted(f"{text}; close it and create a new one", peer=about, **known)
        if reason is Reason.SERVER_LOST:
            return PeerLost(
                f"{what}: {self._session.server_lost()}; close the communicator, and restart the job", **known
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

    def waited(self, operation: Operation, late: Sequence[int]) -> str:
        """The ranks that an operation waited for, and their last operations, as text; and what was carried of it so far."""
        details = "; ".join(f"rank {r}: {self._last_words(r)}" for r in late[:_NAMED])
        text = f"{operation} was waiting for {', '.join(map(self.name, late))}; {details}"
        carried = self._session.carried(operation.record)
        return f"{text}; carried so far: {carried}" if carried else text

    def late(self, operation: Operation, suspects: Iterable[int] = ()) -> tuple[int, ...]:
        """The ranks that really delay an operation.

        These are, for the ranks that have not called the collective, else for the suspects: the ranks at the ends of the chains
        of waits, if the rank waits itself.
        """
        until = Deadline.after(_LATE_SECONDS)
        absent = self._absent(operation.sequence, self._rank, until) if operation.peer == NO_PEER else []
        return tuple(self._follow(absent or list(suspects), until))

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
        return told, None

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
        return self._session.last_words(self._ranks[rank])

    def _absent(self, sequence: int, of: int, until: Deadline) -> list[int]:
        """The other ranks that have not called the collective `sequence`: of this host, and of _ASKED ranks of others, of which
        those of the host of rank `of` come first.
        """
        infos, near = self._session.infos, self._session.infos[self._ranks[of]].host
        here = self.contract.absent(sequence) if self.contract is not None else []
        elsewhere = [r for r, world in enumerate(self._ranks) if world not in self._session.neighbours]
        elsewhere.sort(key=lambda r: infos[self._ranks[r]].host != near)
        asked = self._missing(elsewhere[:_ASKED], sequence, until)
        return sorted(r for r in (*here, *asked) if r != self._rank)

    def _missing(self, ranks: list[int], sequence: int, until: Deadline) -> list[int]:
        """Those of these ranks of other hosts that have not called a collective, or do not answer; none if no time is left."""
        if until.expired():
            return []
        recorders, missing = self._session.recorders, []
        asked = [self._ranks[r] for r in ranks if not recorders.silent(self._ranks[r])]
        found = recorders.newest(asked, Deadline.after(until.sooner(_ABSENT_SECONDS)), _LATE_RECORDS)
        for rank in ranks:
            excerpt = found.get(self._ranks[rank])
            called = [r for r in excerpt.records if r.communicator == self._ident] if excerpt is not None else []
            # The record of a message has the number of the next collective.
            if not called or called[-1].sequence + (called[-1].peer == NO_PEER) <= sequence:
                missing.append(rank)
        return missing

    def _follow(self, suspects: list[int], until: Deadline) -> list[int]:
        """Follow ranks that wait for each other: first the ranks that do not answer, then those that wait for none; if there
        are neither, all wait in a cycle, and it gives the suspects.

        A rank whose newest operation is over may wait for an earlier, asynchronous one, or compute: what it waits for is only
        told if that does not answer. One that is slow to answer has all the time that is left.
        """
        silent, idle, seen = [], [], {self._rank}
        rest = dict.fromkeys(suspects, True)  # whether they are waited for surely
        recorders = self._session.recorders
        while rest and until.left() > _LEAST_SECONDS:
            asked = {rank: surely for rank, surely in rest.items() if rank not in seen}
            seen.update(asked)
            found = recorders.newest([self._ranks[rank] for rank in asked], until, _LATE_RECORDS)
            rest = {}
            for rank, surely in asked.items():
                world = self._ranks[rank]
                if recorders.halted(world) or world not in found:
                    silent.append(rank)
                    continue
                records = found[world].records
                waits = [r for r in records if r.state == State.POSTED and r.communicator == self._ident]
                if not waits or waits[-1] is not records[-1] or waits[-1].peer == ANY_PEER:
                    idle += [rank] if surely else []
                    surely = False
                for peer in self._awaited(rank, waits, until):
                    rest[peer] = rest.get(peer, False) or surely
        return [*silent, *idle] or suspects

    def _awaited(self, rank: int, waits: list[Record], until: Deadline) -> list[int]:
        """The ranks that a rank waits for in its operations, of its collectives in the oldest one."""
        peers = [r.peer for r in waits if r.peer not in (NO_PEER, ANY_PEER)]
        collective = next((r.sequence for r in waits if r.peer == NO_PEER), None)
        return [*peers, *(self._absent(collective, rank, until) if collective is not None else [])]


def _differ(finder: int, other: int) -> int:
    """The abort word for two ranks that differ, for ranks that cannot see what they called. Compiled code names no other one."""
    return Reason.MISMATCH.word(finder, other + 1)
