"""Device-Direct: how far RDMA devices come with the memory of GPUs, and why no further."""

from __future__ import annotations

import os
from dataclasses import asdict

from xvcomm.cli.certify.contract import SKIPPED, Finding, Result, Section, Table
from xvcomm.cli.certify.control import Control, describe
from xvcomm.cli.certify.job import Job
from xvcomm.comm.communicator import Communicator
from xvcomm.config import Config
from xvcomm.engine.session import plugins
from xvcomm.errors import XvcommError
from xvcomm.testing.inside import context

_COLUMNS = ["rank", "device", "direction", "grade", "reason"]


def _run(comm: Communicator, control: Control, job: Job, result: Result) -> None:
    from xvcomm.backends.rdma.trials import DIRECT

    told = control.collect(trials(comm) if comm.rank in job.hosts and comm.device != "host" else None)
    tried = [(rank, trial) for rank, found in told for trial in found]
    result.done, result.planned = len(tried), len(tried)
    result.tables.append(Table("RDMA devices and GPU memory (docs/rdma.md explains the grades)", _COLUMNS))
    for rank, trial in tried:
        result.tables[-1].rows.append([str(rank), *(trial[column] for column in _COLUMNS[1:])])
    reached = [trial for _, trial in tried if trial["grade"] == DIRECT]
    if comm.rank == 0 and len(reached) < len(tried):
        remedy = "see the reasons in the table and docs/rdma.md; rings lie in host memory until then"
        what = f"{len(reached)} of {len(tried)} ways between RDMA devices and GPU memory are in use"
        result.findings.append(Finding(what, remedy, wrong=False))
    if comm.rank == 0 and not reached:
        result.state = SKIPPED
        result.reason = tried[0][1]["reason"] if tried else "the GPU's memory cannot be given to RDMA devices"


def trials(comm: Communicator) -> list[dict[str, str]]:
    """How far the RDMA devices of this rank come with the memory of its GPU, by the names of `backends.rdma.trials.Trial`."""
    from xvcomm.backends.rdma import direct

    config = Config.from_env(os.environ)
    interfaces = [
        interface
        for found in plugins.transports()
        if found.usable
        for interface in found.load().interfaces(config, os.environ)
    ]
    try:
        return [asdict(trial) for trial in direct.examine(config, os.environ, interfaces, context(comm).device)]
    except XvcommError as error:
        return [{"device": "", "direction": "", "grade": "", "reason": describe(error)}]


def _needs(job: Job) -> str:
    return "no rank is on a GPU" if job.kinds == ["host"] else ""


SECTION = Section("direct", "Device-Direct: how far RDMA devices come with the memory of GPUs", 0.5, _needs, _run)
