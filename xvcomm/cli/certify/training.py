"""A data-parallel and a pipeline-parallel model, in a job of its own, with the losses of one process."""

from __future__ import annotations

from xvcomm.cli.certify.children import MOST_SECONDS, Outcome, run_children
from xvcomm.cli.certify.contract import Finding, Result, Section, Table
from xvcomm.cli.certify.control import Control
from xvcomm.cli.certify.job import Job
from xvcomm.comm.communicator import Communicator

_REMEDY = "training over these ranks is not the same as in one process: see the section `operations`, and report this"


def _run(comm: Communicator, control: Control, job: Job, result: Result) -> None:
    control.told(0, 1, f"a job of {len(job.children)} ranks")
    outcomes = run_children(comm, control, job, "training", MOST_SECONDS)
    if outcomes:
        judge(outcomes, result)


def judge(outcomes: list[Outcome], result: Result) -> None:
    """Fill in the result from what became of the job's processes; the first one has the losses of one process too."""
    table = Table(f"Losses over {len(outcomes)} ranks, and of one process", ["step", "over ranks", "one process"])
    for entry in outcomes[0].result:
        result.done += 1
        for step, (ours, alone) in enumerate(zip(entry["losses"], entry["alone"], strict=True), 1):
            table.rows.append([f"{entry['name']}, step {step}", f"{ours:.7f}", f"{alone:.7f}"])
        if entry["apart"] > entry["tolerance"]:
            what = f"{entry['name']}: the losses differ from those of one process by {entry['apart']:.1e} of their size"
            result.findings.append(Finding(what, _REMEDY))
    result.planned = max(2, result.done)
    for outcome in outcomes:
        if outcome.code != 0:
            how = "did not end in time" if outcome.code is None else f"ended with code {outcome.code}"
            what = f"the process beside rank {outcome.rank} {how}; its last lines: {outcome.tail or 'none'}"
            result.findings.append(Finding(what, _REMEDY))
    result.tables.append(table)


def _needs(job: Job) -> str:
    return job.torch or ("" if job.size > 1 else "one rank trains alone; start two or more")


SECTION = Section(
    "training", "Training: a DDP step and a pipeline step, with the losses of one process", 1.0, _needs, _run
)
