"""Benchmarks between hosts: messages and all-reduce beside Gloo, OpenMPI, iperf3 and C; several links; faults; idle ranks.

    python benchmarks/hosts.py --out docs/figures

The hosts are network namespaces of this machine, so that this needs Linux, root and iproute2; the parts `loopback` and `cuda`, in
which labels stand for hosts, do not. `cuda`, of arrays on GPUs, is measured only if `--parts` names it. What is missing of Gloo
(torch), MPI (mpi4py, mpirun), C (gcc) and iperf3 is said and left out. Everything is measured in one run; each bar is a ratio in
it. Writes hosts.md, hosts.json and hosts.png, or hosts-gpu.* if `cuda` is among the parts, and exits with code 1 if a bar is not
met. `--quick` only tests the program.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpu import gpus
from host import Bar, bar_table, table

from xvcomm.cli.bench.command import mpirun, parse_size, run_ranks
from xvcomm.cli.bench.measure import PEERS, Record
from xvcomm.cli.bench.report import Setting, draw
from xvcomm.cli.doctor import size_text
from xvcomm.errors import BackendUnavailable, ResourceError
from xvcomm.testing.hosts import NAMES, Hosts

PARTS = ("loopback", "veth", "links", "alone", "failover", "cuda")
RANK = Path(__file__).with_name("hosts_rank.py")
PLACES = {"loopback": "Loopback", "cuda": "Loopback, arrays on GPUs", "veth": "Between two hosts, one link (veth)"}
CONGESTION = "reno"
"""TCP's congestion control over a link without a limit: like `cubic`, which most systems have, it leaves no pauses between
packets. With `bbr` messages of 1 and 4 MiB take up to three times as long, of every library, and differ from run to run."""
GPU_OPS = ("p2p", "send", "sendrecv", "all_reduce", "all_gather")
FROM_64K, FROM_1M, FROM_4M = 64 << 10, 1 << 20, 4 << 20


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        sizes: of messages and all-reduces; one way only those of 64 KiB and more.
        seconds: for each case and library, and of iperf3 before the measurements of a network and after them.
        rounds: turns of each library.
        patience: seconds to wait for an idle machine before each turn.
        links: numbers of links of 1 Gbit/s.
        links_size: size of the messages over them.
        phases: seconds before a link is cut, while it is cut, and after.
        idle: seconds of ranks that do nothing.
        lock: bytes, messages and rounds of messages beside a thread that computes.
    """

    sizes: tuple[str, ...] = ("8", "4K", "64K", "1M", "4M", "16M", "64M", "256M")
    seconds: float = 0.6
    rounds: int = 3
    patience: float = 0.1
    links: tuple[int, ...] = (1, 2, 4)
    links_size: str = "64M"
    phases: tuple[float, float, float] = (4, 4, 7)
    idle: float = 10
    lock: tuple[int, int, int] = (64 << 20, 4, 5)


QUICK = Effort(
    sizes=("8", "64K", "4M"), seconds=0.05, rounds=1, patience=0, links=(2,), links_size="4M", phases=(0.5, 1, 1.5), idle=0.5,
    lock=(4 << 20, 2, 1),
)  # fmt: skip


class Bench:
    """One run. The methods that `PARTS` names measure.

    Attributes:
        setting: where the last part was measured.
        records: of each place, and of several links.
        found: the other figures.
    """

    def __init__(self, effort: Effort, folder: Path, parts: Sequence[str]) -> None:
        self._effort, self._folder = effort, folder
        self.setting: Setting | None = None
        self.records: dict[str, list[Record]] = {}
        self.found: dict[str, Any] = {"iperf3": {}}
        self._there = {
            "gloo": importlib.util.find_spec("torch"), "mpi": importlib.util.find_spec("mpi4py") and mpirun_here(),
            "C": shutil.which("gcc"), "iperf3": shutil.which("iperf3"), "nccl-socket": "cuda" in parts and gpus() > 1,
        }  # fmt: skip
        missing = [
            name for name, there in self._there.items() if not there and (name != "nccl-socket" or "cuda" in parts)
        ]
        if missing:
            print(f"# not on this machine, and left out: {', '.join(missing)}", file=sys.stderr)
        if self._there["C"]:
            flags = ("-O3", "-shared", "-fPIC", "-o", str(folder / "bare.so"))
            subprocess.run(["gcc", *flags, str(RANK.with_name("bare.c"))], check=True)

    def loopback(self) -> None:
        """All operations on loopback."""
        self._transfers("loopback", None)

    def cuda(self) -> None:
        """The same with arrays on GPUs, or on one that both ranks use; with two, also beside NCCL's sockets."""
        self._transfers("cuda", None)

    def veth(self) -> None:
        """All operations between two hosts."""
        with Hosts(1, congestion=CONGESTION) as hosts:
            self._transfers("veth", hosts)

    def _transfers(self, place: str, hosts: Hosts | None) -> None:
        sizes = [parse_size(size) for size in self._effort.sizes]
        cases = [("p2p", sizes), ("send", [size for size in sizes if size >= FROM_64K]), ("all_reduce", sizes)]
        if place == "cuda":
            cases = [(op, sizes) for op in GPU_OPS]
        rates = self._iperf3(hosts)
        self.records[place] = self._measure(place, hosts, cases)
        rates += self._iperf3(hosts)
        if rates:
            self.found["iperf3"][place] = statistics.mean(rates)

    def links(self) -> None:
        """Messages one way over several links of 1 Gbit/s."""
        cases = [("send", [parse_size(self._effort.links_size)])]
        for count in self._effort.links:
            with Hosts(count, "1gbit") as hosts:
                self.records[gigabits(count)] = self._measure("links", hosts, cases, count)

    def _measure(self, place: str, hosts: Hosts | None, cases: Any, links: int = 1) -> list[Record]:
        """Start two ranks, on two hosts or on this one, and measure with all libraries."""
        networks = ",".join(f"10.77.{link}.0/24" for link in range(links)) if hosts else "127.0.0.0/8"
        device = "cuda" if place == "cuda" else "host"
        libraries = [
            name for name in ("gloo", "mpi", "nccl-socket") if self._there[name] and PEERS[name].serves(device)
        ]
        variables = [
            {
                "XVCOMM_HOST": name, "XVCOMM_ISLAND": name, "XVCOMM_DEVICE": device, "XVCOMM_NICS": networks if hosts else "lo",
                "GLOO_SOCKET_IFNAME": ",".join(hosts.interface(side, n) for n in range(links)) if hosts else "lo",
                "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": networks,
                **PEERS["nccl-socket"].environment,
            }
            for side, name in enumerate(NAMES)
        ]  # fmt: skip
        bare = [False, True] if self._there["C"] and device == "host" and place != "links" else []
        argv = self._rank(
            "transfers", variables=variables, libraries=["xvcomm", *libraries], cases=cases, bare=bare,
            address="10.77.0.1" if hosts else "127.0.0.1",
        )  # fmt: skip
        if hosts is None:
            code = run_ranks(argv, ("", ""), mpi="mpi" in libraries)
            if code:
                sys.exit(f"error: measuring on loopback ended with exit code {code}")
        elif "mpi" in libraries:
            agent = ("--mca", "plm_rsh_agent", hosts.agent(self._folder / "agent"), "--host", "a,b")
            ended(hosts.begin(0, *mpirun(2), *agent, *argv))
        else:
            ended(*hosts.start_ranks(*argv))
        return [Record(**record) for record in self._read("transfers")]

    def _rank(self, action: str, **settings: Any) -> tuple[str, ...]:
        """The command line of a rank."""
        settings = {**asdict(self._effort), "out": str(self._folder), **settings}
        return sys.executable, str(RANK), action, json.dumps(settings)

    def _iperf3(self, hosts: Hosts | None) -> list[float]:
        """10^9 bytes a second of one stream of iperf3, as its receiver counts them; none where it is not installed."""
        if not self._there["iperf3"]:
            return []
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        server = begin(hosts, 1, "iperf3", "-s", "-1", "-p", port, "--forceflush")
        assert server.stdout is not None
        while "listening" not in (line := server.stdout.readline()):
            if not line:
                ended(server)
        seconds = max(1, round(self._effort.seconds * 5))
        address = "10.77.0.2" if hosts else "127.0.0.1"
        text, _ = begin(hosts, 0, "iperf3", "-c", address, "-p", port, "-t", seconds, "-J").communicate(timeout=60)
        told = json.loads(text)
        if "error" in told:  # its exit code is 0, and the server still waits for its one client
            server.kill()
            sys.exit(f"error: iperf3: {told['error']}")
        ended(server)
        self.found["iperf3"]["version"] = told["start"]["version"].removeprefix("iperf ")
        return [told["end"]["sum_received"]["bits_per_second"] / 8e9]

    def alone(self) -> None:
        """Ranks that do nothing; messages beside a thread that computes."""
        with Hosts(1, congestion=CONGESTION) as hosts:
            ended(*hosts.start_ranks(*self._rank("idle,lock")))
        self.found |= {name: self._read(name) for name in ("idle", "lock")}

    def failover(self) -> None:
        """One of two links is cut while messages are under way, and comes back."""
        before, during, _ = self._effort.phases
        with Hosts(2, "1gbit") as hosts:
            ranks = hosts.start_ranks(*self._rank("cut"))
            assert ranks[0].stdout is not None
            if ranks[0].stdout.readline() != "begun\n":
                ended(*ranks)
            moments = []
            for state, wait in (("down", before), ("up", during)):
                time.sleep(wait)
                hosts.link(1, state)
                moments.append(time.monotonic())
            ended(*ranks)
        found = self._read("cut")
        self.found["failover"] = judged(found["times"], found["bytes"], *moments)

    def _read(self, action: str) -> Any:
        """What a rank has written of an action."""
        self.setting = Setting(**json.loads((self._folder / "setting.json").read_text()))
        return json.loads((self._folder / f"{action}.json").read_text())


def gigabits(links: int) -> str:
    """What several links are called."""
    return f"{links} x 1 Gbit/s"


def mpirun_here() -> bool:
    """Whether this machine has mpirun."""
    try:
        return bool(mpirun(2))
    except BackendUnavailable:
        return False


def begin(hosts: Hosts | None, side: int, *command: object) -> subprocess.Popen[str]:
    """Start a program on a host, or on this machine."""
    if hosts is not None:
        return hosts.begin(side, *command)
    return subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(*processes: subprocess.Popen[str]) -> None:
    """Wait for a good end of processes.

    Raises:
        SystemExit: one failed.
    """
    printed = [process.communicate(timeout=1200)[0] for process in processes]
    for process, text in zip(processes, printed, strict=True):
        if process.returncode:
            sys.exit(f"error: a process ended with exit code {process.returncode}:\n{text}")


def judged(times: Sequence[float], size: int, cut: float, back: float) -> dict[str, Any]:
    """What a cut did to messages of `size` bytes that arrived at these times.

    Returns:
        `stall`: longest seconds without a message from the cut on. `before`, `during`, `after`: 10^9 bytes a second, without the
        stall and `full`, the seconds from the link's return until half a second has 0.95 of the speed before, or until the end.
    """

    def rate(begin: float, end: float) -> float:
        return sum(begin < moment <= end for moment in times) * size / (end - begin) / 1e9

    stall, resumed = max((new - old, new) for old, new in pairwise(times) if new > cut)
    before, last = rate(times[0], cut), times[-1]
    full = next((t for t in times if back <= t <= last - 0.5 and rate(t, t + 0.5) >= 0.95 * before), last)
    return {
        "bytes": size, "stall": stall, "before": before, "during": rate(min(resumed, back - 0.1), back),
        "after": rate(full if full < last else back, last), "full": full - back,
    }  # fmt: skip


def ratios(records: Sequence[Record], peer: str, least: int, ops: Sequence[str]) -> list[float]:
    """The peer's time divided by xvcomm's, for each operation and size of at least `least` bytes that both have."""
    times = {(r.library, r.op, r.size): r.time for r in records}
    ours = {(op, size): t for (name, op, size), t in times.items() if name == "xvcomm" and size >= least and op in ops}
    return [times[peer, *case] / t for case, t in ours.items() if (peer, *case) in times]


def bars(bench: Bench) -> list[Bar]:
    """The bars of all parts that were measured; the worst of several sizes counts."""
    found: list[Bar] = []

    def bar(what: str, values: Sequence[float], bound: float, most: bool = False) -> None:
        if values:
            found.append(Bar(what, max(values) if most else min(values), bound, most))

    def sent(place: str, least: int) -> dict[int, float]:
        records = [r for r in bench.records.get(place, ()) if (r.library, r.op) == ("xvcomm", "send")]
        return {r.size: r.algbw for r in records if r.size >= least}

    records, figures = bench.records.get("veth", []), bench.found
    every = ("p2p", "send", "all_reduce")
    if "veth" in figures["iperf3"]:
        rate = figures["iperf3"]["veth"]
        bar("one way, 4 MiB and more, part of iperf3", [r / rate for r in sent("veth", FROM_4M).values()], 0.9)
    bar("one way, 4 MiB and more, part of C", ratios(records, "C", FROM_4M, ("send",)), 0.9)
    bar(
        "all-reduce, 64 KiB and more, part of C, polling", ratios(records, "C, polling", FROM_64K, ("all_reduce",)), 0.9
    )
    bar("messages and all-reduce, 64 KiB and more, times Gloo", ratios(records, "gloo", FROM_64K, every), 1.5)
    bar("messages and all-reduce, 64 KiB and more, times OpenMPI", ratios(records, "mpi", FROM_64K, every), 1.2)
    for name, peer, bound in (("Gloo", "gloo", 0.5), ("C", "C", 1.5)):
        shortest = [1 / r for r in ratios(records, peer, 0, ("p2p",))[:1]]
        bar(f"round trip of 8 B, part of {name}'s time", shortest, bound, most=True)
    one = sum(sent(gigabits(1), 0).values())
    for count in range(2, 9):
        bar(
            f"{count} links of 1 Gbit/s, times one",
            [s / one for s in sent(gigabits(count), 0).values() if one],
            0.95 * count,
        )
    fast, plain, on_gpus = sent("cuda", FROM_4M), sent("loopback", FROM_4M), bench.records.get("cuda", [])
    bar("GPU arrays, 1 MiB and more, times Gloo", ratios(on_gpus, "gloo", FROM_1M, GPU_OPS), 10)
    bar("GPU arrays, times NCCL's sockets", ratios(on_gpus, "nccl-socket", 0, GPU_OPS), 1)
    bar("GPU arrays, one way, part of host arrays", [fast[size] / plain[size] for size in fast if size in plain], 0.9)
    if cut := figures.get("failover"):
        bar("one of two links cut: longest wait for a message, s", [cut["stall"]], 1, most=True)
        bar("from the link's return to full speed, s", [cut["full"]], 5, most=True)
    if lock := figures.get("lock"):
        what = "messages beside a thread that holds the interpreter lock, times beside one without it"
        bar(what, [lock["held"] / lock["free"]], 1.15, most=True)
    return found


def markdown(bench: Bench, setting: Setting, reached: Sequence[Bar]) -> str:
    """The page: the machine, the bars, a table for each operation and place, and the other figures."""
    versions = ", ".join(f"{name} {version}" for name, version in setting.versions.items())
    iperf3, figures = bench.found["iperf3"], bench.found
    lines = [
        "# Between hosts: figures", "",
        f"{setting.gpus}{'; ' * bool(setting.gpus)}{setting.machine}, {setting.cores} cores, {setting.date}, load "
        f"{' to '.join(f'{load:.1f}' for load in figures['load'])}; a rehearsal: namespaces or labels of one machine "
        f"stand for hosts. {versions}{', iperf3 ' + iperf3['version'] if iperf3 else ''}.", "",
        "One run of `python benchmarks/hosts.py`; the libraries take turns in the same two processes. Times are medians of the "
        "slowest rank in µs, float32; p2p is one way of a ping-pong, send is one way again and again. `~` marks figures of a "
        f"busy machine. TCP's congestion control over the link without a limit (veth) is {CONGESTION}.", "",
        *bar_table(reached),
    ]  # fmt: skip
    for place, title in PLACES.items():
        records = bench.records.get(place, [])
        stream = f"; one stream of iperf3: {iperf3[place]:.2f} GB/s" if place in iperf3 else ""
        for op in dict.fromkeys(record.op for record in records):
            rows = [record for record in records if record.op == op]
            peers = [library for library in dict.fromkeys(r.library for r in rows) if library != "xvcomm"]
            lines += ["", f"## {title}, {op}{stream}", "", *table(rows, peers)]
    others = [
        (f"messages of {size_text(r.size)} over {place}, {r.library}, GB/s", f"{r.algbw:.3f}")
        for place, records in bench.records.items() if place not in PLACES for r in records
    ]  # fmt: skip
    if cut := figures.get("failover"):
        others += [(f"messages of {size_text(cut['bytes'])} over {gigabits(2)}, GB/s", f"{cut['before']:.3f}")]
        others += [("the same while one is cut", f"{cut['during']:.3f}"), ("when it is back", f"{cut['after']:.3f}")]
    if lock := figures.get("lock"):
        alone, free, held = (f"{lock['bytes'] / lock[name] / 1e9:.2f}" for name in ("alone", "free", "held"))
        others += [(f"messages of {size_text(lock['bytes'])}, GB/s", alone)]
        others += [(f"the same beside a thread of each rank that computes in C, on {setting.cores} cores", free)]
        others += [("the same beside a thread of each rank in Python code, which holds the interpreter lock", held)]
    if idle := figures.get("idle"):
        others += [(f"CPU seconds of an idle rank in {idle['seconds']:g} s", f"{max(idle['cpu']):.3f}")]
    if others:
        lines += ["", "| other figures | |", "| --- | --: |", *(f"| {what} | {value} |" for what, value in others)]
    return "\n".join([*lines, "", f"![time and bandwidth over size]({stem(bench)}.png)", ""])


def stem(bench: Bench) -> str:
    """Name of the files, without extension."""
    return "hosts-gpu" if "cuda" in bench.records else "hosts"


def write(out: Path, bench: Bench, setting: Setting) -> list[Bar]:
    """Judge the figures, and write the page, the records and the drawing; the bars."""
    reached = bars(bench)
    records = [{"place": place, **asdict(record)} for place, found in bench.records.items() for record in found]
    judged = [{**asdict(bar), "met": bar.met} for bar in reached]
    report = {**asdict(setting), **bench.found, "bars": judged, "records": records}
    name = out / stem(bench)
    name.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    name.with_suffix(".md").write_text(markdown(bench, setting, reached))
    rows: dict[str, list[Record]] = {}
    for place in bench.records.keys() & PLACES.keys():
        for record in bench.records[place]:
            rows.setdefault(f"{record.op}, {PLACES[place]}", []).append(record)
    draw(name.with_suffix(".png"), rows, setting)
    return reached


def main() -> int:
    """Measure, write the report and check the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="folder for the files")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:-1], help="all but cuda if left out")
    parser.add_argument("--sizes", help="separated by commas, instead of 8 to 256M")
    parser.add_argument("--seconds", type=float, help="for each case and library, instead of 0.6")
    parser.add_argument("--quick", action="store_true", help="few and short measurements, whose bars are not judged")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the hosts are removed
    effort = QUICK if arguments.quick else Effort()
    if arguments.sizes:
        effort = replace(effort, sizes=tuple(arguments.sizes.split(",")))
    if arguments.seconds:
        effort = replace(effort, seconds=arguments.seconds)
    load = [os.getloadavg()[0]]
    try:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(effort, Path(folder), arguments.parts)
            for part in arguments.parts:
                print(f"# {part}", file=sys.stderr, flush=True)
                getattr(bench, part)()
    except ResourceError as error:
        sys.exit(f"error: {error}")
    assert bench.setting is not None
    bench.found["load"] = [*load, os.getloadavg()[0]]
    reached = write(arguments.out, bench, bench.setting)
    for bar in reached:
        print("{3:>8}: {0}: {2} ({1})".format(*bar.cells()))
    return 0 if arguments.quick or all(bar.met for bar in reached) else 1


if __name__ == "__main__":
    sys.exit(main())
