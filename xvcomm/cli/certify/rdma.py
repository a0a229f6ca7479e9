"""RDMA between the hosts of a job: bits, rails, speed beside plain WRITEs, Device-Direct; alone as `xvcomm certify --rdma`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import xvcomm
from xvcomm.cli.certify import contract, rdma_report
from xvcomm.cli.certify.job import Job

if TYPE_CHECKING:
    from xvcomm.cli.certify.control import Control
    from xvcomm.comm.communicator import Communicator

_SECTION_SECONDS = 0.3
"""That each speed is measured for in a section."""


def certify_rdma(out: Path | None, seconds: float) -> int:
    """Certify RDMA alone, with arrays of each rank's device; rank 0 prints the report.

    Args:
        seconds: that each speed is measured for; rank 0's count.

    Returns:
        The exit code, the same on all ranks.
    """
    from xvcomm.cli.certify.control import Control
    from xvcomm.cli.certify.rdma_trial import try_rdma  # loads numba, which the command's help need not

    with _warnings() as warnings, xvcomm.init() as comm:
        control = Control(comm)
        report = try_rdma(control, float(control.say(seconds)), range(comm.size), warnings)
        code = int(control.say(None if report is None else report.code))
    if report is not None:
        rdma_report.write(report, out)
    return code


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """The warnings that xvcomm logs meanwhile, but that it compiles; they are printed all the same."""
    texts: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        text = record.getMessage().removeprefix("xvcomm: ")
        if record.levelno >= logging.WARNING and not text.startswith("compiling kernels"):
            texts.append(text)
        return True

    logger = logging.getLogger("xvcomm")
    logger.addFilter(note)
    try:
        yield texts
    finally:
        logger.removeFilter(note)


def _run(comm: Communicator, control: Control, job: Job, result: contract.Result) -> None:
    from xvcomm.cli.certify.rdma_trial import try_rdma

    with _warnings() as warnings:
        report = try_rdma(control, _SECTION_SECONDS, job.hosts, warnings)
    if report is not None:
        result.tables += report.tables()
        result.done = result.planned = len(report.directions)
        result.findings += report.findings()


def _needs(job: Job) -> str:
    if not job.spread:
        return "all ranks are on one host"
    return "" if job.rdma else "not all machines have RDMA devices"


SECTION = contract.Section(
    "rdma", "RDMA between hosts: bits, rails, pairs of devices, speed beside plain WRITEs", 1.0, _needs, _run
)
