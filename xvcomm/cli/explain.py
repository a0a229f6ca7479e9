"""`xvcomm explain`: why a job hangs, from another shell, or from the dumps of one that has ended."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from xvcomm.cli.targets import HELP, read
from xvcomm.trace.report import report
from xvcomm.trace.verdict import judge
from xvcomm.trace.waits import Waits


def explain(
    target: Annotated[
        str,
        typer.Argument(help=HELP),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print what the ranks do as JSON, without a verdict.")] = False,
) -> None:
    """Print the ranks that wait in a job that hangs, the lines at which they wait, and the cause.

    It needs no help of the job's Python: this host's ranks are read from shared memory, those of other hosts are asked by a rank
    of this host that still answers.
    """
    found = read([target])
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    waits = Waits(found)
    typer.echo(report(found, judge(waits), waits))
