"""Peers lost, deadlines, mismatches and aborts: in a job of its own, beside the one that runs the certificate."""

from __future__ import annotations

from xvcomm.cli.certify.children import MOST_SECONDS, Outcome, run_children
from xvcomm.cli.certify.contract import Finding, Result, Section, Table
from xvcomm.cli.certify.control import Control
from xvcomm.cli.certify.job import Job
from xvcomm.comm.communicator import Communicator

_NOTICED_SECONDS = 10.0
_REMEDY = (
    "programs here may hang or not learn of failures: keep a watchdog around them; run `xvcomm doctor`, whose "
    "`deaths_noticed_by` says how deaths are noticed, and report this"
)


def _run(comm: Communicator, control: Control, job: Job, result: Result) -> None:
    control.told(0, 1, f"a job of {len(job.children)} ranks")
    outcomes = run_children(comm, control, job, "faults", MOST_SECONDS)
    if outcomes:
        judge(outcomes, result)
    else:
        result.done = result.planned = 1


def judge(outcomes: list[Outcome], result: Result) -> None:
    """Fill in the result from what became of the job's processes, the last of which was to die."""
    from xvcomm.cli.certify.fault_trials import LOST

    *others, victim = outcomes
    longest: dict[str, float] = {}
    for outcome in outcomes:
        for entry in outcome.result:
            if "seconds" not in entry:
                continue
            longest[entry["name"]] = max(entry["seconds"], longest.get(entry["name"], 0.0))
            if entry["wrong"]:
                result.findings.append(Finding(f"{entry['name']}, rank {outcome.rank}: {entry['wrong']}", _REMEDY))
    for outcome in others:
        if outcome.code != 0 and not result.findings:
            last = outcome.result[-1]["name"] if outcome.result else "its start"
            how = "did not end in time" if outcome.code is None else f"ended with code {outcome.code}"
            what = f"the process beside rank {outcome.rank} {how}, at: {last}; its last lines: {outcome.tail or 'none'}"
            result.findings.append(Finding(what, _REMEDY))
    if not result.findings and victim.code != -9:
        what = f"the process beside rank {victim.rank}, which was to be killed, ended with {victim.code}: {victim.tail}"
        result.findings.append(Finding(what, _REMEDY))
    noticed = longest.get(LOST, 0.0)
    if noticed > _NOTICED_SECONDS:
        result.findings.append(Finding(f"{LOST}: the others learned of it after {noticed:.1f} s", _REMEDY))
    result.planned = max(1, len(longest))
    result.done = len(longest)
    rows = [[name, f"{seconds:.2f}"] for name, seconds in longest.items()]
    result.tables.append(Table(f"Faults in a job of {len(outcomes)} ranks", ["what", "seconds, slowest rank"], rows))


def _needs(job: Job) -> str:
    return "" if job.size > 1 else "one rank has no peer to lose; start two or more"


SECTION = Section("faults", "Faults: peers lost, deadlines, mismatches, aborts, in a job of its own", 2.0, _needs, _run)
