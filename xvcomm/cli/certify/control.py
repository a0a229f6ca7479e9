"""How the ranks of a certificate stay together: by the job's store, whatever the operations under test do."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from xvcomm.abc.store import PrefixStore
from xvcomm.cli.certify.contract import Finding, Result
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import Aborted, XvcommError
from xvcomm.types.deadline import Deadline

MOST_FAILURES, MOST_OF_ONE = 16, 3
"""Cases of a section that fail before the rest is left out, and of one column of its table."""

_MOST_TEXTS = 16
_PATIENCE = 60.0
_LENGTH = 600


class Control:
    """Agreement of all ranks, in a number of requests to the store that does not grow with the job.

    Attributes:
        until: when the time of the section is over, on the monotonic clock; rank 0's counts.
    """

    def __init__(self, comm: Communicator, told: Callable[[int, int, str], None] = lambda *_: None) -> None:
        """Agree with the other ranks of a communicator.

        Args:
            told: called with the cases that are done, those that are planned, and the name of the next one.
        """
        self.comm, self.until, self.told = comm, 0.0, told
        self._store, self._round = PrefixStore("certify", comm.store), 0

    def _deadline(self, seconds: float = 0.0) -> Deadline:
        return Deadline.after(2 * self.comm.timeout + _PATIENCE + seconds)

    def say(self, value: Any) -> Any:
        """Rank 0's value, anything that JSON supports, on every rank."""
        self._round += 1
        key, deadline = f"{self._round}", self._deadline()
        if self.comm.rank == 0:
            self._store.set(key, json.dumps(value).encode(), deadline)
            return value
        return json.loads(self._store.get(key, deadline))

    def meet(self, note: Any = None, seconds: float = 0.0) -> int:
        """Wait for all ranks, `seconds` longer than operations take; how many of them left a note that is not None."""
        self._round += 1
        key, deadline = f"{self._round}", self._deadline(seconds)
        if note is not None:
            number = self._store.add(f"{key}/notes", 1, deadline)
            self._store.set(f"{key}/note/{number}", json.dumps([self.comm.rank, note]).encode(), deadline)
        if self._store.add(f"{key}/here", 1, deadline) == self.comm.size:
            self._store.set(f"{key}/met", str(self._store.add(f"{key}/notes", 0, deadline)).encode(), deadline)
        return int(self._store.get(f"{key}/met", deadline))

    def notes(self, count: int) -> list[tuple[int, Any]]:
        """On rank 0 what was left at the last meeting: (rank, note), by rank; elsewhere nothing."""
        if self.comm.rank:
            return []
        deadline, key = self._deadline(), f"{self._round}/note"
        found = [json.loads(self._store.get(f"{key}/{number + 1}", deadline)) for number in range(count)]
        return sorted((rank, note) for rank, note in found)

    def collect(self, note: Any) -> list[tuple[int, Any]]:
        """On rank 0 the notes of all ranks that have one; elsewhere nothing. Waits for all."""
        return self.notes(self.meet(note))

    def over(self) -> bool:
        """Whether the section's time is over; the same on every rank."""
        return bool(self.say(time.monotonic() > self.until))


@dataclass(frozen=True, slots=True)
class Case:
    """A check that every rank of a group calls.

    Attributes:
        name: of the case, in the report.
        call: raises AssertionError if a result is wrong.
        of: row and column of the section's table that it counts in, or nothing.
    """

    name: str
    call: Callable[[Communicator], None]
    of: tuple[str, str] | None = None


class Trials:
    """Runs cases one by one in communicators of their own. One that fails on a rank is given up on all, and the next ones run
    in a new communicator.
    """

    def __init__(self, control: Control, members: Sequence[int], remedy: str) -> None:
        """Run cases of some ranks.

        Args:
            members: ranks of this one's group, this one among them; empty if it only waits for the others.
            remedy: what to do if results are wrong.
        """
        self._control, self._members, self._remedy = control, members, remedy
        self._group: Communicator | None = None
        self._made = 0

    def run(self, cases: Iterable[Case], result: Result) -> dict[tuple[str, str], list[int]]:
        """Run the cases until the section's time is over; (passed, tried) of each cell of the table."""
        control, listed = self._control, list(cases)
        cells = {case.of: [0, 0] for case in listed if case.of is not None}
        result.planned += len(listed)
        failed: Counter[str] = Counter()
        try:
            for number, case in enumerate(listed):
                column = case.of[1] if case.of is not None else ""
                if column and failed[column] >= MOST_OF_ONE:
                    continue
                if self._stop(number, failed.total()):
                    break
                control.told(result.done, result.planned, case.name)
                count = control.meet(self._try(case))
                result.done += 1
                if case.of is not None:
                    cells[case.of][1] += 1
                    cells[case.of][0] += not count
                if count:
                    failed[column] += 1
                    result.reason = "after some cases failed others were left out"
                    result.findings.append(self._finding(case, control.notes(min(count, _MOST_TEXTS)), count))
                    self._leave()
        finally:
            self._leave()
        return cells

    def _stop(self, number: int, failed: int) -> bool:
        """Whether to stop before case `number`; asked of rank 0 now and then, which costs a request."""
        if failed >= MOST_FAILURES:
            return True
        return number % 4 == 0 and self._control.over()

    def _try(self, case: Case) -> str | None:
        """Run a case on this rank; what went wrong, as far as it is this rank's to tell."""
        if not self._members:
            return None
        try:
            if self._group is None:
                self._made += 1
                self._group = self._control.comm.subgroup(self._members, f"certify {self._made}")
            case.call(self._group)
            return None
        except Aborted:
            return ""  # another rank tells why
        except Exception as error:
            if self._group is not None:
                self._group.abort(f"certify: {case.name} failed")
            return describe(error)

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _finding(self, case: Case, notes: Sequence[tuple[int, str]], count: int) -> Finding:
        by_text: dict[str, list[int]] = {}
        for rank, text in notes:
            if text:
                by_text.setdefault(text, []).append(rank)
        told = [f"{_ranks(ranks)}: {text}" for text, ranks in by_text.items()]
        more = f" ({count} ranks in all)" if count > len(notes) else ""
        return Finding(f"{case.name}: {'; '.join(told) or 'given up on every rank'}{more}", self._remedy)


def describe(error: BaseException) -> str:
    """An error as a finding tells it: what is wrong, in some lines at most."""
    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    told = str(error).strip() if isinstance(error, AssertionError | XvcommError) else f"{error}"
    text = " ".join(f"{kind}{told}".split()) or "a check failed without a message"
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}…"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
