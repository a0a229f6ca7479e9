"""Messages between ranks with every dtype and size, bit by bit, by the public checks of `xvcomm.testing`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from xvcomm.cli.certify.contract import Result, Section
from xvcomm.cli.certify.control import Case, Control, Trials
from xvcomm.cli.certify.job import Job
from xvcomm.cli.certify.operations import REMEDY, grid, words
from xvcomm.comm.communicator import Communicator
from xvcomm.types.dtype import DTYPES

_SIZES = (0, 1, 7, 1000, 65_537, 1_000_003)
_QUICK_SIZES = (0, 7, 65_537)
_FIT = 2
"""Small messages that every ring holds, by any setting."""

_ALL_PAIRS = 8
"""The largest group in which each rank sends to each other one."""


def _run(comm: Communicator, control: Control, job: Job, result: Result) -> None:
    members = job.group_of(comm.rank)
    cells = Trials(control, members, REMEDY).run(_cases(job, len(members)), result)
    result.tables.append(grid("Exchanges that passed, of those that were tried, by dtype and elements", cells))


def _cases(job: Job, size: int) -> Iterator[Case]:
    from xvcomm.testing import channels, pointtopoint, refusals

    for count in _QUICK_SIZES if job.quick else _SIZES:
        for dtype in DTYPES:
            what = f"sendrecv, isend, group: {count} x {dtype.name}"
            yield Case(what, partial(_exchange, dtype.name, count), (dtype.name, str(count)))
        if size <= _ALL_PAIRS:
            yield Case(f"send from each rank to each other: {count} x float32", partial(_blocking, count))
    yield Case("many messages in flight", lambda comm: pointtopoint.check_many_in_flight(comm, 100))
    yield Case("small sends return", lambda comm: pointtopoint.check_small_send_returns(comm, _FIT))
    yield Case("300 messages in order", lambda comm: pointtopoint.check_order(comm, 300))
    if size <= _ALL_PAIRS:
        yield Case("a group beyond the rings", lambda comm: pointtopoint.check_group_beyond_rings(comm, 1_500_001, 3))
    checks: tuple[Callable[[Communicator], None], ...] = (
        pointtopoint.check_behind_background, pointtopoint.check_crosswise_waits, pointtopoint.check_receive_first,
        pointtopoint.check_beside_collectives, pointtopoint.check_objects,
        *channels.CHECKS,
    )  # fmt: skip
    if len(job.kinds) == 1:  # what is refused differs between kinds of devices
        checks += (refusals.check_messages_refused,)
    for check in checks:
        yield Case(words(check), check)


def _exchange(dtype: str, count: int, comm: Communicator) -> None:
    from xvcomm.testing import pointtopoint

    pointtopoint.check_exchange(comm, dtype, count)


def _blocking(count: int, comm: Communicator) -> None:
    from xvcomm.testing import pointtopoint

    pointtopoint.check_blocking(comm, "float32", count)


def _needs(job: Job) -> str:
    return "" if job.size > 1 else "one rank has none to send to; start two or more"


SECTION = Section("messages", "Messages: every dtype and size, bit by bit, and their order", 2.0, _needs, _run)
