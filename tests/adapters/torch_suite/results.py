"""Results of a run of the suites as a JSON file; comparison of two runs; the documentation page of all."""

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
    """Result of one test. `reason`: the error's last lines, or why it does not apply."""

    state: str
    seconds: float = 0.0
    reason: str = ""


@dataclass
class Run:
    """The outcomes for one backend and one number of ranks, by `Class.test`."""

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
        """Read a file that `write` wrote."""
        parts = json.loads(path.read_text())
        parts["outcomes"] = {name: Outcome(**outcome) for name, outcome in parts["outcomes"].items()}
        return cls(**parts)

    def counts(self) -> Counter[str]:
        """Number of tests with each outcome."""
        return Counter(outcome.state for outcome in self.outcomes.values())


def differences(reference: Run, other: Run) -> list[str]:
    """Each test that passed in `reference` but not in `other`, with the reason, one line each.

    Tests excluded by name do not count. If `other` is a backend with its own name, tests gated by torch do not
    count either; if it replaces gloo, every gate that gloo passes must be passed.
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
    """Each test that passed in `other` and ran but did not pass in `reference`."""
    return [
        name
        for name, outcome in other.outcomes.items()
        if outcome.state == PASSED and reference.outcomes.get(name, Outcome(NOT_RUN)).state in (FAILED, EXCLUDED)
    ]


KINDS = (  # of torch's reasons not to run a test, by words in them; the first that fits
    ("kept for other backends by name", ("requires backend", "does not support", "gloo", "only supported on")),
    ("need GPUs", ("gpu", "cuda", "nccl")),
    ("need more ranks", ("ranks", "world size")),
    ("kept for other backends by name", ("only mpi", "backend")),
    ("skipped by torch itself", ("",)),
)


def page(runs: Iterable[Run]) -> str:
    """The table of docs/torch-suite.md, followed by failed and excluded tests and why others do not apply."""
    runs = list(runs)
    head = ("backend", "ranks", *STATES[:4])
    rows = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for run in runs:
        counts = run.counts()
        rows.append(f"| {run.backend} | {run.ranks} | {' | '.join(str(counts[state]) for state in STATES[:4])} |")
    versions = ", ".join(f"{name} {version}" for name, version in runs[0].versions.items())
    parts = ["\n".join(rows), f"Run on {runs[-1].date}; {versions}."]
    for run in runs:
        parts += listed(f"Failed with {run.backend} on {run.ranks} ranks:", run.outcomes, FAILED, NOT_RUN)
    for backend in dict.fromkeys(run.backend for run in runs):
        every = {name: outcome for run in runs if run.backend == backend for name, outcome in run.outcomes.items()}
        parts += listed(f"Excluded with {backend}:", every, EXCLUDED)
    reasons = [f"* {run.backend}, {run.ranks} ranks: {', '.join(why_not(run))}" for run in runs]
    return "\n\n".join([*parts, "Not applicable:\n\n" + "\n".join(reasons)])


def listed(title: str, outcomes: dict[str, Outcome], *states: str) -> list[str]:
    """A titled list of the tests with an outcome; empty if there are none."""
    found = [(name, o.reason.splitlines()) for name, o in outcomes.items() if o.state in states]
    lines = [f"* `{name}`: {reason[-1] if reason else ''}" for name, reason in found]
    return [f"{title}\n\n" + "\n".join(lines)] if lines else []


def why_not(run: Run) -> list[str]:
    """Number of tests that do not apply, by kind of reason."""
    texts = [outcome.reason.lower() for outcome in run.outcomes.values() if outcome.state == NOT_APPLICABLE]
    kinds = Counter(next(kind for kind, words in KINDS if any(word in text for word in words)) for text in texts)
    return [f"{count} {kind}" for kind, count in kinds.most_common()]
