"""The `xvcomm` command: run a job, examine the machine, measure operations, print plans, certify a cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from xvcomm import __version__
from xvcomm.cli import certify, doctor, plan, run
from xvcomm.cli.bench import command
from xvcomm.errors import XvcommError

app = typer.Typer(
    name="xvcomm",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"xvcomm {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Collectives and pipelines for jobs that mix NVIDIA GPUs, AMD GPUs and host memory."""


# Options after the script belong to the script.
app.command(context_settings={"allow_interspersed_args": False})(run.run)
app.command()(doctor.doctor)
app.command()(command.bench)
app.command()(plan.plan)
app.command()(certify.certify)


def main() -> None:
    """Entry point of the command."""
    with told_in_one_line():
        app()


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Print an xvcomm error of the block as one line, and exit with code 2."""
    try:
        yield
    except XvcommError as error:
        print(f"xvcomm: {type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
