"""Benchmarks of the PyTorch backend beside the one that it replaces: Gloo on host memory, NCCL on GPUs.

    python benchmarks/torch_backend.py --out docs/figures

All operations go through `torch.distributed`, on groups of both backends in the same processes, which alternate.
Writes torch-cpu.md or torch-cuda.md and the corresponding .json; exits with code 1 if a bar is not met. `--islands a:1,b:1`
labels the ranks as islands: a rehearsal, which the records state.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from host import Bar

from xvcomm.cli.doctor import size_text
from xvcomm.cli.run import launch
from xvcomm.types.topology import parse_islands

SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
TURNS = 15
SMALL = 8
PEERS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One operation of one size with one backend: medians over the turns, of the slowest rank.

    Attributes:
        time: microseconds from call to result.
        call: microseconds until the call returned to the host; the same as `time` on host memory.
        rehearsal: whether the islands were only labels.
    """

    backend: str
    op: str
    device: str
    ranks: int
    size: int
    time: float
    call: float
    rehearsal: bool


def operations(group: Any, rank: int, ranks: int) -> dict[str, Callable[[torch.Tensor], None]]:
    """The measured operations by name."""

    def round_trip(x: torch.Tensor) -> None:
        for sender in (0, 1):
            if rank == sender:
                dist.send(x, 1 - rank, group=group)
            elif rank == 1 - sender:
                dist.recv(x, 1 - rank, group=group)

    found: dict[str, Callable[[torch.Tensor], None]] = {
        "all_reduce": lambda x: dist.all_reduce(x, group=group),
        "all_reduce, async": lambda x: dist.all_reduce(x, group=group, async_op=True).wait(),
    }
    return found | ({"send and recv, both ways": round_trip} if ranks == 2 else {})


def turn(operation: Callable[[torch.Tensor], None], x: torch.Tensor, count: int) -> tuple[float, float]:
    """Microseconds per operation: until its result, and until the call returned."""
    begin = time.perf_counter()
    for _ in range(count):
        operation(x)
    called = time.perf_counter()
    if x.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count * 1e6, (called - begin) / count * 1e6


def rank_main(device: str, folder: str) -> None:
    """Main function of each rank; rank 0 writes the results into `folder`."""
    warnings.simplefilter("ignore")
    peer, rank, ranks = PEERS[device], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(peer)
    groups = {"xvcomm": dist.new_group(backend="xvcomm"), peer: dist.group.WORLD}
    table = {name: operations(group, rank, ranks) for name, group in groups.items()}
    figures = []
    for op in table[peer]:
        for size in SIZES:
            x = torch.zeros(size // 4, device=device)
            count = max(3, min(200, (8 << 20) // size))
            taken: dict[str, list[tuple[float, float]]] = {name: [] for name in groups}
            for number in range(TURNS + 1):
                for name in groups:
                    dist.barrier()
                    measured = turn(table[name][op], x, count)
                    if number:  # the first turn warms up
                        taken[name].append(measured)
            for name, turns in taken.items():
                mine = [statistics.median(column) for column in zip(*turns, strict=True)]
                everybody: list[Any] = [None] * ranks
                dist.all_gather_object(everybody, mine)
                slowest = [max(column) for column in zip(*everybody, strict=True)]
                rehearsal = bool(os.environ.get("XVCOMM_ISLAND"))
                figures.append(Figure(name, op, device, ranks, size, *slowest, rehearsal))
    if rank == 0:
        Path(folder, "figures.json").write_text(json.dumps([asdict(f) for f in figures]))
    dist.destroy_process_group()


def measure(device: str, labels: Sequence[str]) -> list[Figure]:
    """Measure in one job with one rank per label."""
    with tempfile.TemporaryDirectory() as folder:
        code = launch((sys.executable, __file__, "--rank", device, folder), tuple(labels), extra={"XVCOMM_DEVICE": ""})
        if code:
            sys.exit(f"measuring with {len(labels)} ranks failed (exit code {code})")
        return [Figure(**one) for one in json.loads(Path(folder, "figures.json").read_text())]


def ratio(figures: Sequence[Figure], ranks: int, op: str, size: int, part: str) -> float:
    """xvcomm's time divided by the peer's."""
    of = {f.backend: getattr(f, part) for f in figures if (f.ranks, f.op, f.size) == (ranks, op, size)}
    (peer,) = (name for name in of if name != "xvcomm")
    return float(of["xvcomm"] / of[peer])


def bars(figures: Sequence[Figure], device: str) -> list[Bar]:
    """All bars with the measured values."""
    if device == "cuda":
        ranks = figures[0].ranks
        return [
            Bar(
                "8 B all_reduce, GPUs: the call, part of torch's NCCL",
                ratio(figures, ranks, "all_reduce", SMALL, "call"),
                1,
                most=True,
            )
        ]
    return [
        Bar(
            "8 B all_reduce, 1 rank, part of Gloo's time", ratio(figures, 1, "all_reduce", SMALL, "time"), 2, most=True
        ),
        Bar(
            "8 B all_reduce, 2 ranks, part of Gloo's time",
            ratio(figures, 2, "all_reduce", SMALL, "time"),
            0.3,
            most=True,
        ),
    ]


def markdown(figures: Sequence[Figure], reached: Sequence[Bar], device: str) -> str:
    """The page."""
    peer = PEERS[device]
    machine = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    lines = [
        f"# The PyTorch backend beside {peer}: figures",
        "",
        f"{machine}, {os.cpu_count()} cores, {datetime.now(UTC):%Y-%m-%d}. torch {torch.__version__}. "
        f"Medians of {TURNS} turns, µs, the slowest rank{'; islands by label: a rehearsal' if figures[0].rehearsal else ''}.",
        "",
        "| bar | bound | measured | |",
        "| --- | --- | --- | --- |",
        *(f"| {' | '.join(bar.cells())} |" for bar in reached),
    ]
    for ranks, op in dict.fromkeys((f.ranks, f.op) for f in figures):
        lines += ["", f"## {op}, {ranks} rank{'s' * (ranks > 1)}", ""]
        lines += [f"| size | xvcomm | its call | {peer} | its call | time, part of {peer}'s |", "| --: " * 6 + "|"]
        for size in SIZES:
            of = {f.backend: f for f in figures if (f.ranks, f.op, f.size) == (ranks, op, size)}
            ours, theirs = of["xvcomm"], of[peer]
            lines.append(
                f"| {size_text(size)} | {ours.time:.1f} | {ours.call:.1f} | {theirs.time:.1f} | {theirs.call:.1f} | "
                f"{ours.time / theirs.time:.2f} |"
            )
    return "\n".join([*lines, ""])


def main() -> int:
    """Measure, write the report and check the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="folder for the page and its figures")
    parser.add_argument("--device", choices=list(PEERS), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--islands", help="labels of the ranks, for instance cuda:1,rocm:1")
    parser.add_argument("--rank", nargs=2, metavar=("DEVICE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(*arguments.rank)
        return 0
    device = arguments.device
    labels = parse_islands(arguments.islands) if arguments.islands else None
    jobs = [labels or [""] * torch.cuda.device_count()] if device == "cuda" else [[""], labels or ["", ""]]
    figures = [figure for job in jobs for figure in measure(device, job)]
    reached = bars(figures, device)
    name = f"torch-{device}{'-border' * bool(labels)}"
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{name}.md").write_text(markdown(figures, reached, device))
    report = {"bars": [{**asdict(b), "met": b.met} for b in reached], "figures": [asdict(f) for f in figures]}
    (arguments.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    for bar in reached:
        print("{3:>8}: {0}: {2} ({1})".format(*bar.cells()))
    return 0 if all(bar.met for bar in reached) else 1


if __name__ == "__main__":
    sys.exit(main())
