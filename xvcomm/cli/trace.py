"""`xvcomm trace`: what ranks have done, as figures and as a timeline for Perfetto."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from xvcomm.cli.doctor import size_text, text_table
from xvcomm.cli.targets import HELP, read
from xvcomm.errors import ArgumentError
from xvcomm.trace.snapshot import Snapshot
from xvcomm.trace.summary import Summary, Times, summarize
from xvcomm.trace.timeline import timeline

_RANKS = 20
"""Ranks in the table of late ones."""


class Format(enum.StrEnum):
    """How the figures are printed."""

    TABLE = "table"
    JSON = "json"


def trace(
    targets: Annotated[list[str] | None, typer.Argument(help=f"{HELP} Several dumps are put together.")] = None,
    out: Annotated[
        Path | None, typer.Option("--json", help="Also write a timeline for Perfetto (ui.perfetto.dev) to this file.")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="How the figures are printed.")] = Format.TABLE,
) -> None:
    """Print the time of operations, the ranks that come late and the bandwidth of connections; write a timeline."""
    snapshot = read(targets or [])
    if out is not None:
        _write(out, snapshot)
    summary = summarize(snapshot)
    if form is Format.JSON:
        typer.echo(msgspec.json.format(msgspec.json.encode(summary), indent=2))
    else:
        show(summary, Console())


def _write(out: Path, snapshot: Snapshot) -> None:
    try:
        out.write_bytes(msgspec.json.encode(timeline(snapshot)))
    except OSError as error:
        raise ArgumentError(f"--json {out}: {error.strerror}") from error


def show(summary: Summary, console: Console) -> None:
    """Print the figures as tables."""
    known = f"{summary.ranks} of {summary.size}" if summary.ranks < summary.size else str(summary.size)
    console.print(
        f"Job {summary.job}: {known} ranks, the last {_time(summary.seconds)}", highlight=False, soft_wrap=True
    )
    if not summary.operations:
        console.print("No operations were recorded.")
    for table in _tables(summary):
        console.print(table)


def _tables(summary: Summary) -> Iterator[Table]:
    if summary.operations:
        yield text_table(
            "Operations",
            ("operation", "by", "calls", "in progress", "failed", "bytes", "time", *_titles("of a call"), "GB/s"),
            (
                (row.op, row.way, str(row.done), _count(row.running), _count(row.failed), size_text(row.nbytes),
                 _time(row.seconds), *_cells(row.times), _rate(row.nbytes, row.seconds))
                for row in summary.operations
            ),
        )  # fmt: skip
    if summary.lateness:
        worst = sorted(summary.lateness, key=lambda row: (-row.awaited, row.rank))[:_RANKS]
        more = f", the {_RANKS} worst" if len(summary.lateness) > _RANKS else ""
        yield text_table(
            f"Ranks that come late to collectives{more}",
            ("rank", "host", "device", "collectives", "last", *_titles("late"), "others waited"),
            (
                (str(row.rank), row.hostname, row.device, str(row.collectives), _share(row.last, row.collectives),
                 *_cells(row.late), _time(row.awaited))
                for row in worst
            ),
        )  # fmt: skip
    if summary.latest:
        yield text_table(
            "Collectives with the largest delays",
            ("collective", "communicator", "first", "last", "late", "called at"),
            (
                (f"{row.op} #{row.sequence}", row.communicator, f"rank {row.first}", f"rank {row.rank}", _time(row.late),
                 row.call_site)
                for row in summary.latest
            ),
        )  # fmt: skip
    if summary.rails:
        yield text_table(
            "Connections between hosts",
            ("host", "connection", "bytes out", "bytes in", "time", "GB/s out", "GB/s in"),
            (
                (row.hostname, row.connection, size_text(row.sent), size_text(row.received), _time(row.seconds),
                 _rate(row.sent, row.seconds), _rate(row.received, row.seconds))
                for row in summary.rails
            ),
        )  # fmt: skip
    if summary.devices:
        yield text_table(
            "RDMA devices and GPU memory (docs/rdma.md explains the grades)",
            ("rank", "host", "GPU", "device", "writes", "reads"),
            (
                (str(row.rank), row.hostname, row.gpu, row.device, row.writes or "none", row.reads or "none")
                for row in summary.devices
            ),
        )


def _titles(what: str) -> tuple[str, str, str]:
    return f"{what}: median", "p90", "max"


def _cells(times: Times) -> tuple[str, str, str]:
    return _time(times.median), _time(times.p90), _time(times.longest)


def _count(number: int) -> str:
    return str(number) if number else ""


def _share(part: int, whole: int) -> str:
    return f"{part} ({100 * part / whole:.0f} %)"


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.3g}" if nbytes and seconds else ""


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0"
