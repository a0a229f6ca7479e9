"""One rank of `xvcomm bench`: measures all cases, and on rank 0 prints the table and writes the files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import xvcomm
from xvcomm.cli.bench import Options
from xvcomm.cli.benchpeers import contenders
from xvcomm.cli.benchreport import Setting, Table, plot, write_json
from xvcomm.cli.measure import Bystanders, Case, Effort, Meeting, Record, measure
from xvcomm.communicator import Communicator
from xvcomm.config import Config
from xvcomm.dtype import DTYPES
from xvcomm.launch import discover


def measure_all(options: Options) -> int:
    """Measure every case with the other ranks of the job; blocks.

    Returns:
        0, or 1 if any result was wrong.
    """
    label = options.labels[discover(os.environ, Config.from_env()).rank] if options.labels else ""
    if label:
        os.environ["XVCOMM_ISLAND"] = label
    with xvcomm.init() as comm:
        meeting = Meeting(comm.store, comm.rank, comm.size, comm.timeout)
        setting = Setting.of(comm.topology, any(meeting.exchange(Config.from_env().island is not None)))
        with _rendezvous(meeting) as rendezvous:
            records = _run(options, comm, meeting, setting, rendezvous)
    if comm.rank == 0:
        if options.json:
            write_json(Path(options.json), records, setting)
        if options.plot:
            plot(Path(options.plot), records, setting)
    return 1 if any(record.wrong for record in records) else 0


def _cases(options: Options, size: int) -> list[Case]:
    dtypes = [dtype for name in options.dtypes for dtype in DTYPES if dtype.name == name]
    cases: list[Case] = []
    for op in options.ops:
        if op == "barrier":
            cases.append(Case(op, 0, dtypes[0], size, options.in_place))
            continue
        every = [Case(op, nbytes, dtype, size, options.in_place) for dtype in dtypes for nbytes in options.sizes]
        cases += [case for case in every if case.count]
    return cases


def _run(options: Options, comm: Communicator, meeting: Meeting, setting: Setting, rendezvous: str) -> list[Record]:
    libraries = contenders(list(options.peers), comm, meeting, rendezvous)
    watch = Bystanders(meeting.exchange(os.getpid()))
    effort = Effort(options.seconds, options.iterations, options.warmup, patience=options.patience)
    table = Table([library.name for library in libraries], setting)
    cases, records = _cases(options, comm.size), []
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=console, disable=comm.rank != 0 or not console.is_terminal, transient=True,
    )  # fmt: skip
    try:
        with bar:
            task = bar.add_task("measuring", total=len(cases))
            for case in cases:
                bar.update(task, description=f"{case.op} {case.size} B")
                found = measure(case, libraries, meeting, watch, effort)
                records += found
                if comm.rank == 0:
                    table.add(case, found)
                bar.advance(task)
    finally:
        for library in libraries:
            library.close()
    if comm.rank == 0:
        table.finish()
    return records


@contextmanager
def _rendezvous(meeting: Meeting) -> Iterator[str]:
    """A path for torch's file store that no other job uses; the launcher removes it if the ranks are killed."""
    config = Config.from_env()
    path = meeting.exchange(f"{config.shm_dir}/xvcomm-{config.job or os.getpid()}-gloo")[0]
    try:
        yield path
        meeting.exchange(None)
    finally:
        if meeting.rank == 0:
            Path(path).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(measure_all(msgspec.json.decode(sys.argv[1], type=Options)))
