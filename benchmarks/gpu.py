"""GPU benchmarks: transfers between islands beside NCCL, Gloo and raw copies; an island beside NCCL; mixed collectives.

    python benchmarks/gpu.py --out docs/figures

measures on all GPUs of this host: with two GPUs, transfers and collectives between two islands of one rank; with four or
more, collectives over two islands; with any number, collectives of one island.
Everything is measured in one run; each bar is a ratio within it. Writes gpuN.md, gpuN.json and gpuN.png for N ranks after
each scenario, and exits with code 1 if a bar is not met. On NVIDIA GPUs only, this is a rehearsal: the second half
of the ranks uses the ROCm backend over libraries that forward to CUDA (`tests/shims/hip_on_cuda`), or, with --labels-only,
the CUDA backend under another label. `--device host` runs the same on host memory, to test the program itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from host import Bar, bar_table, table

from xvcomm.cli.bench.command import parse_size, start
from xvcomm.cli.bench.measure import PEERS, Record
from xvcomm.cli.bench.options import Options
from xvcomm.cli.bench.report import Setting, draw, read_json
from xvcomm.cli.doctor import size_text

ROOT = Path(__file__).resolve().parent.parent
SIZES = ("8", "4K", "64K", "1M", "16M", "64M", "256M", "1G")
KIB, MIB = 1 << 10, 1 << 20
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
START_SECONDS = 25.0
ALIKE = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One job and what is measured in it.

    Attributes:
        name: identifier in the records.
        title: readable title.
        islands: one island label per rank; empty labels put all ranks in one island.
        ops, peers: as in `xvcomm bench`.
        sizes: the subset of the run's sizes that is used.
        share: fraction of the time for all scenarios.
        environment: additional environment variables of its ranks.
    """

    name: str
    title: str
    islands: tuple[str, ...]
    ops: tuple[str, ...]
    peers: tuple[str, ...]
    sizes: tuple[int, ...]
    share: float
    environment: Mapping[str, str] = field(default_factory=dict)


def scenarios(ranks: int, kind: str, sizes: Sequence[int]) -> list[Scenario]:
    """Scenarios for this number of ranks and kind of device."""
    inside, every = (*ALIKE, "reduce", "all_to_all"), tuple(sizes)
    whole = ("",) * ranks
    island = Scenario("island", "Inside an island", whole, inside, peers(kind, "nccl", "nccl-cupy"), every, 0.25)
    halves = ("cuda",) * (ranks // 2) + ("rocm",) * (ranks - ranks // 2)
    first, *others = (pair if ranks == 2 else mixed)(halves, kind, every)
    return [first, island, *others]


def pair(halves: tuple[str, ...], kind: str, sizes: tuple[int, ...]) -> list[Scenario]:
    """Between two islands of one rank."""
    few = tuple(s for s in sizes if s <= 4 * KIB or s in (64 * MIB, 256 * MIB))
    messages, collectives = ("send", "sendrecv", "p2p"), (*ALIKE, "all_to_all")
    all_peers, beside = peers(kind, "nccl", "nccl-shm", "gloo", "raw"), peers(kind, "nccl", "raw")
    title, shm = "Across the border", peers(kind, "nccl-shm")
    return [
        Scenario("border", title, halves, messages, all_peers, sizes, 0.45),
        Scenario("border-collectives", "Collectives across the border", halves, collectives, shm, sizes, 0.2),
        Scenario("border-one-queue", f"{title}, one hardware queue", halves, messages, beside, few, 0.1, ONE_QUEUE),
    ]


def mixed(halves: tuple[str, ...], kind: str, sizes: tuple[int, ...]) -> list[Scenario]:
    """Over two islands of several ranks."""
    large = tuple(s for s in sizes if s >= 16 * MIB) or sizes[-1:]
    # Gloo takes a hundred times as long: one size shows how it stands, and does not cost the others' time.
    one = tuple(s for s in large if s == 64 * MIB) or large[:1]
    sums, others = ("all_reduce",), ("all_gather", "reduce_scatter", "broadcast", "all_to_all")
    all_peers, beside = peers(kind, "nccl", "nccl-shm", "gloo", "raw"), peers(kind, "nccl", "nccl-shm", "raw")
    shm, gloo = peers(kind, "nccl-shm"), peers(kind, "gloo")
    shape = f"{halves.count('cuda')}+{halves.count('rocm')}"
    title, rest = f"All-reduce over {shape}", f"Other collectives over {shape}"
    return [
        Scenario("mixed", title, halves, sums, all_peers, sizes, 0.35),
        Scenario("mixed-one-queue", f"{title}, one hardware queue", halves, sums, shm, large, 0.1, ONE_QUEUE),
        Scenario("mixed-others", rest, halves, others, beside, large, 0.25),
        Scenario("mixed-others-gloo", f"{rest}, beside Gloo", halves, others, gloo, one, 0.1),
    ]


def peers(kind: str, *names: str) -> tuple[str, ...]:
    """Those peers that serve a kind of device."""
    return tuple(name for name in names if PEERS[name].serves(kind))


def measure(scenario: Scenario, devices: tuple[str, ...], seconds: float) -> tuple[int, list[Record], Setting | None]:
    """Run a scenario for about this many seconds, excluding process start.

    Returns:
        The exit code, what was measured until the end or a failure, and where, if anything was.
    """
    cases = len(scenario.ops) * len(scenario.sizes) * (1 + len(scenario.peers))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.json"
        options = Options(
            ops=scenario.ops,
            sizes=scenario.sizes,
            dtypes=("float32",),
            peers=scenario.peers,
            in_place=True,
            seconds=min(0.5, max(0.02, seconds / cases / 2)),
            iterations=None,
            warmup=5,
            patience=0.0,
            labels=scenario.islands,
            json=str(file),
            plot=None,
            devices=devices,
            budget=seconds,
        )
        processes = 1 + len(options.separate())
        print(f"# {scenario.name}: {scenario.title}", flush=True)
        with environment(scenario.environment), ended_after(seconds * 1.3 + processes * 2 * START_SECONDS):
            code = start(options)
        kept = json.loads(file.read_text()) if file.exists() else []
        if code:
            print(f"# {scenario.name} failed (exit code {code}) after {len(kept)} figures", flush=True)
        if not kept:
            return code, [], None
        return code, read_json(file), Setting(**{f.name: kept[0][f.name] for f in fields(Setting)})


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the ranks that are started in the block."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Terminate a job that exceeds `seconds`, so that a hanging job does not prevent the other measurements."""
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def ratios(records: Sequence[Record], op: str, peer: str, least: int, most: float = float("inf")) -> list[float]:
    """The peer's time divided by xvcomm's, for each size from `least` to `most` that both have."""
    times = {(r.library, r.size): r.time for r in records if r.op == op}
    ours = {size: t for (name, size), t in times.items() if name == "xvcomm" and least <= size <= most}
    return [times[peer, size] / t for size, t in ours.items() if (peer, size) in times]


def bars(scenario: Scenario, records: Sequence[Record]) -> list[Bar]:
    """The bars that a scenario's records decide; the worst of several sizes and operations counts."""
    found = []
    suffix = ", one queue" if scenario.environment else ""

    def bar(what: str, values: Sequence[float], bound: float, most: bool = False) -> None:
        if values:
            found.append(Bar(what + suffix, max(values) if most else min(values), bound, most))

    if scenario.name.startswith("border"):
        large = 64 * MIB
        bar("one way, 64 MiB and more, part of raw copies", ratios(records, "send", "raw", large), 0.95)
        bar("both ways, 64 MiB and more, part of raw copies", ratios(records, "sendrecv", "raw", large), 0.85)
        bar("one way, 64 MiB and more, times NCCL without P2P", ratios(records, "send", "nccl-shm", large), 1.35)
        bar("one way, 64 MiB and more, times Gloo", ratios(records, "send", "gloo", large), 12)
        shorter = [1 / r for r in ratios(records, "p2p", "nccl", 0, 4 * KIB)]
        bar("round trip, up to 4 KiB, part of NCCL's", shorter, 0.5, most=True)
    elif scenario.name == "island":
        same = [r for op in scenario.ops for r in ratios(records, op, "nccl-cupy", 16 * MIB)]
        bar("collectives of an island, 16 MiB and more, part of NCCL", same, 0.99)
        calls = {(r.library, r.op): r.call for r in records if r.size == scenario.sizes[0]}
        more = [calls["xvcomm", op] - calls[name, op] for name, op in calls if name == "nccl-cupy"]
        bar("call of a small collective, µs more than NCCL's binding", more, 5, most=True)
    elif "all_reduce" in scenario.ops:
        shape = f"all-reduce of 256 MiB, {len(scenario.islands)} ranks, times "
        bound = 3.3 if scenario.environment else 4  # one hardware queue overlaps less
        bar(shape + "NCCL without P2P", ratios(records, "all_reduce", "nccl-shm", 256 * MIB, 256 * MIB), bound)
        bar(shape + "Gloo", ratios(records, "all_reduce", "gloo", 256 * MIB, 256 * MIB), 40)
        short = [1 / r for r in ratios(records, "all_reduce", "nccl-shm", 0, MIB)]
        bar("all-reduce of up to 1 MiB, part of the time of NCCL without P2P", short, 1, most=True)
    elif scenario.name == "mixed-others":
        for op in scenario.ops:
            bar(f"{op} of 16 MiB and more, times NCCL without P2P", ratios(records, op, "nccl-shm", 16 * MIB), 2)
            bar(f"{op} of 64 MiB and more, part of raw copies", ratios(records, op, "raw", 64 * MIB), 0.85)
    return found


class Report:
    """What has been measured so far; files are rewritten after each scenario.

    Args:
        stem: path of the files without extension.
        command: what made it.
    """

    def __init__(self, stem: Path, command: str) -> None:
        self._stem, self._command = stem, command
        self._parts: list[tuple[Scenario, list[Record], Setting]] = []
        self.bars: list[Bar] = []

    def add(self, scenario: Scenario, records: list[Record], setting: Setting) -> None:
        """Add a scenario's records and write the files."""
        self._parts.append((scenario, records, setting))
        self.bars += bars(scenario, records)
        every = [
            {"scenario": one.name, **asdict(record), **asdict(where)}
            for one, found, where in self._parts
            for record in found
        ]
        judged = [{**asdict(bar), "met": bar.met} for bar in self.bars]
        self._stem.with_suffix(".json").write_text(json.dumps({"bars": judged, "records": every}, indent=1) + "\n")
        self._stem.with_suffix(".md").write_text(self.markdown())
        rows = {f"{one.title}: {op}": _of(found, op) for one, found, _ in self._parts for op in one.ops}
        draw(self._stem.with_suffix(".png"), rows, self._parts[0][2])

    def markdown(self) -> str:
        """The page: the machine, the bars, and a table for each scenario and operation."""
        first = self._parts[0][2]
        versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
        where = f"{first.gpus}; {first.machine}" if first.gpus else first.machine
        rehearsal = "; a rehearsal: islands by label" if first.rehearsal else ""
        if any(device.startswith("rocm NVIDIA") for device in first.devices):
            rehearsal += ", ROCm's libraries forwarded to CUDA"
        lines = [
            f"# {len(first.devices)} GPUs: figures" if first.gpus else "# Host memory, as GPUs are measured: figures",
            "",
            f"{where}, {first.cores} cores, {first.date}{rehearsal}. {versions}.",
            "",
            f"One run of `{self._command}`. Operations are enqueued in bursts that are waited for once; times are "
            "medians of the slowest rank in µs, float32, in place; p2p is one way of a ping-pong. `~` marks figures of "
            "which a tenth of the bursts took a fifth longer than another tenth, or taken while other processes were busy.",
            "",
            *bar_table(self.bars),
        ]
        for scenario, records, setting in self._parts:
            islands = ", ".join(setting.islands)
            queues = f"; CUDA_DEVICE_MAX_CONNECTIONS={setting.connections}" if setting.connections else ""
            lines += ["", f"## {scenario.title}", "", f"Ranks: {islands}; on {', '.join(setting.devices)}{queues}."]
            for op in dict.fromkeys(r.op for r in records):
                lines += ["", f"### {op}", "", *table(_of(records, op), scenario.peers, call=True)]
        return "\n".join([*lines, "", f"![time and bandwidth over size]({self._stem.name}.png)", ""])

    def compact(self) -> str:
        """A short summary: bandwidths, or times for small sizes."""
        lines = []
        for scenario, records, _ in self._parts:
            names = ("xvcomm", *scenario.peers)
            lines.append(f"{scenario.title}: µs up to 64 KiB, else busbw in GB/s; call: µs of the host")
            lines.append(f"{'':>15} {'':>8}" + "".join(f"{name:>11}" for name in names) + f"{'call':>8}")
            for op in scenario.ops:
                of = {(r.library, r.size): r for r in _of(records, op)}
                for size in dict.fromkeys(size for _, size in of):
                    cells = "".join(f"{_figure(of.get((name, size))):>11}" for name in names)
                    lines.append(f"{op:>15} {size_text(size):>8}{cells}{of['xvcomm', size].call:>8.1f}")
        width = max((len(bar.what) for bar in self.bars), default=0)
        lines += ["{3:>8}  {0:<{w}} {2:>8} ({1})".format(*bar.cells(), w=width) for bar in self.bars]
        return "\n".join(lines)


def _of(records: Sequence[Record], op: str) -> list[Record]:
    return [r for r in records if r.op == op]


def _figure(record: Record | None) -> str:
    if record is None:
        return "-"
    value = f"{record.time:,.1f}" if record.size <= 64 * KIB else f"{record.busbw:.1f}"
    return f"{value}{'~' if record.noisy else ' '}"


def gpus() -> int:
    """Number of GPUs that torch sees, determined in a separate process so that this one does not initialise CUDA."""
    script = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)


def forwarding(folder: str) -> dict[str, str]:
    """Environment of ranks whose ROCm libraries forward to CUDA; builds those libraries in `folder`."""
    script = ROOT / "tests" / "shims" / "hip_on_cuda" / "build.py"
    done = subprocess.run([sys.executable, str(script), folder], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr}\ncannot build {script.parent}; --labels-only does without")
    return dict(line.removeprefix("export ").split("=", 1) for line in done.stdout.splitlines())


def main() -> int:
    """Measure, write the report and check the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="folder for the files")
    parser.add_argument("--ranks", type=int, help="instead of all GPUs; with 2 the border alone, else collectives")
    parser.add_argument("--device", choices=("gpu", "host"), default="gpu", help="what the ranks have")
    parser.add_argument("--labels-only", action="store_true", help="the CUDA backend for the ranks labelled rocm too")
    parser.add_argument("--sizes", default=",".join(SIZES), help="sizes instead of the usual ones")
    parser.add_argument("--budget", type=float, default=220.0, help="seconds to measure, in all")
    parser.add_argument("--only", default="", help="names of scenarios, separated by commas")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    ranks = arguments.ranks or (gpus() if arguments.device == "gpu" else 2)
    if ranks < 2:
        sys.exit(f"{ranks} GPUs: two are needed")
    kind = "host" if arguments.device == "host" else "cuda"
    chosen = scenarios(ranks, kind, [parse_size(text) for text in arguments.sizes.split(",")])
    if arguments.only:
        chosen = [one for one in chosen if one.name in arguments.only.split(",")]
    only = f" --only {arguments.only} --budget {arguments.budget:g}" if arguments.only else ""
    report = Report(arguments.out / f"gpu{ranks}", f"python benchmarks/gpu.py{only}")
    failed, begin = False, time.monotonic()
    os.environ.setdefault("XVCOMM_TIMEOUT", "60")
    with tempfile.TemporaryDirectory() as folder:
        forwarded = kind == "cuda" and not arguments.labels_only
        with environment(forwarding(folder) if forwarded else {}):
            for one in chosen:
                devices = tuple((label or kind) if forwarded else kind for label in one.islands)
                seconds = arguments.budget * one.share / sum(c.share for c in chosen)
                code, records, setting = measure(one, devices, seconds)
                failed |= code != 0
                if setting is not None:
                    report.add(one, records, setting)
    print(f"\n# {time.monotonic() - begin:.0f} s\n{report.compact()}", flush=True)
    return 1 if failed or not all(bar.met for bar in report.bars) else 0


if __name__ == "__main__":
    sys.exit(main())
