"""One rank of `xvcomm bench`: measures all cases; rank 0 also prints the table and writes the files."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import xvcomm
from xvcomm.cli import told_in_one_line
from xvcomm.cli.bench.case import Case
from xvcomm.cli.bench.measure import Bystanders, Effort, Meeting, Record, measure
from xvcomm.cli.bench.memory import Memory, memory_of
from xvcomm.cli.bench.options import Options
from xvcomm.cli.bench.peers import contenders
from xvcomm.cli.bench.report import Setting, Table, plot, read_json, write_csv, write_json
from xvcomm.comm.communicator import Communicator
from xvcomm.config import Config
from xvcomm.rendezvous.environment import discover
from xvcomm.testing.inside import context
from xvcomm.types.dtype import DTYPES


def measure_all(options: Options) -> int:
    """Measure every case with the other ranks of the job; blocks.

    Returns:
        0, or 1 if any result was wrong.
    """
    rank = discover(os.environ, Config.from_env()).rank
    for variable, values in (("XVCOMM_ISLAND", options.labels), ("XVCOMM_DEVICE", options.devices)):
        if values and values[rank]:
            os.environ[variable] = values[rank]
    with xvcomm.init() as comm:
        meeting = Meeting(comm.store, comm.rank, comm.size, comm.timeout)
        memory = memory_of(comm)
        devices = meeting.exchange(f"{memory.kind} {memory.name}")
        rehearsal = any(meeting.exchange(Config.from_env().island is not None))
        setting = Setting.of(comm.topology, devices, rehearsal, context(comm).rings.schemes())
        with _rendezvous(meeting) as rendezvous:
            records = _run(options, comm, meeting, memory, setting, rendezvous)
    if comm.rank == 0 and options.csv:
        write_csv(Path(options.csv), records, setting)
    if comm.rank == 0 and options.plot:
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


def _run(
    options: Options, comm: Communicator, meeting: Meeting, memory: Memory, setting: Setting, rendezvous: str
) -> list[Record]:
    measured = options.measured or ("xvcomm", *options.peers)
    libraries = contenders(measured, comm, meeting, memory, rendezvous)
    watch = Bystanders(meeting.exchange(os.getpid()))
    effort = Effort(
        options.seconds, options.iterations, options.warmup, patience=options.patience,
        asynchronous=any(meeting.exchange(memory.asynchronous)),
    )  # fmt: skip
    others = [record for file in options.others for record in read_json(Path(file))] if comm.rank == 0 else []
    table = Table(["xvcomm", *options.peers], setting, quiet=comm.rank != 0 or "xvcomm" not in measured)
    records: list[Record] = []
    keep = options.json if comm.rank == 0 else None
    try:
        if keep:
            write_json(Path(keep), records, setting)
        for case in _in_time(options.budget, _cases(options, comm.size), meeting):
            found = measure(case, libraries, meeting, memory, watch, effort)
            found += [r for r in others if (r.op, r.dtype, r.size) == (case.op, str(case.dtype), case.bytes)]
            records += found
            table.add(case, found)
            if keep:  # after every case, so that a later failure or interrupt loses no results
                write_json(Path(keep), records, setting)
    finally:
        for library in libraries:
            library.close()
    table.finish()
    return records


def _in_time(budget: float | None, cases: Sequence[Case], meeting: Meeting) -> Iterator[Case]:
    """The cases, with a progress bar on rank 0's terminal, until the total time is used up."""
    until = math.inf if budget is None else time.monotonic() + budget
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=console, disable=meeting.rank != 0 or not console.is_terminal, transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("measuring", total=len(cases))
        for number, case in enumerate(cases):
            if meeting.exchange(time.monotonic() > until)[0]:
                if meeting.rank == 0:
                    print(f"# out of time: {len(cases) - number} of {len(cases)} cases were not measured", flush=True)
                return
            bar.update(task, description=f"{case.op} {case.size} B")
            yield case
            bar.advance(task)


@contextmanager
def _rendezvous(meeting: Meeting) -> Iterator[str]:
    """A path for torch's file store that no other job uses; the launcher removes the file if the ranks are killed."""
    config = Config.from_env()
    path = meeting.exchange(f"{config.shm_dir}/xvcomm-{config.job or os.getpid()}-gloo")[0]
    try:
        yield path
        meeting.exchange(None)
    finally:
        if meeting.rank == 0:
            Path(path).unlink(missing_ok=True)


if __name__ == "__main__":
    with told_in_one_line():
        sys.exit(measure_all(msgspec.json.decode(sys.argv[1], type=Options)))
