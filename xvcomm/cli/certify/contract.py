"""What a section is, what it finds, and the report of all sections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xvcomm.cli.certify.job import Job

if TYPE_CHECKING:  # they load numba, which the command's help need not
    from xvcomm.cli.certify.control import Control
    from xvcomm.comm.communicator import Communicator

PASSED, FAILED, SKIPPED, UNFINISHED = "passed", "failed", "skipped", "unfinished"
"""States of a section: all of it was right; something was wrong; it could not run; time ended before all of it had run."""

PROVEN, WRONG, NOT_ALL = 0, 1, 2
"""Exit codes: every section passed; a section failed; none failed, but not all could be run, or run to the end."""


@dataclass
class Finding:
    """Something that was found.

    Attributes:
        what: what happened, on which ranks.
        remedy: what to do.
        wrong: whether the section fails by it; otherwise it is a note.
    """

    what: str
    remedy: str
    wrong: bool = True


@dataclass
class Table:
    """Numbers of a section, as text."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)


@dataclass
class Plot:
    """Lines over sizes, both axes logarithmic.

    Attributes:
        unit: of the values.
        lines: points (size in bytes, value) by name.
    """

    title: str
    unit: str
    lines: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


@dataclass
class Result:
    """What a section found.

    Attributes:
        name, title: of the section.
        reason: why it was skipped, or did not run to the end.
        done, planned: cases.
        seconds: that it took.
    """

    name: str
    title: str
    state: str = PASSED
    reason: str = ""
    done: int = 0
    planned: int = 0
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)

    def settle(self) -> None:
        """Derive the state of a section that has run from what it found and how far it came."""
        if any(finding.wrong for finding in self.findings):
            self.state = FAILED
        elif self.state == PASSED and self.done < self.planned:
            self.state = UNFINISHED
            self.reason = self.reason or "its time was over; give more with --seconds"
        elif self.state == PASSED and not self.done:
            self.state, self.reason = SKIPPED, self.reason or "it had no case for this job"


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the certificate.

    Attributes:
        name: as `--sections` takes it.
        title: what it proves.
        share: its part of the time, beside the other sections' parts.
        needs: why it cannot run in this job, or an empty text. Called on rank 0 alone.
        run: fills in the result; every rank calls it. What rank 0's result holds counts.
    """

    name: str
    title: str
    share: float
    needs: Callable[[Job], str]
    run: Callable[[Communicator, Control, Job, Result], None]


@dataclass
class Report:
    """All sections of one run.

    Attributes:
        date: in UTC.
        command: the options of the run.
        setting: of the job, in words, by title.
        seconds: that all took.
    """

    date: str
    command: str
    setting: dict[str, str]
    results: list[Result] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def code(self) -> int:
        """The exit code."""
        states = {result.state for result in self.results}
        if FAILED in states:
            return WRONG
        return PROVEN if states == {PASSED} else NOT_ALL

    @property
    def verdict(self) -> str:
        """The outcome in one sentence."""
        count = {state: sum(r.state == state for r in self.results) for state in (PASSED, FAILED, SKIPPED, UNFINISHED)}
        told = ", ".join(f"{number} {state}" for state, number in count.items() if number)
        words = {PROVEN: "All proven", WRONG: "Something is wrong", NOT_ALL: "Nothing wrong, but not all was proven"}
        return f"{words[self.code]}: {told or 'no sections'}."

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        from dataclasses import asdict

        return {**asdict(self), "code": self.code, "verdict": self.verdict}
