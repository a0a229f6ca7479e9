"""Host memory benchmarks: all-reduce and p2p beside Gloo, OpenMPI and memcpy; start-up; planning for many ranks.

Run it on a quiet machine: `python benchmarks/host.py --out docs/figures`. Everything is measured in one run; each bar is
a ratio within it. Writes host.md, host.json and host.png, and exits with code 1 if a bar is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from xvcomm.cli.bench.command import parse_size, start
from xvcomm.cli.bench.measure import Record
from xvcomm.cli.bench.options import Options
from xvcomm.cli.bench.report import Setting, plot
from xvcomm.cli.doctor import size_text
from xvcomm.cli.plan import make_request, scale
from xvcomm.cli.run import launch
from xvcomm.config import Config
from xvcomm.engine.planner import Planner
from xvcomm.schedule.steps import Collective
from xvcomm.types.topology import Topology

SIZES = ("8", "4K", "64K", "1M", "16M", "64M", "256M")
PEERS = ("gloo", "mpi", "memcpy")
FROM_64K = 64 << 10
STARTUP = """
import json, sys, time
import numpy as np
import xvcomm
imported = time.monotonic()
with xvcomm.init() as comm:
    comm.all_reduce(np.ones(8, np.float32))
    done = time.monotonic()
    open(f"{sys.argv[1]}/{comm.rank}", "w").write(json.dumps([imported, done]))
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """One criterion: `value` must be at least `bound`, or at most `bound` if `most` is set."""

    what: str
    value: float
    bound: float
    most: bool = False

    @property
    def met(self) -> bool:
        """Whether the criterion is met."""
        return self.value <= self.bound if self.most else self.value >= self.bound

    def cells(self) -> tuple[str, str, str, str]:
        """Description, bound, value and verdict as text."""
        return (
            self.what,
            f"{'≤' if self.most else '≥'} {self.bound:g}",
            f"{self.value:.3g}",
            "met" if self.met else "NOT MET",
        )


def measure(ranks: int, sizes: Sequence[str], seconds: float) -> tuple[list[Record], Setting]:
    """Measure all-reduce and p2p of `ranks` ranks beside all peers."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.json"
        options = Options(
            ops=("all_reduce", "p2p"),
            sizes=tuple(map(parse_size, sizes)),
            dtypes=("float32",),
            peers=PEERS,
            in_place=True,
            seconds=seconds,
            iterations=None,
            warmup=5,
            patience=2.0,
            labels=("",) * ranks,
            json=str(file),
            plot=None,
        )
        code = start(options)
        if code:
            sys.exit(f"measuring with {ranks} ranks failed (exit code {code})")
        found = json.loads(file.read_text())
    records = [Record(**{f.name: one[f.name] for f in fields(Record)}) for one in found]
    return records, Setting(**{f.name: found[0][f.name] for f in fields(Setting)})


def startup(ranks: int, rounds: int) -> float:
    """Seconds from the last rank's imports to the last rank's first all-reduce; median, with warm caches."""
    took = []
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every rank compiles every module: no warm cache
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "startup.py"
        script.write_text(STARTUP)
        for _ in range(rounds + 1):
            if launch((sys.executable, str(script), folder), ("",) * ranks):
                sys.exit("start-up failed")
            times = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(ranks)]
            took.append(max(done for _, done in times) - max(imported for imported, _ in times))
    return sorted(took[1:])[rounds // 2]


def planning(ranks: int) -> float:
    """Seconds on rank 0 of the slowest collective's first planning."""
    topology = Topology.from_labels(scale(("cuda", "rocm"), ranks))
    slowest = 0.0
    for op in Collective:
        request = make_request(op, ranks, 256 << 20, "float32", 0)
        planner = Planner(topology, 0, Config())
        begin = time.perf_counter()
        planner.plan(request)
        slowest = max(slowest, time.perf_counter() - begin)
    return slowest


def ratios(records: Sequence[Record], op: str, ranks: int, peer: str, least: int) -> list[float]:
    """The peer's time divided by xvcomm's, for each size of at least `least` bytes."""
    times = {(r.library, r.size): r.time for r in records if (r.op, r.ranks) == (op, ranks)}
    return [times[peer, size] / t for (name, size), t in times.items() if name == "xvcomm" and size >= least]


def bars(records: Sequence[Record], start_seconds: float, plan_seconds: float) -> list[Bar]:
    """All bars with the measured values; the worst of several sizes counts."""
    smallest = min(r.size for r in records)
    return [
        Bar(
            "all-reduce, 2 ranks, 64 KiB and more, times Gloo",
            min(ratios(records, "all_reduce", 2, "gloo", FROM_64K)),
            4,
        ),
        Bar(
            "all-reduce, 2 ranks, 64 KiB and more, times OpenMPI",
            min(ratios(records, "all_reduce", 2, "mpi", FROM_64K)),
            1.5,
        ),
        Bar("p2p, 64 KiB and more, times OpenMPI's bandwidth", min(ratios(records, "p2p", 2, "mpi", FROM_64K)), 1),
        Bar(
            f"all-reduce of {smallest} B, 2 ranks, part of Gloo's time",
            1 / ratios(records, "all_reduce", 2, "gloo", smallest)[0],
            0.1,
            most=True,
        ),
        Bar("init of 4 ranks to first all-reduce after imports, s", start_seconds, 2, most=True),
        Bar("planning for 10,000 ranks, slowest collective, s", plan_seconds, 1, most=True),
    ]


def markdown(records: Sequence[Record], setting: Setting, reached: Sequence[Bar]) -> str:
    """The page: the machine, the bars, and a table for each operation and number of ranks."""
    versions = ", ".join(f"{name} {version}" for name, version in setting.versions.items())
    lines = [
        "# Host memory: figures",
        "",
        f"{setting.machine}, {setting.cores} cores, {setting.date}. {versions}.",
        "",
        "One run of `python benchmarks/host.py`; the libraries take turns in the same processes. Times are medians of the "
        "slowest rank in µs, float32, in place; p2p is one way of a ping-pong that sends back what it received. "
        "`~` marks figures of a busy machine.",
        "",
        *bar_table(reached),
    ]
    for op, ranks in dict.fromkeys((r.op, r.ranks) for r in records):
        rows = [r for r in records if (r.op, r.ranks) == (op, ranks)]
        lines += ["", f"## {op}, {ranks} ranks", "", *table(rows, PEERS)]
    return "\n".join([*lines, "", "![time and bandwidth over size](host.png)", ""])


def bar_table(reached: Sequence[Bar]) -> list[str]:
    """Markdown table of bars."""
    return [
        "| bar | bound | measured | |",
        "| --- | --- | --- | --- |",
        *(f"| {' | '.join(b.cells())} |" for b in reached),
    ]


def table(records: Sequence[Record], peers: Sequence[str], call: bool = False) -> list[str]:
    """Markdown table: one row per size, with each library's time and its ratio to xvcomm's; with `call` what a call costs."""
    of = {(r.library, r.size): r for r in records}
    heads = ["size", "xvcomm", "GB/s", *(["call"] * call), *(head for peer in peers for head in (peer, "times"))]
    lines = [f"| {' | '.join(heads)} |", "| --: " * len(heads) + "|"]
    for size in dict.fromkeys(r.size for r in records):
        ours = of["xvcomm", size]
        cells = [size_text(size), _time(ours), f"{ours.busbw:.2f}", *([f"{ours.call:.1f}"] * call)]
        for peer in peers:
            theirs = of.get((peer, size))
            cells += [_time(theirs), f"{theirs.time / ours.time:.2f}"] if theirs else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _time(record: Record) -> str:
    digits = 2 if record.time < 100 else 0
    return f"{record.time:,.{digits}f}{' ~' if record.noisy else ''}"


def main() -> int:
    """Measure, write the report and check the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("docs/figures"), help="folder for host.md, host.json, host.png"
    )
    parser.add_argument("--sizes", default=",".join(SIZES), help="sizes instead of the usual ones")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each case and library")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    sizes = arguments.sizes.split(",")
    two, setting = measure(2, sizes, arguments.seconds)
    four, _ = measure(4, sizes, arguments.seconds)
    records = two + four
    reached = bars(records, startup(4, 3), planning(10_000))
    (arguments.out / "host.md").write_text(markdown(records, setting, reached))
    plot(arguments.out / "host.png", records, setting)
    judged = [{**asdict(bar), "met": bar.met} for bar in reached]
    report = {**asdict(setting), "bars": judged, "records": [asdict(record) for record in records]}
    (arguments.out / "host.json").write_text(json.dumps(report, indent=1) + "\n")
    for bar in reached:
        print("{3:>8}: {0}: {2} ({1})".format(*bar.cells()))
    return 0 if all(bar.met for bar in reached) else 1


if __name__ == "__main__":
    sys.exit(main())
