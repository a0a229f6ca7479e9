"""Trains over two hosts while one of the two links between them is cut and comes back, and draws what each link carries.

    sudo .venv/bin/python examples/hosts_demo.py

The hosts are network namespaces of this machine, so that this needs Linux, root and iproute2. `train.py` runs on both, an island
and a replica on each: all gradients cross between them in every step. Its `--check` compares the losses with those of one
process; exits with code 1 if they differ.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from xvcomm.cli.doctor import cpu_model
from xvcomm.errors import ResourceError
from xvcomm.testing.hosts import Hosts

LINKS, CUT = 2, 1
TRAIN = Path(__file__).with_name("train.py")
MODEL = ("--layers", "2", "--dim", "256", "--heads", "4", "--kv-heads", "2", "--hidden", "768", "--context", "32")
EVERY_SECONDS = 0.2


@dataclass(slots=True)
class Course:
    """What happened when, in seconds.

    Attributes:
        times: of the samples.
        sent: for each of them, the bytes that host 0 has sent over each link so far.
        steps: ends of the training's steps.
        seconds: that each of them took.
        cut, back: when the link was cut and when it came back.
    """

    times: list[float] = field(default_factory=list)
    sent: list[list[int]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cut: float = 0.0
    back: float = 0.0

    def mean(self, link: int, begin: float, end: float) -> float:
        """Megabytes a second of a link between two times."""
        first, last = np.interp((begin, end), self.times, [sent[link] for sent in self.sent])
        return float(last - first) / (end - begin) / 1e6 if end > begin else 0.0

    def smooth(self, link: int) -> list[tuple[float, float]]:
        """Times, and megabytes a second of a link in the two seconds around each, of which none reaches over the cut's ends."""
        points = []
        for begin, end in pairwise((0.0, self.cut, self.back, self.times[-1])):
            moments = (begin, *(t for t in self.times if begin < t < end), end)
            points += [(t, self.mean(link, max(begin, t - 1), min(end, t + 1))) for t in moments]
        return points

    def parts(self) -> dict[str, tuple[float, float]]:
        """Begin and end of the training's three parts."""
        return {"before": (self.steps[0], self.cut), "cut": (self.cut, self.back), "after": (self.back, self.steps[-1])}


def train(hosts: Hosts, steps: int, out: Path, options: tuple[str, ...], signals: list[int]) -> tuple[int, Course]:
    """Train on both hosts, and cut a link for the second third of the steps; the exit code, and what happened.

    Returns early once there is something in `signals`.
    """
    log = out / "log.jsonl"
    log.unlink(missing_ok=True)
    script = (TRAIN, *options, "--pp", "1", "--steps", steps, "--check", "--out", out)
    flags = ("--nnodes", "2", "--master", "a", "-n", "1", "--islands", "cuda:1,rocm:1")
    ranks = [
        hosts.begin(
            side, sys.executable, "-m", "xvcomm", "run", *flags, "--node-rank", side, "--", *script, stdout=None
        )
        for side in range(2)
    ]
    course, begin = Course(), time.monotonic()
    while any(rank.poll() is None for rank in ranks) and not signals:
        course.sent.append([hosts.sent(0, link) for link in range(LINKS)])
        course.times.append(time.monotonic() - begin)
        lines = log.read_text().splitlines() if log.exists() else []
        course.seconds = [record["seconds"] for record in map(json.loads, lines) if "step" in record]
        done = len(course.seconds)
        course.steps += [course.times[-1]] * (done - len(course.steps))
        if done >= steps // 3 and not course.cut:
            hosts.link(CUT, "down")
            course.cut = time.monotonic() - begin
        if done >= 2 * steps // 3 and not course.back:
            hosts.link(CUT, "up")
            course.back = time.monotonic() - begin
        time.sleep(EVERY_SECONDS)
    codes = [rank.returncode for rank in ranks]
    return 128 + signals[0] if signals else next(filter(None, codes), 0), course


def draw(path: Path, course: Course, rate: str) -> None:
    """What each link carried over the training, and the time of its steps, as a PNG file."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for link, colour in enumerate(("tab:blue", "tab:orange")):
        rates = [course.mean(link, *part) for part in pairwise(course.times)]
        above.plot(course.times[1:], rates, color=colour, linewidth=0.7, alpha=0.35)
        above.plot(
            *zip(*course.smooth(link), strict=True), color=colour, linewidth=2.2, label=f"link {link}, mean of 2 s"
        )
    below.plot(course.steps, course.seconds, ".", color="tab:gray", markersize=4)
    for axes in (above, below):
        axes.axvspan(course.cut, course.back, color="tab:red", alpha=0.12, label=f"link {CUT} is cut")
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    above.set_ylabel("sent by host a, MB/s")
    above.legend(loc="upper right")
    below.set(xlabel="seconds", ylabel="s a step", xlim=(course.steps[0] - 2, course.steps[-1] + 2))
    above.set_title(
        f"training over two hosts (network namespaces), two links of {rate}\n{cpu_model()}, {date.today()}", fontsize=11
    )
    figure.savefig(path, dpi=130)


def main() -> int:
    """Train, draw, and say what the links carried."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=90, help="optimiser steps; at least 3")
    parser.add_argument("--rate", default="200mbit", help="what a link carries each way, as tc spells it")
    parser.add_argument("--out", type=Path, default=Path("runs/hosts"), help="folder for the log and the plots")
    arguments, further = parser.parse_known_args()
    signals: list[int] = []  # not exceptions, which would break off the removal of the hosts
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, lambda number, _: signals.append(number))
    try:
        with Hosts(LINKS, arguments.rate) as hosts:
            code, course = train(hosts, arguments.steps, arguments.out, tuple(further or MODEL), signals)
    except ResourceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if code or not course.back:
        return code or 1
    draw(arguments.out / "links.png", course, arguments.rate)
    print("link   MB/s before    cut  after")
    for link in range(LINKS):
        means = {name: course.mean(link, *part) for name, part in course.parts().items()}
        print(f"{link:>4} {means['before']:>13.1f} {means['cut']:>6.1f} {means['after']:>6.1f}")
    print(f"links: {arguments.out / 'links.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
