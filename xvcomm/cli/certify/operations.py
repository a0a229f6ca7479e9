"""Every collective with every dtype and size, bit by bit, by the public checks of `xvcomm.testing`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from ml_dtypes import finfo

from xvcomm.cli.certify.contract import Finding, Result, Section, Table
from xvcomm.cli.certify.control import Case, Control, Trials
from xvcomm.cli.certify.job import SMALL, Job
from xvcomm.comm.communicator import Communicator
from xvcomm.types.dtype import DTYPES, DType

_SIZES = (1, 1000, 0, 7, 65_537, 250_007)
_QUICK_SIZES = (1, 1000, 0, 65_537)
_WHOLE_ELEMENTS = 1 << 22
"""Elements of all ranks' inputs where a large job is checked as a whole: each rank computes the result."""

REMEDY = (
    "do not rely on this operation here; run it alone with `xvcomm bench --op`, compare `xvcomm doctor` of the ranks that are "
    "named, and report both with this report"
)


def _run(comm: Communicator, control: Control, job: Job, result: Result) -> None:
    members = job.group_of(comm.rank)
    # Groups may differ by a rank, and all have the same cases.
    most = max(len(job.group_of(rank)) for rank in range(job.size)) if job.size > SMALL else job.size
    cells = Trials(control, members, REMEDY).run(_cases(job, most), result)
    result.findings += _left_out(job, most)
    result.tables.append(grid("Cases that passed, of those that were tried, by dtype and operation", cells))
    if job.size > SMALL:
        Trials(control, range(job.size), REMEDY).run(_whole(job), result)
        result.tables[-1].title += f"; in groups of {len(members)} ranks, all at the same time"


def _left_out(job: Job, size: int) -> list[Finding]:
    """Notes of what has no cases in this job, and why."""
    from xvcomm.testing.cases import reductions

    ways = [(dtype, str(op)) for dtype in DTYPES for op in reductions(dtype)]
    vague = [f"{how} of {dtype.name}" for dtype, how in ways if not determined(dtype, how, size, job.host_only)]
    if not job.host_only and job.largest > 2:
        vague.append("averages whose sums are no numbers of the dtype")
    told = []
    if vague:
        what = f"left out, because bits depend on how native libraries round partial results of {size} ranks: {', '.join(vague)}"
        told.append(Finding(what, "certify fewer ranks", wrong=False))
    if len(job.kinds) > 1:
        what = "left out in a job of several kinds of devices: arguments that are refused"
        told.append(Finding(what, "certify ranks of each kind alone", wrong=False))
    return told


def _cases(job: Job, size: int) -> Iterator[Case]:
    from xvcomm.testing import collectives, mixture, refusals
    from xvcomm.testing.cases import reductions

    moving: dict[str, Callable[..., None]] = {
        "broadcast": collectives.check_broadcast, "all_gather": collectives.check_all_gather,
        "gather": collectives.check_gather, "scatter": collectives.check_scatter,
        "all_to_all": collectives.check_all_to_all,
    }  # fmt: skip
    reducing: dict[str, Callable[..., None]] = {
        "all_reduce": collectives.check_all_reduce, "reduce": collectives.check_reduce,
        "reduce_scatter": collectives.check_reduce_scatter,
    }  # fmt: skip
    for count in _QUICK_SIZES if job.quick else _SIZES:
        rows = max(count // size, min(count, 1))
        for dtype in DTYPES:
            name = dtype.name
            for op, check in reducing.items() if determined(dtype, "sum", size, job.host_only) else ():
                each = rows if op == "reduce_scatter" else count
                yield Case(f"{op}(sum) of {each} x {name}", partial(_reduce, check, name, "sum", each), (name, op))
            for op, check in moving.items():
                yield Case(f"{op} of {rows} rows of {name}", partial(_move, check, name, rows), (name, op))
    for dtype in DTYPES:
        for how in map(str, reductions(dtype)):
            for op, check in reducing.items() if how != "sum" and determined(dtype, how, size, job.host_only) else ():
                what = f"{op}({how}) of 1001 x {dtype.name}"
                yield Case(what, partial(_reduce, check, dtype.name, how, 1001), (dtype.name, op))
    for name, how in (("float32", "sum"), ("bfloat16", "sum"), ("float32", "prod"), ("float16", "avg")):
        what = f"the same bits twice and on all ranks: all_reduce({how}) of 70001 x {name}"
        yield Case(what, partial(_reproducible, name, how))
    if job.host_only or job.largest <= 2:
        yield Case("averages round once", collectives.check_averages)
    others: tuple[Callable[[Communicator], None], ...] = (
        collectives.check_barrier, collectives.check_objects, collectives.check_premul_factors, collectives.check_split,
        collectives.check_subgroup,
    )  # fmt: skip
    if len(job.kinds) == 1:  # what is refused differs between kinds of devices
        others += refusals.check_arrays_refused, refusals.check_dtypes_refused, refusals.check_arguments_refused
    for other in others:
        yield Case(words(other), other)
    yield Case("40 operations in progress", lambda comm: collectives.check_async(comm, 40))
    yield Case("operations of all kinds in random order", lambda comm: mixture.check_mixture(comm, 3, 60))


def determined(dtype: DType, how: str, size: int, host_only: bool) -> bool:
    """Whether the bits of a reduction of `testing.cases.Reducing` do not depend on where partial results are rounded.

    Native libraries of GPUs round in between, in low precision; xvcomm's own reductions round once. Inputs are integers from -2
    to 2, times the number of ranks for averages.
    """
    if not dtype.low_precision:
        return True
    limits = finfo(dtype.numpy)
    exact = 1 << (limits.nmant + 1)  # up to here each integer is a number of this dtype
    match how:
        case "prod":
            return 2.0**size <= float(limits.max)
        case "sum" | "premul_sum":
            return host_only or 2 * size <= exact
        case "avg":
            powers_of_two = size & (size - 1) == 0
            return host_only or (2 * size if powers_of_two else 2 * size**2) <= exact
    return True


def _reduce(check: Callable[..., None], dtype: str, how: str, count: int, comm: Communicator) -> None:
    check(comm, dtype, how, count)


def _move(check: Callable[..., None], dtype: str, rows: int, comm: Communicator) -> None:
    check(comm, dtype, rows)


def _reproducible(dtype: str, how: str, comm: Communicator) -> None:
    from xvcomm.testing import collectives

    collectives.check_reproducible(comm, dtype, how, 70_001)


def _whole(job: Job) -> Iterator[Case]:
    """Cases of a large job as a whole whose cost on a rank does not grow with it."""
    from xvcomm.testing import collectives

    for count in (1, max(1, _WHOLE_ELEMENTS // job.size)):
        for name in ("float32", "bfloat16"):
            for op, check in (("all_reduce", collectives.check_all_reduce), ("reduce", collectives.check_reduce)):
                yield Case(f"{op}(sum) of {count} x {name}, all ranks", partial(_reduce, check, name, "sum", count))
            what = f"broadcast of {count} rows of {name}, all ranks"
            yield Case(what, partial(_move, collectives.check_broadcast, name, count))
            what = f"all_gather of {count // job.size} rows of {name}, all ranks"
            yield Case(what, partial(_move, collectives.check_all_gather, name, count // job.size))


def words(check: Callable[..., None]) -> str:
    """The name of a check as words."""
    return check.__name__.removeprefix("check_").replace("_", " ")


def grid(title: str, cells: dict[tuple[str, str], list[int]]) -> Table:
    """A table of cells by row and column; wrong ones stand out."""
    columns = list(dict.fromkeys(column for _, column in cells))
    table = Table(title, ["", *columns])
    for row in dict.fromkeys(row for row, _ in cells):
        texts = []
        for column in columns:
            passed, tried = cells.get((row, column), (0, 0))
            texts.append("" if not tried else f"{passed}" if passed == tried else f"WRONG: {tried - passed} of {tried}")
        table.rows.append([row, *texts])
    return table


SECTION = Section(
    "operations", "Collectives: every operation, dtype and size, bit by bit", 4.0, lambda _: "", _run
)  # fmt: skip
