"""Benchmark of losses: how soon ranks notice one, how long they take to go on without it, and to say who never called.

    python benchmarks/faults.py --out docs/figures

Four ranks on two hosts, which are network namespaces of this machine with two links: that needs Linux, root and iproute2. Each
case starts its ranks anew, several times; of a run the slowest rank counts, and of the runs the slowest one is judged. Writes
faults.md and faults.json, and exits with code 1 if a bar is not met. `--quick` only tests the program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from host import Bar, bar_table

from xvcomm.cli.bench.report import Setting
from xvcomm.errors import ResourceError
from xvcomm.testing.hosts import Hosts

RANK = Path(__file__).with_name("faults_rank.py")
SIDES = (0, 1, 0, 1)
RUNS = 3
PEER_TIMEOUT = 2.0
"""`XVCOMM_PEER_TIMEOUT` where a host goes; else its default."""
PAUSE = 0.3
"""Seconds from the first operation to a fault, and from the first loss to the second one."""
PATIENCE = 2.0
"""Seconds for an operation that one rank never calls."""
ENDED = 60.0
SHRINK_MOST, VERDICT_MOST = 3.0, 2.0


@dataclass(frozen=True, slots=True)
class Loss:
    """Ranks are lost, and the others shrink. Rank 0 serves the job's store.

    Attributes:
        what: happens, in words.
        killed: these ranks, at once; if there are none, the links between the hosts are cut.
        late: a rank that dies while the others shrink.
    """

    what: str
    killed: tuple[int, ...]
    late: int | None = None

    def run(self, hosts: Hosts) -> tuple[Setting, dict[str, float]]:
        """Seconds until all have noticed the loss; of `shrink`, after the second loss if there is one; until all go on."""
        waits = 0.0 if self.killed else PEER_TIMEOUT
        env = {} if self.killed else {"XVCOMM_PEER_TIMEOUT": str(PEER_TIMEOUT)}
        job = Job(hosts, "survive", env, late=self.late, seconds=PAUSE)
        time.sleep(PAUSE)
        at = time.monotonic()
        if self.killed:
            job.signal(signal.SIGKILL, *self.killed)
        else:
            for link in range(2):
                hosts.link(link, "down")
        told, died = job.end(*self.killed, *(() if self.late is None else (self.late,)))
        for rank in told.values():
            left = {r for r in range(4) if r in told and (self.killed or SIDES[r] == SIDES[rank["ranks"][0]])}
            assert set(rank["ranks"]) == left, told
        ended = max(rank["shrunk"] for rank in told.values())
        shrink = ended - died if died else max(rank["shrunk"] - rank["lost"] for rank in told.values())
        lost = max(rank["lost"] for rank in told.values())
        return job.setting, {"notice": lost - at - waits, "shrink": shrink, "all": ended - at - waits}


@dataclass(frozen=True, slots=True)
class Hang:
    """The last rank never calls what the others do.

    Attributes:
        what: happens, in words.
        stopped: whether its process is stopped (SIGSTOP); else it does something else.
    """

    what: str
    stopped: bool

    def run(self, hosts: Hosts) -> tuple[Setting, dict[str, float]]:
        """Seconds from the first deadline until all others have printed the error, which names the rank."""
        job = Job(hosts, "hang", {}, late=3, seconds=PATIENCE)
        if self.stopped:
            job.signal(signal.SIGSTOP, 3)
        told, _ = job.end(3)
        assert all(rank["named"] for rank in told.values()), told
        first = min(rank["deadline"] for rank in told.values())
        return job.setting, {"verdict": max(rank["printed"] for rank in told.values()) - first}


CASES = (
    Loss("a rank is killed", (3,)),
    Loss("a rank is killed, and another one while the others shrink", (3,), late=1),
    Loss("the rank that serves the store is killed", (0,)),
    Loss("a rank is killed, and the one that serves the store while the others shrink", (3,), late=0),
    Loss("both ranks of a host are killed", (1, 3)),
    Loss("both links between the hosts are cut", ()),
    Hang("a rank never calls, and does something else", stopped=False),
    Hang("a rank never calls, because it is stopped", stopped=True),
)
QUICK = CASES[1], CASES[5], CASES[7]


class Job:
    """Four ranks of `faults_rank.py`, which have begun."""

    def __init__(self, hosts: Hosts, case: str, env: dict[str, str], **settings: Any) -> None:
        command = sys.executable, RANK, case, json.dumps(settings)
        self._ranks = hosts.start_ranks(*command, sides=SIDES, env=env)
        for number in range(len(self._ranks)):
            self.setting = Setting(**self._read(number, "setting")["setting"])
        for number in range(len(self._ranks)):
            self._read(number, "begun")

    def _read(self, number: int, *keys: str) -> dict[str, Any]:
        """The next figures of a rank with one of these keys."""
        output, read = self._ranks[number].stdout, ""
        assert output is not None
        while line := output.readline():
            read += line
            if line.startswith(tuple(f'{{"{key}"' for key in keys)):
                found: dict[str, Any] = json.loads(line)
                return found
        sys.exit(f"error: rank {number} ended with {self._ranks[number].wait(ENDED)}:\n{read}")

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to ranks."""
        for rank in ranks:
            self._ranks[rank].send_signal(number)

    def end(self, *victims: int) -> tuple[dict[int, dict[str, Any]], float]:
        """The figures of all ranks but the victims, which are killed afterwards; and when one of these died by itself, or 0."""
        told = {r: self._read(r, "lost", "deadline") for r in range(len(self._ranks)) if r not in victims}
        self.signal(signal.SIGKILL, *victims)
        died = 0.0
        for number, rank in enumerate(self._ranks):
            text, _ = rank.communicate(timeout=ENDED)
            if number not in victims and rank.returncode:
                sys.exit(f"error: rank {number} ended with {rank.returncode}:\n{text}")
            for line in text.splitlines():
                with contextlib.suppress(ValueError, KeyError):
                    died = json.loads(line)["died"]
        return told, died


def bars(found: dict[str, dict[str, list[float]]]) -> list[Bar]:
    """What is judged: the slowest run of each case."""
    reached = []
    for what, figures in found.items():
        if "shrink" in figures:
            reached.append(Bar(f"shrink, s: {what}", max(figures["shrink"]), SHRINK_MOST, most=True))
        else:
            reached.append(
                Bar(f"error printed after the deadline, s: {what}", max(figures["verdict"]), VERDICT_MOST, True)
            )
    return reached


def markdown(
    found: dict[str, dict[str, list[float]]], runs: int, setting: Setting, load: Sequence[float], reached: Sequence[Bar]
) -> str:
    """The page: the machine, the bars and all figures."""
    versions = ", ".join(f"{name} {version}" for name, version in setting.versions.items())
    losses, hangs = (
        [(what, *map(cell, figures.values())) for what, figures in found.items() if ("shrink" in figures) == shrinks]
        for shrinks in (True, False)
    )
    return "\n".join([
        "# Losses: figures", "",
        f"{setting.machine}, {setting.cores} cores, {setting.date}, load {' to '.join(f'{each:.1f}' for each in load)}; a "
        f"rehearsal: namespaces of one machine stand for hosts. {versions}.", "",
        f"One run of `python benchmarks/faults.py`: four ranks on two hosts, {runs} times each case. Seconds of the slowest "
        "rank: the median, and in brackets the slowest run, which is judged. A rank that notices a loss first waits in "
        f"`shrink` until the others do. A second rank dies {PAUSE:g} s after it has noticed the first loss; from then on "
        f"`shrink` is counted. Where links are cut, XVCOMM_PEER_TIMEOUT={PEER_TIMEOUT:g}, of which the first and the last "
        f"column leave out as much. An operation that one rank never calls has a deadline of {PATIENCE:g} s.", "",
        *bar_table(reached), "",
        "| s | from the loss to `PeerLost` | `shrink` | from the loss until all go on |", "| --- | --: | --: | --: |",
        *(f"| {' | '.join(row)} |" for row in losses), "",
        "| s | from the first deadline to the printed error |", "| --- | --: |",
        *(f"| {' | '.join(row)} |" for row in hangs), "",
    ])  # fmt: skip


def cell(values: Sequence[float]) -> str:
    """What a table says of all runs."""
    return f"{statistics.median(values):.3f} ({max(values):.3f})"


def main() -> int:
    """Measure, write the report and check the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="folder for faults.md and faults.json")
    parser.add_argument("--quick", action="store_true", help="three cases, once, without a judgement")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the hosts are removed
    cases, runs = (QUICK, 1) if arguments.quick else (CASES, RUNS)
    found: dict[str, dict[str, list[float]]] = {}
    load = [os.getloadavg()[0]]
    try:
        for number, case in enumerate(cases * runs):
            print(f"# {number + 1} of {len(cases) * runs}: {case.what}", file=sys.stderr, flush=True)
            with Hosts(2) as hosts:
                setting, figures = case.run(hosts)
            for name, seconds in figures.items():
                found.setdefault(case.what, {}).setdefault(name, []).append(seconds)
    except ResourceError as error:
        sys.exit(f"error: {error}")
    load.append(os.getloadavg()[0])
    reached = bars(found)
    judged = [{**asdict(bar), "met": bar.met} for bar in reached]
    report = {**asdict(setting), "load": load, "runs": runs, "bars": judged, "seconds": found}
    (arguments.out / "faults.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.out / "faults.md").write_text(markdown(found, runs, setting, load, reached))
    for bar in reached:
        print("{3:>8}: {0}: {2} ({1})".format(*bar.cells()))
    return 0 if arguments.quick or all(bar.met for bar in reached) else 1


if __name__ == "__main__":
    sys.exit(main())
