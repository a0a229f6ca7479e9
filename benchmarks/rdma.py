"""Benchmarks of RDMA between two hosts with Soft-RoCE, beside perftest and TCP: messages, shares of NICs, cut links, start-up;
and of requests over the fake provider of verbs.

    python benchmarks/rdma.py --out docs/figures

The hosts are those of tests/shims/rxe: kernels of User-mode Linux, ordinary processes, so that this needs no root once they are
built. Soft-RoCE is software, and both kernels share this machine's cores: the figures tell what xvcomm adds to the device, not
what a network does. Without perftest (ib_write_bw, ib_send_lat and others) that comparison is left out, which is said.
Everything is measured in one run, in turns; each bar is a ratio in it. Writes rdma.md and rdma.json, and exits with code 1 if a
bar is not met. `--quick` only tests the program.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import verbs
from host import Bar, bar_table, table

from xvcomm.cli.bench.measure import Record
from xvcomm.cli.bench.report import Setting
from xvcomm.cli.doctor import cpu_model

ROOT = Path(__file__).resolve().parents[1]
RANK = Path(__file__).with_name("rdma_rank.py")
TOOLS = ("ib_write_bw", "ib_send_bw", "ib_write_lat", "ib_send_lat")
SIZES = {"messages": 1 << 20, "trips": 8}
PARTS = ("requests", "start", *SIZES, "rails", "own", "far")
NOISY_CORES, NOISY_TURNS = 0.1, 1.2
"""Other processes have used more cores than this; turns differ by more than this factor."""
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        rounds: turns of each library; `starts` of each start-up.
        messages: of 1 MiB in a turn.
        trips: there and back in a turn.
        phases: seconds before a link is cut, while it is cut, and after.
        requests: over the fake provider, of each length of a chain in a turn.
    """

    rounds: int = 5
    starts: int = 3
    messages: int = 100
    trips: int = 300
    phases: tuple[float, float, float] = (2, 4, 6)
    requests: int = verbs.REQUESTS


QUICK = Effort(rounds=1, starts=1, messages=10, trips=20, phases=(0.5, 1, 3), requests=10_000)


class Others:
    """CPU use of processes that do not descend from this one, in cores. Those that end count once their parents have seen it."""

    def __init__(self) -> None:
        self._begin = self._read()

    def cores(self) -> float:
        """Since the last call."""
        before, self._begin = self._begin, self._read()
        wall, used = (now - then for now, then in zip(self._begin, before, strict=True))
        return max(0.0, used) / max(wall, 1e-3)

    def _read(self) -> tuple[float, float]:
        """The time, and CPU seconds of the other processes with those of their children that have ended."""
        times: dict[int, float] = {}
        children: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
            number = int(stat.parent.name)
            times[number] = sum(map(int, fields[11:15])) / TICK
            children.setdefault(int(fields[1]), []).append(number)
        found = [os.getpid()]
        while found:
            number = found.pop()
            times.pop(number, None)
            found += children.get(number, [])
        return time.monotonic(), sum(times.values())


def run(effort: Effort, folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Start the hosts and measure.

    Returns:
        What the ranks have found, and for each part the cores that other processes used meanwhile.
    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        print(f"# not on this machine, and left out: {', '.join(missing)}", file=sys.stderr)
    shutil.copy("/proc/cpuinfo", folder / "cpuinfo")
    settings = json.dumps({**asdict(effort), "out": str(folder), "perftest": not missing})
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "rdma"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "tests" / "shims" / "rxe" / "run.py"), "--timeout", "600"]
    command += ["--writable", str(folder), "--", sys.executable, str(RANK), "all", settings]
    others, used, now = Others(), {}, None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            _, mark, name = line.rstrip().partition("host 0| # ")
            if mark:
                cores = others.cores()
                if now is not None:
                    used[now] = cores
                now = name
    if process.returncode or not (folder / "found.json").exists():
        sys.exit(f"error: nothing is measured; the hosts' exit code is {process.returncode}")
    return json.loads((folder / "found.json").read_text()), used


def records(found: dict[str, Any], used: dict[str, float], effort: Effort) -> list[Record]:
    """Of messages one way: the median of the slower rank's turns."""
    made = []
    for part, size in SIZES.items():
        turns = effort.messages if part == "messages" else effort.trips
        for library in found[part][0]:
            times = sorted(max(found[part], key=lambda one: statistics.median(one[library]))[library])
            time = statistics.median(times)
            made.append(Record(
                library=library, op="send" if part == "messages" else "p2p", ranks=2, dtype="uint8", in_place=False, size=size,
                count=size, iterations=turns * len(times), time=time, p10=times[0], p90=times[-1], least=times[0], call=time,
                waited=time, algbw=size / time / 1e3, busbw=size / time / 1e3, wrong=None, others=used[part],
                noisy=times[-1] > NOISY_TURNS * times[0] or used[part] > NOISY_CORES,
            ))  # fmt: skip
    return made


def bars(made: Sequence[Record], requests: Sequence[verbs.Row]) -> list[Bar]:
    """What perftest's figures bound, if there are some; and requests over the fake provider."""
    times = {record.library: record.time for record in made if record.op == "send"}
    trips = {record.library: record.time for record in made if record.op == "p2p"}
    what = "million requests/s of a thread over the fake provider, one a chain"
    reached = [Bar(what, requests[0].millions, 1)]
    for ours, whose, tool in (("xvcomm", "", "ib_write_bw"), ("xvcomm, one NIC", " over one NIC", "ib_send_bw -e")):
        if tool in times:
            what = f"messages of 1 MiB one way{whose}, part of {tool}'s speed"
            reached.append(Bar(what, times[tool] / times[ours], 0.9))
    if "ib_send_lat -e" in trips:
        what = "8 B one way, times ib_send_lat -e"
        reached.append(Bar(what, trips["xvcomm"] / trips["ib_send_lat -e"], 1.5, most=True))
    return reached


def figures(found: dict[str, Any], used: dict[str, float]) -> list[tuple[str, str]]:
    """The other figures as text."""

    def told(part: str, text: str) -> str:
        return text + " ~" * (used[part] > NOISY_CORES)

    rails = found["rails"][1]
    total = sum(map(sum, rails.values()))
    lines = [
        (f"part of the bytes over {local}, by rail", told("rails", ", ".join(f"{sent / total:.2f}" for sent in rails[local])))
        for local in rails
    ]  # fmt: skip
    for part, victim, whose in (("own", 1, "sender's"), ("far", 0, "receiver's")):
        cut = found[part]
        lines += [
            (f"the {whose} link is cut: longest wait for a message, s", told(part, f"{cut[0]['longest']:.2f}")),
            (f"the {whose} link is cut: mean wait, s", told(part, f"{cut[0]['mean']:.3f}")),
            ("from that link's return until all rails are up, s", told(part, f"{cut[victim]['up']:.2f}")),
        ]
    for scheme in ("rdma", "tcp"):
        # the rank that comes last waits for no other one
        turns = [
            min(pair, key=lambda one: one["first"])
            for pair in zip(*(one[scheme] for one in found["start"]), strict=True)
        ]
        name = {"rdma": "", "tcp": " over TCP"}[scheme]
        for key, what in (("init", "init"), ("first", "init and the first message"), ("up", "until all rails are up")):
            if key in turns[0]:
                text = f"{statistics.median(turn[key] for turn in turns):.2f}"
                lines.append((f"{what}{name}, s", told("start", text)))
    return lines


def markdown(
    found: dict[str, Any], used: dict[str, float], made: Sequence[Record], requests: Sequence[verbs.Row], setting: Setting,
    reached: Sequence[Bar],
) -> str:  # fmt: skip
    """The page: the machine, the bars, a table for each kind of message, the other figures, and requests."""
    versions = ", ".join(f"{name} {version}" for name, version in setting.versions.items())
    loads = " to ".join(f"{load:.1f}" for load in found["load"])
    lines = [
        "# RDMA between hosts: figures", "",
        f"{setting.machine}, {setting.cores} cores, {setting.date}, load {loads}, with the hosts' own; a rehearsal: two kernels "
        f"of User-mode Linux (Linux {found['kernel']}, a core each) with Soft-RoCE on two NICs stand for hosts. {versions}.", "",
        "One run of `python benchmarks/rdma.py`; the libraries take turns between the same two hosts. Times are medians over "
        "turns in µs; a message of 1 MiB is the mean of a turn, 8 B the median. perftest uses one NIC and one queue pair, xvcomm "
        "both NICs if nothing else is said; ib_write_bw and ib_write_lat poll, which keeps Soft-RoCE from the processor that "
        "both share; with -e, which these do not have, tools sleep until a completion comes. `~` marks figures during which "
        "other processes used more than a tenth of a core, or whose turns differ by more than a fifth.", "",
        *bar_table(reached),
    ]  # fmt: skip
    for op, title in (("send", "Messages one way"), ("p2p", "Half a round trip")):
        rows = [record for record in made if record.op == op]
        lines += ["", f"## {title}", "", *table(rows, [row.library for row in rows if row.library != "xvcomm"])]
    lines += ["", "| other figures | |", "| --- | --: |"]
    lines += [f"| {what} | {value} |" for what, value in figures(found, used)]
    busy = ", ".join(f"{name} {used[name]:.2f}" for name in PARTS)
    lines += ["", "## Requests of one thread over the fake provider", "", *verbs.table(requests), ""]
    lines += [
        "They write 8 bytes within memory. A slot takes two: the WRITE of its payload, and the SEND of its frame."
    ]
    return "\n".join([*lines, "", f"Cores that other processes used meanwhile: {busy}.", ""])


def perftest_version() -> dict[str, str]:
    """Of perftest, if it is here."""
    if shutil.which(TOOLS[0]) is None:
        return {}
    told = subprocess.run([TOOLS[0], "--version"], capture_output=True, text=True, check=False).stdout
    return {"perftest": told.rpartition(":")[2].strip()}


def main() -> int:
    """Measure, write the report and check the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="folder for the files")
    parser.add_argument("--quick", action="store_true", help="few and short measurements, whose bars are not judged")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    effort = QUICK if arguments.quick else Effort()
    load, others = os.getloadavg()[0], Others()
    requests = verbs.measure(effort.requests)
    alone = others.cores()
    with tempfile.TemporaryDirectory() as folder:
        found, used = run(effort, Path(folder))
    used["requests"] = alone
    found["load"] = [load, os.getloadavg()[0]]
    setting = Setting(**found.pop("setting"))
    setting = replace(
        setting, machine=f"{cpu_model()}, {platform.system()} {platform.release()}", cores=len(os.sched_getaffinity(0)),
        versions=setting.versions | perftest_version(),
    )  # fmt: skip
    made = records(found, used, effort)
    reached = bars(made, requests)
    judged = [{**asdict(bar), "met": bar.met} for bar in reached]
    report = {
        **asdict(setting), **found, "others": used, "bars": judged, "requests": list(map(asdict, requests)),
        "records": list(map(asdict, made)),
    }  # fmt: skip
    name = arguments.out / "rdma"
    name.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    name.with_suffix(".md").write_text(markdown(found, used, made, requests, setting, reached))
    for bar in reached:
        print("{3:>8}: {0}: {2} ({1})".format(*bar.cells()))
    return 0 if arguments.quick or all(bar.met for bar in reached) else 1


if __name__ == "__main__":
    sys.exit(main())
