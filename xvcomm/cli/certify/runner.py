"""Runs the sections one after the other on the ranks of a job, with a progress bar on rank 0, and writes what was found."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import xvcomm
from xvcomm.cli.certify import (
    direct,
    facts,
    faults,
    messages,
    operations,
    rails,
    rdma,
    report,
    speed,
    streams,
    training,
)
from xvcomm.cli.certify.contract import SKIPPED, WRONG, Finding, Report, Result, Section
from xvcomm.cli.certify.control import Control, describe
from xvcomm.cli.certify.job import Facts, Job
from xvcomm.cli.certify.options import Options
from xvcomm.cli.doctor import cpu_model
from xvcomm.comm.communicator import Communicator

SECTIONS: tuple[Section, ...] = (
    facts.SECTION, operations.SECTION, messages.SECTION, streams.STREAMS, streams.GRAPHS, faults.SECTION, rails.RAILS,
    rails.FAILOVER, rdma.SECTION, direct.SECTION, training.SECTION, speed.SECTION,
)  # fmt: skip
"""In the order in which they run."""

HOST_SECONDS, GPU_SECONDS, QUICK_SECONDS = 150.0, 320.0, 60.0
"""Time of a run without `--seconds`: on host memory, on GPUs, and of a quick one on host memory."""

_LEAST_SECONDS = 2.0
_BROKEN = "see the output of the ranks; run this section alone with --sections, and report it"
_OPERATION_SECONDS = 45.0
"""An operation that takes longer has failed."""


def certify_job(comm: Communicator, options: Options) -> tuple[int, Report | None]:
    """Certify the job of these ranks; every rank calls this.

    Returns:
        The exit code, the same on every rank, and on rank 0 the report.
    """
    comm.timeout = min(comm.timeout, _OPERATION_SECONDS)
    with _Progress(comm.rank == 0) as progress:
        control = Control(comm, progress.told)
        job, made = _begin(comm, control, options)
        for section, seconds in _in_time(_chosen(options), options, job):
            progress.section(section)
            result, broken = _one(comm, control, job, section, seconds)
            if made is not None:
                made.results.append(result)
                made.seconds = round(time.monotonic() - progress.begun, 1)
                progress.line(report.line(result))
                if options.out:  # after every section, so that a job that ends early loses none
                    report.write(made, Path(options.out))
                if broken:
                    report.show(made, Console())
                    return WRONG, made
    if made is not None:
        report.show(made, Console())
    return int(control.say(made.code if made is not None else None)), made


def _chosen(options: Options) -> list[Section]:
    return [section for section in SECTIONS if not options.sections or section.name in options.sections]


def _begin(comm: Communicator, control: Control, options: Options) -> tuple[Job, Report | None]:
    """Agree on what the job is; the report is on rank 0."""
    told = control.collect(msgspec.to_builtins(facts.facts_of(comm)))
    made = job = None
    if comm.rank == 0:
        every = [msgspec.convert(note, Facts) for _, note in told]
        job = Job.of(every, options.quick)
        made = Report(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), options.told(), _setting(every))
    return msgspec.convert(control.say(msgspec.to_builtins(job)), Job), made


def _setting(every: Sequence[Facts]) -> dict[str, str]:
    devices = [each.device for each in every]
    islands = [each.island for each in every]
    rehearsal = " (rehearsal)" if any(each.rehearsal for each in every) else ""
    return {
        "ranks": f"{len(every)}; machines: {len({each.hostname for each in every})}; hosts: {len({each.host for each in every})}",
        "islands": ", ".join(f"{name}: {islands.count(name)}" for name in dict.fromkeys(islands)) + rehearsal,
        "devices": ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)),
        "native libraries": ", ".join(dict.fromkeys(each.native for each in every)),
        "machine of rank 0": f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.release()}",
        "xvcomm": xvcomm.__version__,
    }


def _in_time(sections: Sequence[Section], options: Options, job: Job) -> Iterator[tuple[Section, float]]:
    """The sections, each with its share of the time that is left; of those that cannot run nothing is kept back on rank 0."""
    most = options.seconds or (QUICK_SECONDS if options.quick else HOST_SECONDS)
    if not options.seconds and job.asynchronous:
        most = GPU_SECONDS / (4 if options.quick else 1)
    until = time.monotonic() + most
    for number, section in enumerate(sections):
        shares = sum(later.share for later in sections[number:] if not later.needs(job))
        left = until - time.monotonic()
        yield section, max(_LEAST_SECONDS, left * section.share / max(shares, section.share))


def _one(comm: Communicator, control: Control, job: Job, section: Section, seconds: float) -> tuple[Result, bool]:
    """Run one section, or say why it cannot run; and whether rank 0 has broken off, so that the ranks are out of step.

    Then rank 0 ends the job, and its launcher the other ranks.
    """
    result = Result(section.name, section.title)
    begun = time.monotonic()
    reason = control.say(section.needs(job))
    if reason:
        result.state, result.reason = SKIPPED, reason
        return result, False
    control.until = begun + seconds
    broken = False
    try:
        section.run(comm, control, job, result)
    except Exception as error:
        if comm.rank:
            raise
        broken = True
        result.findings.append(Finding(f"the section broke off: {describe(error)}", _BROKEN))
    result.settle()
    result.seconds = round(time.monotonic() - begun, 1)
    return result, broken


class _Progress:
    """The bar on rank 0's terminal; where there is none, a line for each section."""

    def __init__(self, shown: bool) -> None:
        self.begun = time.monotonic()
        self._console = Console(stderr=True)
        self._shown = shown
        self._bar = Progress(
            TextColumn("{task.fields[section]:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.description}"), console=self._console, transient=True,
            disable=not shown or not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", section="", total=1)

    def section(self, section: Section) -> None:
        """The section that runs from now on."""
        self._bar.reset(self._task, description=section.title, section=section.name, total=None)

    def told(self, done: int, planned: int, what: str) -> None:
        """How far the section is."""
        self._bar.update(self._task, completed=done, total=planned or None, description=what)

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        if self._shown:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()
