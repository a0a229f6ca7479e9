"""Jobs as commands name them: running ones of this host, or the dumps of one that has ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from xvcomm.errors import ArgumentError
from xvcomm.trace.live import LiveJob, jobs
from xvcomm.trace.snapshot import Snapshot, load, load_folder, merge

HELP = (
    "A running job's name or its beginning, the number of one of its processes, the name of a host on which it runs, or a folder "
    "of dumps or a dump; not needed where one job runs on this host."
)
"""What commands say of an argument that names a job."""


def read(targets: Sequence[str]) -> Snapshot:
    """What a job does, or did; several dumps are put together.

    Args:
        targets: see HELP; if there are none the only job that runs on this host.

    Raises:
        ArgumentError: no job, or several; no dumps, or a damaged one.
    """
    found = [_snapshot(target) for target in targets or [""]]
    names = sorted({snapshot.job for snapshot in found})
    if len(names) > 1:
        raise ArgumentError(f"these are several jobs: {', '.join(names)}; name one, or the dumps of one")
    return merge(found)


def _snapshot(target: str) -> Snapshot:
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
    found = found or [job for job in running if any(info.hostname == target for info in job.roster.infos)]
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
            f"{target!r} is no job of this user on this host, no process and no host of one, and no path; there are:{listed}"
        )
    raise ArgumentError(f"several jobs run on this host; name one of them:{listed}")
