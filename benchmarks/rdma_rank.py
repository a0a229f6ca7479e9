"""What a host of benchmarks/rdma.py does: `rdma_rank.py ACTION SETTINGS`, the settings as JSON; rank 0 writes the results.

Rank 1 sends. The module `job` is that of tests/rdma.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import job
import numpy as np

import xvcomm
from xvcomm.cli.bench.report import Setting
from xvcomm.comm.communicator import Communicator

PORT, PERF_PORT = 29500, 18515
ME = int(os.environ["HOST_INDEX"])
MESSAGE = 1 << 20
SHORT, BATCH = 8, 10
SECONDS = 60.0
PERF_SECONDS, ATTEMPTS = 10.0, 10
NICS = int(os.environ["NIC_COUNT"])
ALL_UP = 2 * NICS
"""Rails of RDMA to the other host."""


def join(port: int, rdma: bool, nics: int = NICS) -> Communicator:
    """Join a job of one rank on each host, which uses so many NICs; with `rdma`, when all its rails are up."""
    names = ",".join(f"eth{nic}" for nic in range(nics))
    os.environ |= job.settings(port, XVCOMM_RDMA=str(int(rdma)), XVCOMM_NICS=f"={names}")
    comm = xvcomm.init()
    if rdma:
        job.meet(comm, ALL_UP * nics // NICS)
    return comm


def start(settings: dict[str, Any]) -> dict[str, float]:
    """Seconds of `xvcomm.init`, of that and the first message, and until all rails of RDMA are up."""
    os.environ |= settings["variables"]
    x = np.zeros(SHORT, np.uint8)
    begin = time.monotonic()
    comm = xvcomm.init()
    init = time.monotonic() - begin
    comm.send(x, 0) if ME else comm.recv(x, 1)
    first = time.monotonic() - begin
    found = {"init": init, "first": first}
    if settings["variables"]["XVCOMM_RDMA"] == "1":
        job.meet(comm, ALL_UP)
        found["up"] = time.monotonic() - begin
    comm.close()
    return found


def starts(rounds: int) -> dict[str, list[dict[str, float]]]:
    """What `start` finds in new processes, in turns."""
    found: dict[str, list[dict[str, float]]] = {"rdma": [], "tcp": []}
    for turn in range(rounds):
        for number, scheme in enumerate(found):
            port = PORT + 10 + 2 * turn + number
            variables = job.settings(port, XVCOMM_RDMA=str(int(scheme == "rdma")))
            command = (sys.executable, __file__, "start", json.dumps({"variables": variables}))
            found[scheme].append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))
    return found


def message(comm: Communicator, count: int) -> float:
    """Microseconds of a message of 1 MiB one way, the mean of so many."""
    x = np.zeros(MESSAGE, np.uint8)
    for warm in (True, False):
        comm.barrier()
        begin = time.perf_counter()
        for _ in range(3 if warm else count):
            comm.send(x, 0) if ME else comm.recv(x, 1)
        comm.barrier()
    return (time.perf_counter() - begin) / count * 1e6


def half_trip(comm: Communicator, count: int) -> float:
    """Microseconds of 8 B one way: half a round trip, the median of batches, because reading the time is a system call there."""
    x, times = np.zeros(SHORT, np.uint8), []
    comm.barrier()
    for _ in range(1 + count // BATCH):
        begin = time.perf_counter()
        for _ in range(BATCH):
            if ME:
                comm.send(x, 0), comm.recv(x, 0)
            else:
                comm.recv(x, 1), comm.send(x, 1)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:]) / BATCH / 2 * 1e6


def perftest(comm: Communicator, *words: object) -> list[float]:
    """The line of figures of a program of perftest, between rxe0 of both hosts; rank 1 is its client.

    It compares the processor's clock with the system's first. Where the two do not agree, on a busy machine, its figures are 0 or
    infinite, and with -e both sides may sleep for ever: then it is started again.
    """
    tool, *options = map(str, words)
    command = [tool, "-d", "rxe0", "-x", "1", "-F", "-m", "4096", "-p", str(PERF_PORT), *options]
    if ME:
        command.append(os.environ["HOST_ADDR_0_0"])
    for _ in range(ATTEMPTS):
        comm.barrier()
        time.sleep(ME)  # the server must listen
        row = figures_of(command)
        if all(comm.all_gather_object(bool(row) and 0 < row[3] < math.inf)):
            return row
    sys.exit(f"error: {' '.join(command)} has no figures in {ATTEMPTS} attempts")


def figures_of(command: list[str]) -> list[float]:
    """The last line of figures that a program prints; empty if it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PERF_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return []
    if done.returncode:
        print(done.stdout + done.stderr, flush=True)
        return []
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()[:1].isdigit()]
    return [float(word) for word in rows[-1]] if rows else []


def bandwidth(comm: Communicator, count: int, *tool: str) -> float:
    """Microseconds of a message of 1 MiB by ib_write_bw or ib_send_bw: its average, which it tells in MiB a second."""
    _bytes, _count, _peak, average, *_ = perftest(comm, *tool, "-s", MESSAGE, "-n", count)
    return MESSAGE / (1 << 20) / average * 1e6


def latency(comm: Communicator, count: int, *tool: str) -> float:
    """Microseconds of 8 B one way by ib_send_lat or ib_write_lat: its typical time."""
    _bytes, _count, _least, _most, typical, *_ = perftest(comm, *tool, "-s", SHORT, "-n", count)
    return typical


def in_turns(rounds: int, contenders: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """What each finds, round by round."""
    found = defaultdict(list)
    for _ in range(rounds):
        for name, call in contenders.items():
            found[name].append(call())
    return dict(found)


def shares(comm: Communicator, count: int) -> dict[str, list[int]]:
    """Bytes that each rail of RDMA has sent while messages went, by this host's address."""

    def sent() -> dict[tuple[str, str, int], int]:
        return {(r.local, r.remote, r.number): r.sent for r in comm.rails() if r.scheme == "rdma"}

    before = sent()
    message(comm, count)
    found = defaultdict(list)
    for rail, now in sorted(sent().items()):
        found[rail[0]].append(now - before.get(rail, 0))
    return dict(found)


def cut(comm: Communicator, victim: int, phases: tuple[float, float, float]) -> dict[str, float]:
    """One of two links is cut on host `victim` while messages of 1 MiB go, and comes back.

    Returns:
        On rank 0 the `longest` and the `mean` seconds between two messages; on the victim, seconds from the link's return until
        all rails are `up`.
    """
    before, during, _ = phases
    found: dict[str, float] = {}

    def cutter() -> None:
        for state, wait in (("down", before), ("up", during)):
            time.sleep(wait)
            subprocess.run(["ip", "link", "set", "eth1", state], check=True)
        back = time.monotonic()
        while sum(rail.scheme == "rdma" for rail in comm.rails()) < ALL_UP and time.monotonic() < back + SECONDS:
            time.sleep(0.02)
        found["up"] = time.monotonic() - back

    job.meet(comm, ALL_UP)
    comm.barrier()
    thread = threading.Thread(target=cutter)
    if victim == ME:
        thread.start()
    x, times, begin = np.zeros(MESSAGE, np.uint8), [], time.monotonic()
    while not x[0]:
        if ME:
            x[0] = time.monotonic() - begin > sum(phases)
            comm.send(x, 0)
        else:
            comm.recv(x, 1)
            times.append(time.monotonic())
    if victim == ME:
        thread.join()
    job.meet(comm, ALL_UP)
    if not ME:
        gaps = [new - old for old, new in pairwise(times)]
        found |= {"longest": max(gaps), "mean": statistics.mean(gaps)}
    return found


def part(name: str) -> None:
    """Tell benchmarks/rdma.py what begins."""
    if not ME:
        print(f"# {name}", flush=True)


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Everything; on rank 0 what both ranks have found of each part."""
    rounds, found = settings["rounds"], {}
    part("start")
    found["start"] = starts(settings["starts"])
    with join(PORT, rdma=True) as comm, join(PORT + 1, rdma=False) as tcp, join(PORT + 2, True, nics=1) as one_nic:
        part("messages")
        count = settings["messages"]
        contenders = {
            "xvcomm": lambda: message(comm, count),
            "xvcomm, one NIC": lambda: message(one_nic, count),
            "xvcomm over TCP": lambda: message(tcp, count),
        }
        if settings["perftest"]:
            contenders["ib_write_bw"] = lambda: bandwidth(comm, count, "ib_write_bw")
            contenders["ib_send_bw -e"] = lambda: bandwidth(comm, count, "ib_send_bw", "-e")
        found["messages"] = in_turns(rounds, contenders)
        part("trips")
        trips = settings["trips"]
        contenders = {"xvcomm": lambda: half_trip(comm, trips), "xvcomm over TCP": lambda: half_trip(tcp, trips)}
        if settings["perftest"]:
            contenders["ib_send_lat -e"] = lambda: latency(comm, trips, "ib_send_lat", "-e")
            contenders["ib_write_lat"] = lambda: latency(comm, trips, "ib_write_lat")
        found["trips"] = in_turns(rounds, contenders)
        part("rails")
        found["rails"] = shares(comm, count)
        for name, victim in (("own", 1), ("far", 0)):
            part(name)
            found[name] = cut(comm, victim, settings["phases"])
        part("end")
        both = comm.all_gather_object(found)
        devices = [f"{comm.device} {platform.machine()}"] * comm.size
        setting = Setting.of(comm.topology, devices, rehearsal=True, transports=("rdma",))
    return {
        "setting": asdict(setting), "kernel": platform.release(), **{name: [one[name] for one in both] for name in found}
    }  # fmt: skip


def main() -> None:
    """Do the action."""
    action, settings = sys.argv[1], json.loads(sys.argv[2])
    if action == "start":
        print(json.dumps(start(settings)))
        return
    folder = Path(
        settings["out"]
    )  # perftest reads the clock of the processor there, which User-mode Linux does not tell
    subprocess.run(["mount", "--bind", folder / "cpuinfo", "/proc/cpuinfo"], check=True)
    found = measure(settings)
    if not ME:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
