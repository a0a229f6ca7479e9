"""The `xvcomm` command: run a job, examine a machine, draw a cluster, measure, print plans, certify, show traces."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from xvcomm import __version__
from xvcomm.errors import XvcommError

_MODULES = {
    "run": "run",
    "doctor": "doctor",
    "topo": "topo",
    "explain": "explain",
    "trace": "trace",
    "bench": "bench.command",
    "plan": "plan",
    "certify": "certify.command",
}
"""Where the function of each command is."""
_SETTINGS: dict[str, Any] = {"run": {"allow_interspersed_args": False}}  # options after the script belong to the script


class _Commands(TyperGroup):
    """Imports the module of a command when it is called: `xvcomm run` starts in half the time without the others'."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # where there is none of this name, typer looks for the most similar one of all
        for name in [cmd_name] if cmd_name in _MODULES else _MODULES:
            if name not in self.commands:
                self.add_command(_command(name), name)
        return super().get_command(ctx, cmd_name)


def _command(name: str) -> Any:
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    function = getattr(import_module(f"xvcomm.cli.{_MODULES[name]}"), name)
    alone.command(name, context_settings=_SETTINGS.get(name))(function)
    return typer.main.get_command(alone)


app = typer.Typer(
    name="xvcomm",
    cls=_Commands,
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
