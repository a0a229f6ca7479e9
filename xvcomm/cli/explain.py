"""`xvcomm explain`: why a job hangs, from another shell, or from the dumps of one that has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from xvcomm.errors import ArgumentError
from xvcomm.trace.live import LiveJob, jobs
from xvcomm.trace.report import report
from xvcomm.trace.snapshot import Snapshot, load, load_folder
from xvcomm.trace.verdict import judge
from xvcomm.trace.waits import Waits


def explain(
    target: Annotated[
        str,
        typer.Argument(
            help="A job's name or its beginning, the number of one of its processes, or a folder of dumps or a dump; not needed "
            "where one job runs on this host."
        ),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print what the ranks do as JSON, without a verdict.")] = False,
) -> None:
    """Say who waits for whom in a job that hangs, on which line, and what holds it up.

    It needs no help of the job's Python: this host's ranks are read from shared memory, those of other hosts are asked by a rank
    of this host that still answers.
    """
    found = snapshot(target)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    waits = Waits(found)
    typer.echo(report(found, judge(waits), waits))


def snapshot(target: str) -> Snapshot:
    """What a job does, or did.

    Args:
        target: see `explain`.

    Raises:
        ArgumentError: no job, or several, or no dumps.
    """
    path = Path(target)
    if target and path.is_dir():
        return load_folder(path)
    if target and path.is_file():
        return load(path)
    return _choose(target).snapshot()


def _choose(target: str) -> LiveJob:
    """The job of this host that is meant."""
    running = jobs()
    pid = int(target) if target.isdigit() else -1
    found = [job for job in running if pid in job.pids or job.roster.job.startswith(target)]
    if len(found) == 1:
        return found[0]
    listed = "".join(
        f"\n  {job.roster.job}: {len(job.roster.infos)} ranks, processes {', '.join(map(str, job.pids))}"
        for job in found or running
    )
    if not running:
        raise ArgumentError("no job of this user runs on this host; name a folder of dumps (XVCOMM_TRACE_DIR)")
    if not found:
        raise ArgumentError(
            f"{target!r} is no job of this user on this host, no process of one, and no path; there are:{listed}"
        )
    raise ArgumentError(f"several jobs run on this host; name one of them:{listed}")
