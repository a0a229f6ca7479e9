"""The flight recorders of all ranks: of this host in shared memory, of other hosts by asking their carriers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial

import msgspec

from xvcomm.engine.session.clocks import SAMPLES, Clocks
from xvcomm.engine.session.joining import Joining
from xvcomm.engine.session.journal import Journal
from xvcomm.engine.session.reach import Reach
from xvcomm.system import processes, stacks
from xvcomm.trace import grades, groups
from xvcomm.trace.format import NICS, PLACES, Answer, Life, Question, Topic
from xvcomm.trace.snapshot import RankState, Snapshot
from xvcomm.types.deadline import Deadline

_ASK_SECONDS, _SILENT_SECONDS = 0.5, 2.0
"""How long a rank of another host has for its answer in `words`; for how long one that gave none counts as silent."""
_CLOCK_SECONDS = 2.0
"""How long all ranks of a host have to tell its clock."""
_RECORDS = 64
"""Number of the newest records of each rank in a snapshot; with them come older ones that have not ended."""
_STACK_SECONDS, _PAUSE_SECONDS = 0.1, 0.02
"""How long processes have to write their stacks, and the time between two questions for them."""


class Recorders:
    """What the ranks of a job do, to their newest records.

    Args:
        joined: what each rank has told of itself.
        rank, neighbours: this rank, and the ranks of this host.
        ending: how a rank has ended, in words; empty if it is not known to have.

    Attributes:
        neighbours: as above.
    """

    def __init__(
        self, journal: Journal, joined: Sequence[Joining], rank: int, neighbours: Collection[int],
        reach: Reach, ending: Callable[[int], str],
    ) -> None:  # fmt: skip
        self._journal, self._joined, self._rank, self.neighbours = journal, joined, rank, neighbours
        self._reach, self._ending = reach, ending
        self._silent: dict[int, Deadline] = {}
        self._clocks = Clocks()
        self._infos = tuple(there.info for there in joined)
        self._hosts: defaultdict[str, list[int]] = defaultdict(list)
        for there in joined:
            self._hosts[there.info.host].append(there.info.rank)

    def newest(self, ranks: Collection[int], deadline: Deadline, wanted: int = 1) -> dict[int, RankState]:
        """The newest records of ranks; of those that do not answer until the deadline nothing."""
        here = [r for r in ranks if r in self.neighbours]
        found = {r: RankState(records=tuple(self._journal.newest(r, wanted))) for r in here}
        elsewhere = [r for r in ranks if r not in self.neighbours]
        answers = self._reach.ask(elsewhere, Question(Topic.RECORDS, wanted), deadline) if elsewhere else {}
        for rank in elsewhere:
            if rank in answers:
                self._silent.pop(rank, None)
                answer = answers[rank]
                self._clocks.note(self._joined[rank].info.host, answer)
                found[rank] = _told(answer, wanted)
            else:
                self._silent[rank] = Deadline.after(_SILENT_SECONDS)
        return found

    def snapshot(self, ranks: Collection[int], deadline: Deadline) -> Snapshot:
        """What ranks do, to their newest records and their communicators. A rank of another host that does not answer until
        half of the time has passed is asked for at its neighbours, of which the host's shared memory tells the same.
        """
        found = {rank: self._journal.state(rank, _RECORDS) for rank in ranks if rank in self.neighbours}
        elsewhere = [rank for rank in ranks if rank not in self.neighbours]
        if elsewhere:
            found.update(self._elsewhere(elsewhere, deadline))
        states = {}
        for rank in sorted(ranks):
            state, host = found.get(rank, RankState(answered=False)), self._joined[rank].info.host
            gone = self._ending(rank) if state.life is not Life.CLOSED else ""
            states[rank] = msgspec.structs.replace(
                state, ending=gone, stopped=self.halted(rank), ahead=self._clocks.ahead(host)
            )
        return Snapshot(self._joined[0].job, time.time_ns(), self._infos, states)

    def state(self, rank: int) -> RankState:
        """All that is kept of a rank of this host, now."""
        return msgspec.structs.replace(self._journal.state(rank), taken=time.time_ns())

    def alone(self, rank: int, state: RankState) -> Snapshot:
        """A rank's state without those of others."""
        return Snapshot(self._joined[0].job, state.taken - state.ahead, self._infos, {rank: state})

    def dated(self, rank: int, state: RankState) -> Snapshot:
        """A rank's state by the clock of rank 0, by which dumps of all hosts are."""
        self.compare_clocks()
        return self.alone(rank, msgspec.structs.replace(state, ahead=-self._journal.clock()))

    @property
    def compares(self) -> bool:
        """Whether this rank is the one of its host to `compare_clocks` now and then: the first that lives, on another host than
        rank 0.
        """
        living = (
            r for r in sorted(self.neighbours) if r == self._rank or not (self._ending(r) or self._journal.left(r))
        )
        return 0 not in self.neighbours and next(living) == self._rank

    def compare_clocks(self) -> None:
        """Measure for this host how far the clock of rank 0's host is ahead, by two of its ranks at a time, until any answers:
        one may have just died.
        """
        deadline, host = Deadline.after(_CLOCK_SECONDS), self._joined[0].info.host
        ranks = [] if 0 in self.neighbours else self._hosts[host]
        living = [r for r in ranks if not (self._ending(r) or self._journal.left(r) or self.silent(r))]
        for first in range(0, len(living), 2):
            asked = living[first : first + 2]
            for _ in range(SAMPLES):
                asked = list(self.newest(asked, Deadline.after(deadline.sooner(_ASK_SECONDS))))
            if asked:
                self._journal.note_clock(self._clocks.ahead(host))
                return

    def _elsewhere(self, ranks: list[int], deadline: Deadline) -> dict[int, RankState]:
        found = self._answered(ranks, Deadline.after(deadline.left() / 2))
        alone = []
        for rank in (r for r in ranks if r not in found):
            neighbours = self._hosts[self._joined[rank].info.host]
            asked = next((r for r in neighbours if r in found), None)
            if asked is None:
                alone.append(rank)
            elif (state := self._of_neighbour(asked, neighbours.index(rank), deadline)) is not None:
                found[rank] = state
        return {**found, **(self._answered(alone, deadline) if alone else {})}

    def _answered(self, ranks: list[int], deadline: Deadline) -> dict[int, RankState]:
        """What ranks tell themselves."""
        found = self.newest(ranks, deadline, _RECORDS)
        of = self._reach.ask(list(found), Question(Topic.GROUPS, PLACES), deadline)
        return {rank: _placed(state, of[rank].parts) if rank in of else state for rank, state in found.items()}

    def _of_neighbour(self, asked: int, index: int, deadline: Deadline) -> RankState | None:
        records, places = (
            self._reach.ask([asked], Question(topic, most, index), deadline).get(asked)
            for topic, most in ((Topic.RECORDS, _RECORDS), (Topic.GROUPS, PLACES))
        )
        if records is None or places is None:
            return None
        return _placed(msgspec.structs.replace(_told(records, _RECORDS), answered=False), places.parts)

    def take_stacks(self, snapshot: Snapshot, ranks: Collection[int], deadline: Deadline) -> Snapshot:
        """The same with the stacks of ranks' main threads, as far as they arrive in time."""
        states = dict(snapshot.ranks)
        texts = self._stacks([rank for rank in ranks if rank in states], deadline)
        for rank, text in texts.items():
            states[rank] = msgspec.structs.replace(states[rank], stack=text)
        return msgspec.structs.replace(snapshot, ranks=states)

    def _stacks(self, ranks: Collection[int], deadline: Deadline) -> dict[int, str]:
        begun = time.time()
        pids = {rank: self._joined[rank].info.pid for rank in ranks if self._seen(rank)}
        here = {r: pid for r, pid in pids.items() if self._journal.ask_for_stack(r, partial(stacks.request, pid))}
        elsewhere = [rank for rank in ranks if rank not in self.neighbours]
        asked = self._reach.ask(elsewhere, Question(Topic.TAKE_STACK), deadline) if elsewhere else {}
        texts = stacks.collect(list(here.values()), min(_STACK_SECONDS, deadline.left()), begun)
        found = self._told_stacks(list(asked), deadline) if asked else {}
        return found | {rank: texts[pid] for rank, pid in here.items()}

    def _told_stacks(self, ranks: list[int], deadline: Deadline) -> dict[int, str]:
        """The stacks that ranks of other hosts have been asked for; what is there by the deadline if one is not complete."""
        until, found = Deadline.after(min(_STACK_SECONDS, deadline.left())), dict.fromkeys(ranks, "")
        while True:
            late = until.expired()
            waiting = [rank for rank, text in found.items() if not text]
            # A rank that is silent must not use up the time of the others.
            share = deadline if late else Deadline.after(min(_STACK_SECONDS, deadline.left()))
            answers = self._reach.ask(waiting, Question(Topic.STACK), share)
            found |= {rank: stacks.first(answer.text(), complete=not late) for rank, answer in answers.items()}
            if late or all(found.values()):
                return found
            time.sleep(_PAUSE_SECONDS)

    def _seen(self, rank: int) -> bool:
        """Whether this process can see a rank's process."""
        return rank in self.neighbours and self._joined[rank].processes == self._joined[self._rank].processes

    def silent(self, rank: int) -> bool:
        """Whether a rank has not answered a moment ago."""
        return rank in self._silent and not self._silent[rank].expired()

    def halted(self, rank: int) -> bool:
        """Whether a rank of this host is stopped by a signal, as far as this process can see."""
        return self._seen(rank) and processes.halted(self._joined[rank].info.pid)

    def words(self, rank: int) -> str:
        """A rank's last operation as text, for error messages."""
        if rank not in self.neighbours and self._journal.left(rank):
            return "it has left the job"
        found = None
        if not self.silent(rank):
            found = self.newest([rank], Deadline.after(_ASK_SECONDS)).get(rank)
        if found is None:
            where = self._joined[rank].info.hostname
            if self._reach.answers(rank):
                return f"it does not answer, but its host {where} does: it is stopped, or very slow"
            return f"it runs on host {where}, which did not answer"
        stopped = "its process is stopped; " if self.halted(rank) else ""
        if not found.records:
            return f"{stopped}it had not called any operation"
        return f"{stopped}its last operation: {found.records[-1].describe()}"


def _told(answer: Answer, wanted: int) -> RankState:
    """A rank's state with the records that it tells."""
    records = answer.records()
    dropped = int(len(records) >= wanted)  # at least; how many is not told
    return RankState(life=answer.life, records=records, ahead=answer.ahead, dropped=dropped)


def _placed(state: RankState, places: Sequence[bytes]) -> RankState:
    """A rank's state with what its places tell."""
    of_devices, of_groups = places[:NICS], places[NICS:]
    return msgspec.structs.replace(state, groups=groups.parse_all(of_groups), grades=grades.parse_all(of_devices))
