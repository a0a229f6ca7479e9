"""What a rank of benchmarks/hosts.py does: `hosts_rank.py ACTIONS SETTINGS`, the settings as JSON; rank 0 writes the results."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import xvcomm
from xvcomm.cli.bench.case import Buffers, Case
from xvcomm.cli.bench.measure import Bystanders, Effort, Meeting, Record, measure
from xvcomm.cli.bench.memory import memory_of
from xvcomm.cli.bench.peers import contenders
from xvcomm.cli.bench.report import Setting
from xvcomm.comm.communicator import Communicator
from xvcomm.config import Config
from xvcomm.rendezvous.environment import discover
from xvcomm.types.dtype import DTYPES

MOST = 128 << 10
"""Bytes of a system call of the programs in C, as iperf3 has them."""
MESSAGE = 4 << 20
"""Bytes of a message of which a link is cut."""


class Bare:
    """One TCP connection and C: blocking calls, or calls that never sleep (`polling`)."""

    communicates = True

    def __init__(self, folder: str, connection: socket.socket, rank: int, polling: bool) -> None:
        self.name = "C, polling" if polling else "C"
        self._library = ctypes.CDLL(f"{folder}/bare.so")
        self._connection, self._rank, self._polling = connection, rank, polling
        self._room = np.zeros(MOST, np.uint8)

    def refuses(self, case: Case) -> str | None:
        """See `Contender.refuses`."""
        able = ("send", "p2p", "all_reduce") if self._polling else ("send", "p2p")
        return None if case.op in able else f"{case.op} is none of its operations"

    def _call(self, name: str, *arrays: Any, last: int | None = None) -> Callable[[], None]:
        function, size = getattr(self._library, name), arrays[0].nbytes
        at = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
        last = int(self._polling) if last is None else last
        words = (self._connection.fileno(), *at, ctypes.c_size_t(size), ctypes.c_size_t(MOST), last)

        def call() -> None:
            if function(*words):
                raise OSError(f"{name} of {size} bytes failed")

        return call

    def bind(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        """See `Contender.bind`."""
        src, dst = buffers.src, buffers.dst
        if case.op == "all_reduce":
            return self._call("all_reduce", dst, self._room, last=self._rank)
        if case.op == "send":
            return self._call("send_all", src) if self._rank == 0 else self._call("receive_all", dst)
        if self._rank == 1:
            return self._call("back", dst, dst)
        calls = self._call("there", src, dst), self._call("there", dst, src)
        turn = 0

        def there() -> None:
            nonlocal turn
            calls[turn]()
            turn = 1 - turn

        return there

    def close(self) -> None:
        """No-op: the connection belongs to the caller."""


def connect(meeting: Meeting, address: str) -> socket.socket:
    """A TCP connection between the two ranks; rank 0 listens at the address."""
    if meeting.rank == 0:
        with socket.create_server((address, 0)) as listener:
            meeting.exchange(listener.getsockname()[1])
            connection, _ = listener.accept()
    else:
        connection = socket.create_connection((address, meeting.exchange(None)[0]))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def transfers(comm: Communicator, meeting: Meeting, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Operations of several sizes with all libraries, in turns."""
    memory = memory_of(comm)
    effort = Effort(
        settings["seconds"], rounds=settings["rounds"], patience=settings["patience"], asynchronous=memory.asynchronous
    )
    watch = Bystanders(meeting.exchange(os.getpid()))
    float32 = next(dtype for dtype in DTYPES if dtype.name == "float32")
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder, connect(meeting, settings["address"]) as connection:
        rendezvous = meeting.exchange(f"{folder}/gloo")[0]
        libraries = contenders(settings["libraries"], comm, meeting, memory, rendezvous)
        libraries += [Bare(settings["out"], connection, comm.rank, polling) for polling in settings["bare"]]
        for op, sizes in settings["cases"]:
            for size in sizes:
                case = Case(op, size, float32, comm.size, in_place=True)
                records += measure(case, libraries, meeting, memory, watch, effort)
        for contender in libraries:
            contender.close()
        meeting.exchange(None)  # before rank 0 removes the folder
    return [asdict(record) for record in records]


def idle(comm: Communicator, meeting: Meeting, settings: dict[str, Any]) -> dict[str, Any]:
    """CPU seconds of each rank that does nothing, after a first collective."""
    comm.all_reduce(np.zeros(10))
    meeting.exchange(None)
    time.sleep(0.5)
    before = time.process_time()
    time.sleep(settings["idle"])
    return {"seconds": settings["idle"], "cpu": meeting.exchange(time.process_time() - before)}


def lock(comm: Communicator, meeting: Meeting, settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds of messages from rank 1 to rank 0, alone and beside a thread of each rank that computes, with the interpreter lock
    or without.
    """
    size, messages, rounds = settings["lock"]
    x = np.zeros(size, np.uint8)
    beside = {"alone": None, "free": compute_in_c, "held": compute_in_python}
    taken: dict[str, list[float]] = {name: [] for name in beside}
    for number in range(1 + rounds):
        for name, compute in beside.items():
            comm.barrier()
            begin = time.perf_counter()
            with Loop(compute):
                for _ in range(messages):
                    comm.send(x, 0) if comm.rank == 1 else comm.recv(x, 1)
            if number:  # the first round warms up
                taken[name].append((time.perf_counter() - begin) / messages)
    return {"bytes": size, **{name: statistics.median(seconds) for name, seconds in taken.items()}}


_HASHED = bytes(1 << 18)


def compute_in_c() -> None:
    """Compute for about 0.1 ms without the interpreter lock."""
    hashlib.sha256(_HASHED).digest()


def compute_in_python() -> None:
    """Compute for about 0.1 ms with the interpreter lock."""
    for _ in range(6000):
        pass


class Loop:
    """While it is entered, a thread computes again and again; none does without `compute`."""

    def __init__(self, compute: Callable[[], None] | None) -> None:
        self._compute, self._thread = compute, threading.Thread(target=self._repeat)

    def _repeat(self) -> None:
        while (compute := self._compute) is not None:
            compute()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._compute = None
        self._thread.join()


def cut(comm: Communicator, meeting: Meeting, settings: dict[str, Any]) -> dict[str, Any]:
    """Times at which rank 0 had received each message, from the tenth on, when it prints a line, until all phases are over."""
    x = np.zeros(MESSAGE, np.uint8)
    times: list[float] = []
    while not x[0]:
        if comm.rank == 1:
            times.append(time.monotonic())
            x[0] = len(times) > 10 and times[-1] - times[10] > sum(settings["phases"])
            comm.send(x, 0)
        else:
            comm.recv(x, 1)
            times.append(time.monotonic())
            if len(times) == 10:
                print("begun", flush=True)
    return {"bytes": MESSAGE, "times": times[10:]}


ACTIONS = {action.__name__: action for action in (transfers, idle, lock, cut)}


def main() -> None:
    """Do the actions; rank 0 writes what each returns, and where that was."""
    names, settings = sys.argv[1].split(","), json.loads(sys.argv[2])
    if "variables" in settings:
        os.environ |= settings["variables"][discover(os.environ, Config.from_env()).rank]
    with xvcomm.init() as comm:
        meeting = Meeting(comm.store, comm.rank, comm.size, comm.timeout)
        able = memory_of(comm)
        devices = meeting.exchange(f"{able.kind} {able.name}")
        found = {"setting": asdict(Setting.of(comm.topology, devices, rehearsal=True, transports=("tcp",)))}
        found |= {name: ACTIONS[name](comm, meeting, settings) for name in names}
    if comm.rank == 0:
        for name, value in found.items():
            Path(settings["out"], f"{name}.json").write_text(json.dumps(value))


if __name__ == "__main__":
    main()
