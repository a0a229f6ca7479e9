"""`xvcomm certify`: the command. It loads what the ranks need only when they run, since `xvcomm --help` reads this module."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec.structs import replace

from xvcomm.cli.certify.options import NAMES, Options
from xvcomm.cli.run import launch, rank_labels
from xvcomm.config import Config
from xvcomm.errors import ArgumentError
from xvcomm.rendezvous.environment import discover


def certify(
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", min=1, help="Number of ranks to start, without a launcher.")
    ] = None,
    islands: Annotated[str | None, typer.Option(help="Island labels of these ranks, for instance a:1,b:1.")] = None,
    sections: Annotated[str, typer.Option(help=f"Only these, separated by commas, of {', '.join(NAMES)}.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes, and a quarter of the time.")] = False,
    seconds: Annotated[
        float | None, typer.Option(help="That all may take; by default 150 on host memory, 320 on GPUs.", min=0.01)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for certify.json, certify.txt and certify.html.")] = None,
    only_rdma: Annotated[
        bool,
        typer.Option(
            "--rdma",
            help="Only RDMA between the hosts of a job, with a report of its own; --seconds is for each speed.",
        ),
    ] = False,
) -> None:
    """Prove what a job of these ranks can do, and write a report: results bit by bit, order, faults, connections, speed.

    Uses the ranks of a launcher, or starts its own with -n or --islands. Exits with code 0 if all was proven, 1 if something is
    wrong, 2 if nothing is wrong, but not all could be run. docs/certify.md describes the sections.
    """
    if only_rdma:
        from xvcomm.cli.certify.rdma import certify_rdma

        raise typer.Exit(certify_rdma(out, seconds or 2.0))
    chosen = tuple(part.strip() for part in sections.split(",") if part.strip())
    for name in chosen:
        if name not in NAMES:
            raise ArgumentError(f"unknown section {name!r}; known are {', '.join(NAMES)}")
    launched = discover(os.environ, Config.from_env()).name != "single"
    if launched and (ranks or islands):
        raise ArgumentError("-n and --islands are for a start without a launcher: leave them to the launcher")
    labels = () if launched or (ranks is None and islands is None) else rank_labels(ranks, islands)
    options = Options(chosen, quick, seconds, "" if out is None else str(out.absolute()), labels)
    if labels:
        raise typer.Exit(_start(options))
    from xvcomm.cli.certify.rank import certify_rank

    raise typer.Exit(certify_rank(options))


def _start(options: Options) -> int:
    """Start ranks on this host that certify; blocks and returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        verdict = Path(folder, "verdict")
        told = msgspec.json.encode(replace(options, verdict=str(verdict))).decode()
        code = launch((sys.executable, "-u", "-m", "xvcomm.cli.certify.rank", told), options.labels, prefix=False)
        return code or int(verdict.read_text())
