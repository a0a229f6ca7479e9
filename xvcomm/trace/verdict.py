"""What holds a job up, in two sentences, and the ranks that do.

The search follows the waits from one operation, or from the oldest one under way, to ranks that do not wait: these hold the job
up. If there are none, some ranks wait in a cycle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xvcomm.trace import stack
from xvcomm.trace.format import Record, State
from xvcomm.trace.groups import brief
from xvcomm.trace.operation import ANY_PEER, NO_PEER
from xvcomm.trace.waits import Condition, Wait, Waits, Why
from xvcomm.types.opcode import OpCode

_ORDER = (
    Condition.GONE,
    Condition.LEFT,
    Condition.STOPPED,
    Condition.SILENT,
    Condition.BUSY,
    Condition.ELSEWHERE,
    Condition.LISTENS,
)
"""Of ranks that do not wait, who is named first: one that surely waits for none."""
_NAMED = 4
"""Maximum number of ranks that a sentence says something of."""
_WORDS = {
    Why.ABSENT: "which rank {} has not called",
    Why.DIFFERS: "in whose place rank {} has called something else",
    Why.BEHIND: "which rank {} has enqueued behind another collective",
    Why.NO_RECEIVE: "which rank {} does not receive",
    Why.NO_SEND: "which rank {} does not send",
    Why.INSIDE: "which rank {} is in, too",
}


@dataclass(frozen=True)
class Verdict:
    """What holds a job up.

    Attributes:
        text: for a person.
        ranks: who holds it up, by numbers in the whole job; of a cycle all in it.
        cycle: the waits of a cycle, each of the rank that the one before waits for; empty if there is none.
    """

    text: str
    ranks: tuple[int, ...]
    cycle: tuple[Wait, ...] = ()


def judge(waits: Waits, rank: int | None = None, record: Record | None = None) -> Verdict:
    """Find what holds up a rank in an operation, or the job, if neither is given."""
    start = _start(waits, rank, record)
    if start is None:
        return Verdict("No rank waits for another one.", ())
    return _Judge(waits, start).verdict()


def _start(waits: Waits, rank: int | None, record: Record | None) -> Wait | None:
    found = [wait for r, of_rank in waits.all.items() if rank in (None, r) for wait in of_rank]
    same = [wait for wait in found if record is not None and _same(wait.record, record)]
    blocking = [wait for wait in found if waits.condition(wait.rank) is Condition.WAITS]
    return min(same or blocking or found, key=waits.since, default=None)


def _same(one: Record, other: Record) -> bool:
    return (one.posted, one.communicator, one.sequence, one.op) == (
        other.posted, other.communicator, other.sequence, other.op,
    )  # fmt: skip


class Explainer:
    """Words for what ranks do."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def since(self, wait: Wait) -> str:
        """For how long an operation is under way."""
        return self._ago(wait.rank, wait.record.posted)

    def _ago(self, rank: int, then: int) -> str:
        return f"{max(0.0, (self._waits.now(self._waits.snapshot.ranks[rank]) - then) / 1e9):.1f} s"

    def describe(self, wait: Wait) -> str:
        """An operation with its communicator, if there are several."""
        return f"{_call(wait.record, self._peer(wait))}{self.group(wait)}"

    def _peer(self, wait: Wait) -> str:
        if wait.record.peer in (NO_PEER, ANY_PEER) or wait.group is None:
            return " with any rank" if wait.record.peer == ANY_PEER else ""
        if wait.record.peer >= len(wait.group.ranks):
            return ""
        side = "to" if wait.record.op == OpCode.SEND else "from"
        return f" {side} rank {wait.group.ranks[wait.record.peer]}"

    def group(self, wait: Wait) -> str:
        """Its communicator, if there are several."""
        if wait.group is None or len(self._waits.groups) < 2:
            return ""
        return f" on communicator {wait.group.name} of ranks {brief(wait.group.ranks)}"

    def inside(self, wait: Wait) -> str:
        """That a rank is in an operation, with its line and how far it is."""
        stage = f" ({wait.record.stage.words})" if wait.record.stage else ""
        return f"rank {wait.rank} is in {self.describe(wait)} since {self.since(wait)}{stage}, {wait.record.call_site}"

    def at(self, wait: Wait) -> str:
        """The line of an operation, and how far that is."""
        return f"{wait.record.call_site}; {wait.record.stage.words}" if wait.record.stage else wait.record.call_site

    def tell(self, rank: int) -> str:
        """What a rank does, with its line."""
        state = self._waits.snapshot.ranks.get(rank)
        condition = self._waits.condition(rank)
        it = f"rank {rank}"
        if state is None or (condition is Condition.SILENT and not state.records):
            return f"{it} on {self._waits.snapshot.infos[rank].hostname} does not answer"
        last = state.records[-1] if state.records else None
        after = (
            f"its last operation: {_call(last)} at {last.call_site} ({State(last.state).words})"
            if last
            else "it had not called any operation"
        )
        if condition in (Condition.WAITS, Condition.LISTENS):
            return self.inside(self._waits.all[rank][-1])
        if condition in (Condition.BUSY, Condition.ELSEWHERE):
            at = stack.parse(state.stack)
            where = f" in {at.frames[0]}" + _caller(at) if at is not None else ""
            ago = f", {self._ago(rank, last.ended)} ago" if last and last.ended else ""
            return f"{it} is outside xvcomm{where}; {after}{ago}"
        how = f" ({state.ending})" if state.ending else ""
        return f"{it} {condition.value}{how}; {after}"


class _Judge:
    def __init__(self, waits: Waits, start: Wait) -> None:
        self._waits, self._start, self._words = waits, start, Explainer(waits)

    def verdict(self) -> Verdict:
        reached = self._reached()
        differing = [wait for wait in reached if wait.why is Why.DIFFERS]
        if differing:
            return self._difference(differing[0])
        ends: dict[int, Wait] = {}  # ranks that wait for none, by the wait that has led there
        for wait in reached:
            for peer in wait.peers:
                if self._waits.condition(peer) is not Condition.WAITS:
                    ends.setdefault(peer, wait)
        for condition in _ORDER:
            ranks = tuple(sorted(r for r in ends if self._waits.condition(r) is condition))
            if ranks:
                return self._held_up(ends[ranks[0]], tuple(r for r in ranks if ends[r] is ends[ranks[0]]))
        cycle = self._cycle()
        if cycle:
            return self._circular(cycle)
        unknown = next((wait for wait in reached if wait.group is None and wait is not self._start), None)
        if unknown is not None:
            return self._out_of_sight(next(wait for wait in reached if unknown.rank in wait.peers), unknown)
        return self._stuck(next((wait for wait in reached if wait.why is Why.INSIDE), self._start))

    def _reached(self) -> list[Wait]:
        """The waits that the first one leads to, the nearest first. Ranks that do not wait themselves lead no further."""
        found, seen = [self._start], {self._start.rank}
        for wait in found:
            for peer in wait.peers:
                if peer not in seen and self._waits.condition(peer) in (Condition.WAITS, Condition.ELSEWHERE):
                    seen.add(peer)
                    found.extend(self._waits.all[peer])
        return found

    def _cycle(self) -> tuple[Wait, ...]:
        """The shortest cycle that the first wait leads to."""
        best: tuple[Wait, ...] = ()
        for begin in self._reached():
            paths: list[tuple[Wait, ...]] = [(begin,)]
            seen = {begin.rank}
            while paths and not (best and len(paths[0]) >= len(best)):
                path = paths.pop(0)
                last = path[-1]
                if begin.rank in last.peers and last.why is not Why.INSIDE:
                    best = path
                    break
                for peer in last.peers if last.why is not Why.INSIDE else ():
                    if peer not in seen:
                        seen.add(peer)
                        paths.extend((*path, wait) for wait in self._waits.all.get(peer, ()))
        return best

    def _missed(self, wait: Wait, ranks: tuple[int, ...]) -> str:
        """What ranks have not done for an operation."""
        who, op, waiting = _ranks(ranks), self._words.describe(wait), self._all_in(wait)
        if wait.why is Why.ABSENT:
            return _capital(f"{who} never called {op} that {waiting}")
        if wait.why in (Why.INSIDE, Why.BEHIND):
            return _capital(f"{who} {_be(ranks)} in {op}, too, that {waiting}")
        does = "receive" if wait.why is Why.NO_RECEIVE else "send"
        return _capital(f"{who} {'does' if len(ranks) == 1 else 'do'} not {does} in the {op} that {waiting}")

    def _out_of_sight(self, wait: Wait, unknown: Wait) -> Verdict:
        """A rank that is waited for is in an operation of a communicator of which nothing is known."""
        ranks = (unknown.rank,)
        text = f"{self._missed(wait, ranks)}: {self._words.inside(unknown)}"
        return Verdict(f"{text}. Nothing is known of its communicator: others may hold it up.", ranks)

    def _held_up(self, wait: Wait, ranks: tuple[int, ...]) -> Verdict:
        said = "; ".join(self._words.tell(rank) for rank in ranks[:_NAMED])
        more = f"; and {len(ranks) - _NAMED} others" if len(ranks) > _NAMED else ""
        advice = _ADVICE[self._waits.condition(ranks[0])]
        return Verdict(f"{self._missed(wait, ranks)}: {said}{more}. {advice}", ranks)

    def _difference(self, wait: Wait) -> Verdict:
        difference = self._waits.first_difference()
        assert difference is not None
        said = ", ".join(f"rank {rank} called {_call(record)} at {record.call_site}" for rank, record in difference)
        ranks = tuple(sorted(rank for rank, _ in difference))
        where = self._words.group(wait)
        return Verdict(
            f"The ranks made different calls{where}: {said}. All ranks must make the same calls in the same order.",
            ranks,
        )

    def _circular(self, cycle: tuple[Wait, ...]) -> Verdict:
        ranks = tuple(sorted(wait.rank for wait in cycle))
        # Where all but a few ranks have called a collective, those few are told of: they are somewhere else.
        for i, wait in enumerate(cycle):
            other = cycle[(i + 1) % len(cycle)]
            if wait.why is Why.ABSENT and other.why not in (Why.ABSENT, Why.BEHIND):
                head = f"{_capital(_ranks((other.rank,)))} never called {self._words.describe(wait)} that {self._all_in(wait)}"
                tail = f"{self._words.tell(other.rank)}, and waits for {self._rest(cycle, i)}"
                return Verdict(f"{head}: {tail}.", (other.rank,), cycle)
        collectives = all(wait.why in (Why.ABSENT, Why.BEHIND) for wait in cycle)
        groups = len({wait.record.communicator for wait in cycle})
        head = (
            "call collectives of several communicators in different orders"
            if collectives and groups > 1
            else "wait for each other" if len(cycle) == 2 else "wait in a cycle" if len(cycle) > 1 else "waits for itself"
        )  # fmt: skip
        return Verdict(f"{_capital(_ranks(ranks))} {head}. {_chain(cycle, self._words)}", ranks, cycle)

    def _rest(self, cycle: tuple[Wait, ...], begin: int) -> str:
        """How the rank behind the wait at `begin` leads back to it."""
        between = [cycle[(begin + 2 + i) % len(cycle)] for i in range(len(cycle) - 2)]
        told = [
            f"rank {wait.rank}, which is in {self._words.describe(wait)} ({wait.record.call_site})" for wait in between
        ]
        return " and so for ".join([*told, f"rank {cycle[begin].rank}"])

    def _stuck(self, wait: Wait) -> Verdict:
        over = f" over {'; '.join(map(str, wait.record.shares))}" if wait.record.shares else ""
        how = f" It goes by {wait.record.way}{over}." if wait.record.way else ""
        how += f" On rank {wait.rank} it is {wait.record.stage.words}." if wait.record.stage else ""
        what = f"{self._words.describe(wait)} that {self._all_in(wait)}.{how}"
        unknown = self._waits.unknown(wait)
        if wait.group is None:
            text = f"Nothing is known of the communicator of {what} Others may hold it up."
        elif unknown:
            text = f"All ranks of which it is known have come to {what} Others may hold it up: {_ranks(unknown)}."
        else:
            slow = "it is slow, or what carries it is stuck (a link, a device)"
            text = f"All ranks have come to {what} No rank holds it up: {slow}."
        return Verdict(text, ())

    def _all_in(self, wait: Wait) -> str:
        ranks = self._in(wait)
        since = self._words.since(wait)
        return f"{_ranks(ranks)} {_be(ranks)} in since {since} ({wait.record.call_site})"

    def _in(self, wait: Wait) -> tuple[int, ...]:
        """The ranks that are in an operation."""
        if wait.record.peer != NO_PEER:
            return (wait.rank,)
        key = wait.record.communicator, wait.record.sequence
        return tuple(sorted(
            w.rank for of_rank in self._waits.all.values() for w in of_rank
            if (w.record.communicator, w.record.sequence) == key and w.record.peer == NO_PEER
        ))  # fmt: skip


_ADVICE = {
    Condition.GONE: "See its own error or its exit status.",
    Condition.LEFT: "All ranks must make the same number of calls.",
    Condition.STOPPED: "Continue it with `kill -CONT`, or find the process that stopped it.",
    Condition.BUSY: "Look at what it does there, or give the operation more time.",
    Condition.ELSEWHERE: "Look at what it does there, or give the operation more time.",
    Condition.LISTENS: "It waits for a message of any rank.",
    Condition.SILENT: "Look whether its host and its network work.",
}


def _caller(at: stack.Stack) -> str:
    """The nearest caller in a file of another folder, which is the user's where the newest call is a library's."""
    folder = at.frames[0].file.rpartition("/")[0]
    other = next((frame for frame in at.frames if frame.file.rpartition("/")[0] != folder), None)
    return f" called in {other}" if other is not None else ""


def _call(record: Record, peer: str = "") -> str:
    """`all_reduce #12 of 4096 x float32`."""
    number = f" #{record.sequence}" if record.peer == NO_PEER else ""
    of = "" if record.op in (OpCode.PROBE, OpCode.BARRIER) else f" of {record.contents}"
    return f"{OpCode(record.op)}{number}{peer}{of}"


def _chain(cycle: Sequence[Wait], words: Explainer) -> str:
    parts = []
    for i, wait in enumerate(cycle):
        how = _WORDS[wait.why].format(cycle[(i + 1) % len(cycle)].rank)
        parts.append(f"rank {wait.rank} waits in {words.describe(wait)} ({words.at(wait)}), {how}")
    return f"{_capital('; '.join(parts))}."


def _ranks(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    text = brief(sorted(listed)).replace(",", ", ")
    if len(listed) == 1:
        return f"rank {text}"
    head, _, last = text.rpartition(", ")
    return f"ranks {head} and {last}" if head else f"ranks {text}"


def _be(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
