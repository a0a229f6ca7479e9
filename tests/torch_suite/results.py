"""What a run of the suites found: one JSON file; two of them compared; the page of all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

# Not applicable: torch's own gates say so. Excluded: the lists in exclusions.py do.
STATES = ("passed", "failed", "excluded", "not applicable", "not run")
PASSED, FAILED, EXCLUDED, NOT_APPLICABLE, NOT_RUN = STATES


@dataclass(frozen=True)
class Outcome:
    """How one test ended. `reason`: the error's last lines, or why it does not apply."""

    state: str
    seconds: float = 0.0
    reason: str = ""


@dataclass
class Run:
    """The outcomes of one backend with one number of ranks, by `Class.test`."""

    backend: str
    ranks: int
    date: str
    versions: dict[str, str]
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Run:
        """What `write` wrote."""
        parts = json.loads(path.read_text())
        parts["outcomes"] = {name: Outcome(**outcome) for name, outcome in parts["outcomes"].items()}
        return cls(**parts)

    def counts(self) -> Counter[str]:
        """How many tests ended in each state."""
        return Counter(outcome.state for outcome in self.outcomes.values())

    def seconds(self) -> float:
        """How long the tests took together."""
        return sum(outcome.seconds for outcome in self.outcomes.values())


def differences(reference: Run, other: Run) -> list[str]:
    """Each test that passed in `reference` and did not in `other`, with the reason, a line each.

    Tests excluded by name do not count. Where `other` is a backend of its own name, those that torch gates do not
    either; where it stands in for gloo, every gate that gloo passes must be passed.
    """
    lines = []
    for name, outcome in reference.outcomes.items():
        if outcome.state != PASSED:
            continue
        found = other.outcomes.get(name, Outcome(NOT_RUN, reason="not in the file"))
        no_matter = (PASSED, EXCLUDED, NOT_APPLICABLE) if other.backend == "xvcomm" else (PASSED, EXCLUDED)
        if found.state not in no_matter:
            lines.append(f"{name}: {found.state}: {found.reason.splitlines()[-1] if found.reason else ''}")
    return lines


def gained(reference: Run, other: Run) -> list[str]:
    """Each test that passed in `other` and was run and did not pass in `reference`."""
    return [
        name
        for name, outcome in other.outcomes.items()
        if outcome.state == PASSED and reference.outcomes.get(name, Outcome(NOT_RUN)).state in (FAILED, EXCLUDED)
    ]


def page(runs: Iterable[Run]) -> str:
    """The table of docs/torch-suite.md, and under it what failed and what does not apply."""
    runs = list(runs)
    head = ("backend", "ranks", *STATES[:4], "seconds")
    rows = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for run in runs:
        counts = run.counts()
        numbers = [str(run.ranks), *(str(counts[state]) for state in STATES[:4]), f"{run.seconds():.0f}"]
        rows.append(f"| {run.backend} | {' | '.join(numbers)} |")
    versions = ", ".join(f"{name} {version}" for name, version in runs[0].versions.items())
    parts = ["\n".join(rows), f"Run on {runs[0].date}; {versions}."]
    for run in runs:
        failed = [f"* `{name}`: {outcome.reason.splitlines()[-1]}"
                  for name, outcome in run.outcomes.items() if outcome.state in (FAILED, NOT_RUN)]  # fmt: skip
        if failed:
            parts.append(f"Failed with {run.backend} on {run.ranks} ranks:\n\n" + "\n".join(failed))
        excluded = [f"* `{name}`: {o.reason}" for name, o in run.outcomes.items() if o.state == EXCLUDED]
        if excluded:
            parts.append(f"Excluded with {run.backend} on {run.ranks} ranks:\n\n" + "\n".join(excluded))
        reasons = Counter(o.reason for o in run.outcomes.values() if o.state == NOT_APPLICABLE)
        listed = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
        parts.append(f"Not applicable with {run.backend} on {run.ranks} ranks: {listed}.")
    return "\n\n".join(parts)
