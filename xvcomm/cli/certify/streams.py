"""Order on the streams of GPUs, and in their graphs, by the public checks of `xvcomm.testing`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xvcomm.cli.certify.contract import Result, Section
from xvcomm.cli.certify.control import Case, Control, Trials
from xvcomm.cli.certify.job import Job
from xvcomm.cli.certify.operations import words
from xvcomm.comm.communicator import Communicator

_STREAMS = (
    "operations of these ranks are not ordered as the program's streams are: synchronize the device around them until it is "
    "found why, and report this with `xvcomm doctor`"
)
_GRAPHS = "do not capture these operations in graphs here; report this with `xvcomm doctor`"


def _streams(comm: Communicator, control: Control, job: Job, result: Result) -> None:
    from xvcomm.testing import asynchronous

    _all(comm, control, job, result, asynchronous.CHECKS, _STREAMS)


def _graphs(comm: Communicator, control: Control, job: Job, result: Result) -> None:
    from xvcomm.testing import graphs

    _all(comm, control, job, result, graphs.CHECKS, _GRAPHS)


def _all(
    comm: Communicator, control: Control, job: Job, result: Result, checks: Sequence[Callable[[Communicator], None]],
    remedy: str,
) -> None:  # fmt: skip
    Trials(control, job.group_of(comm.rank), remedy).run([Case(words(check), check) for check in checks], result)


def _needs_streams(job: Job) -> str:
    if not job.asynchronous:
        return "on host memory the host waits for every operation; there are no streams"
    return "" if job.size > 1 else "one rank waits for no other; start two or more"


def _needs_graphs(job: Job) -> str:
    if not job.graphs:
        return "not all ranks are on GPUs whose graphs can be captured here; CUDA needs CuPy, ROCm hip-python"
    return _needs_streams(job)


STREAMS = Section(
    "streams", "Order on streams: what waits, what is ordered, what does not wait", 1.5, _needs_streams, _streams
)
GRAPHS = Section("graphs", "Graphs: operations captured and launched again", 1.5, _needs_graphs, _graphs)
