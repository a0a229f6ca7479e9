"""Seeded random programs with one fault each, for `test_faults_campaign.py`.

Every rank draws the same program from the seed, so each rank knows what the others call. The fault affects one rank, the
victim, before one step.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
from emulated import change

from xvcomm.errors import ClosedError, XvcommError

TOPOLOGIES = ("a:2", "a,b", "a:3", "a:2,b", "a,b,c")
STORES = ("launcher", "rank 0", "file")
FAULTS = (
    "none", "kill", "kill later", "stop", "exception", "leave", "abort", "mismatch", "missing", "fork", "signal",
    "no descriptors", "full shm", "tiny shm",
)  # fmt: skip
HOSTS = 10_000
"""The first seed of runs over several hosts."""
PLACES = {2: ("a:2,b:2", "a:3,b", "a,b,a,b"), 3: ("a:2,b,c", "a,b:2,c")}
"""Hosts of four ranks, by their number."""
ISLANDS = ("a:4", "a:2,b:2", "a,b,a,b", "a:3,b", "a,b,c:2")
CUTS = ("cut link", "cut off", "cut one way", "cut off one way", "lost packets")
"""Faults of the network: one of two links between two hosts is down for a while, or both are from then on; the same for what one
host sends; both lose packets and delay the others.
"""
EMULATED = CUTS[2:]
LOSSY = {"loss": 0.02, "delay": 0.01}
FAULTS_OF_HOSTS = (*FAULTS[:-2], *CUTS)
LENGTHS = (3, 1000, 70_000, 700_000)
STEPS = 6
PATIENCE = 1.5
"""Timeout of operations if a rank does not come, in seconds."""
AMPLE = 100.0
"""Timeout of other operations, and of joining."""
GRACE = 2.0
"""Seconds after which nothing may be left of a communicator that was closed."""


class Stumble(Exception):
    """Exception that the victim raises on its own."""


@dataclass(frozen=True)
class Ending:
    """How a rank's part of a run ended.

    Attributes:
        error: the error that it raised; None if it completed.
        peer: the rank that the error names, as a rank of the whole job.
        seconds: from the step of the fault until the error.
        leaving: seconds to leave the communicator's block after that.
        left: threads and connections that the rank then still has.
    """

    error: Exception | None
    peer: int | None
    seconds: float
    leaving: float
    left: tuple[str, ...] = ()


Step = Callable[[Any, int, int], None]
"""Called with the communicator, a length and a number that is the same on all ranks; checks the result."""


def _all_reduce(comm: Any, length: int, number: int) -> None:
    x = np.full(length, number + comm.rank, np.float64)
    comm.all_reduce(x)
    _expect(x, comm.size * number + sum(range(comm.size)))


def _asynchronous(comm: Any, length: int, number: int) -> None:
    xs = [np.full(length, number + i, np.float32) for i in range(3)]
    works = [comm.all_reduce(x, "max", async_op=True) for x in xs]
    for i in reversed(range(3)):
        works[i].wait()
        _expect(xs[i], number + i)


def _broadcast(comm: Any, length: int, number: int) -> None:
    root = number % comm.size
    x = np.full(length, number if comm.rank == root else -1, np.int64)
    comm.broadcast(x, root)
    _expect(x, number)


def _all_gather(comm: Any, length: int, number: int) -> None:
    found = comm.all_gather(np.full(length, number + comm.rank, np.int32))
    for rank, part in enumerate(found.reshape(comm.size, length)):
        _expect(part, number + rank)


def _reduce_scatter(comm: Any, length: int, number: int) -> None:
    found = comm.reduce_scatter(np.full(length * comm.size, number, np.float32))
    _expect(found, number * comm.size)


def _all_to_all(comm: Any, length: int, number: int) -> None:
    x = np.repeat(np.arange(comm.size) + number + comm.rank, length)
    found = comm.all_to_all(x)
    for rank, part in enumerate(found.reshape(comm.size, length)):
        _expect(part, number + rank + comm.rank)


def _barrier(comm: Any, length: int, number: int) -> None:
    comm.barrier()


def _around(comm: Any, length: int, number: int) -> None:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    buffer = np.zeros(length)
    comm.sendrecv(np.full(length, number + comm.rank, np.float64), after, buffer, before)
    _expect(buffer, number + before)


def _group(comm: Any, length: int, number: int) -> None:
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    buffers = {rank: np.zeros(length, np.float32) for rank in others}
    with comm.group():
        for rank in others:
            comm.send(np.full(length, number + comm.rank, np.float32), rank, tag=number)
            comm.recv(buffers[rank], rank, tag=number)
    for rank in others:
        _expect(buffers[rank], number + rank)


def _messages(comm: Any, length: int, number: int) -> None:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    buffers = [np.zeros(length) for _ in range(3)]
    works = [comm.irecv(buffer, before) for buffer in buffers]
    works += [comm.isend(np.full(length, float(number + i)), after) for i in range(3)]
    for work in works:
        work.wait()
    for i, buffer in enumerate(buffers):
        _expect(buffer, number + i)


def _split(comm: Any, length: int, number: int) -> None:
    members = [rank for rank in reversed(range(comm.size)) if rank % 2 == comm.rank % 2]
    with comm.split(color=comm.rank % 2, key=-comm.rank) as part, _numbered(members):
        _all_reduce(part, length, number)


def _subgroup(comm: Any, length: int, number: int) -> None:
    members = [rank for rank in range(comm.size) if rank != number % comm.size]
    if comm.rank in members:
        with comm.subgroup(members, f"of {number}") as part, _numbered(members):
            _all_reduce(part, length, number)


@contextlib.contextmanager
def _numbered(members: list[int]) -> Iterator[None]:
    """Add to an error of a subgroup the rank of the whole job that it names."""
    try:
        yield
    except XvcommError as error:
        error.named = None if error.peer is None else members[error.peer]  # type: ignore[attr-defined]
        raise


def _objects(comm: Any, length: int, number: int) -> None:
    found = comm.all_gather_object({"rank": comm.rank, "number": number})
    assert [each["rank"] for each in found] == list(range(comm.size))


COUNTED: tuple[Step, ...] = (
    _all_reduce, _asynchronous, _broadcast, _all_gather, _reduce_scatter, _all_to_all, _around, _group, _messages,
)  # fmt: skip
"""Steps in which different lengths are a mismatch."""
PROGRAM: tuple[Step, ...] = (*COUNTED, _barrier, _split, _subgroup, _objects)


def _expect(x: Any, value: float) -> None:
    assert (np.asarray(x) == value).all(), f"wrong data: {np.unique(x)[:4]} in place of {value}"


@dataclass(frozen=True, repr=False)
class Run:
    """One program and its fault, both determined by the seed.

    Attributes:
        topology: islands, as for `xvcomm run --islands`.
        hosts: labels of the ranks' hosts likewise; None for one host.
        size: number of ranks.
        store: who serves the store, one of `STORES`.
        fault: one of `FAULTS`.
        victim: the rank that it affects.
        step: the step before which it happens.
        delay: seconds after that, for faults that happen later.
        room: the victim's remaining file descriptors, or pages of /dev/shm.
        program: steps and lengths.
    """

    seed: int
    topology: str
    hosts: str | None
    size: int
    store: str
    fault: str
    victim: int
    step: int
    delay: float
    room: int
    program: tuple[tuple[Step, int], ...]

    @classmethod
    def of(cls, seed: int) -> Run:
        draw = random.Random(seed)
        over_hosts = seed >= HOSTS
        topology = draw.choice(ISLANDS if over_hosts else TOPOLOGIES)
        size = sum(int(island.partition(":")[2] or 1) for island in topology.split(","))
        faults = FAULTS_OF_HOSTS if over_hosts else FAULTS
        fault = faults[seed % len(faults)]
        store = draw.choice(
            ("rank 0", *["file"] * 4) if fault.startswith("cut off") else STORES[1:] if fault in CUTS else STORES
        )
        program = [(draw.choice(PROGRAM), draw.choice(LENGTHS)) for _ in range(STEPS)]
        step = draw.randrange(STEPS)
        if fault == "mismatch":
            program[step] = draw.choice(COUNTED), program[step][1]
        room = draw.choice((0, 1, 3, 6) if fault == "no descriptors" else (0, 2, 30, 300, 3000))
        victim, delay = draw.randrange(size), draw.random() * 0.03
        hosts = draw.choice(PLACES[2 if fault in CUTS else draw.choice((2, 3))]) if over_hosts else None
        return cls(seed, topology, hosts, size, store, fault, victim, step, delay, room, tuple(program))

    @property
    def timeout(self) -> float:
        """Timeout of each operation in seconds."""
        if self.fault.startswith("cut off"):
            return 8.0
        return PATIENCE if self.fault in ("stop", "missing") else AMPLE

    @property
    def parts(self) -> bool:
        """Whether it creates subgroups, during which the fault can happen."""
        return any(step in (_split, _subgroup) for step, _ in self.program[self.step :])

    @property
    def deaf(self) -> bool:
        """Whether hosts learn of each other's failures only by the rings between them: a folder tells nothing."""
        return self.hosts is not None and self.store == "file"

    def __repr__(self) -> str:
        steps = ", ".join(f"{step.__name__[1:]} of {length}" for step, length in self.program)
        return (
            f"seed {self.seed}: {self.fault} of rank {self.victim} on {self.topology}, hosts {self.hosts or 'one'}, before step "
            f"{self.step} of {steps}; store: {self.store}; room {self.room}"
        )


def play(comm: Any, seed: int, folder: str) -> Ending:
    """Run one rank's part.

    Args:
        folder: of shared memory, if a small one was mounted.
    """
    run = Run.of(seed)
    comm.timeout = run.timeout
    victim = comm.rank == run.victim
    error: Exception | None = None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    struck = raised = time.monotonic()
    try:
        with comm:
            try:
                for number, (step, length) in enumerate(run.program):
                    if number == run.step:
                        struck = time.monotonic()
                        if victim:
                            _strike(comm, run, folder)
                    odd = victim and run.fault == "mismatch" and number == run.step
                    step(comm, length + odd, number + 1)
                if victim and run.fault in LATER:
                    LATER[run.fault]()
                comm.barrier()  # the last step may be through before a fault in it is seen
            finally:
                raised = time.monotonic()
    except (XvcommError, Stumble) as caught:
        error = caught
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        for timer in _timers:
            timer.join()
    peer = getattr(error, "named", getattr(error, "peer", None))
    return Ending(error, peer, raised - struck, time.monotonic() - raised, left())


def left() -> tuple[str, ...]:
    """Connections of this rank, and its threads but for those that live as long as the process; what ends soon does not count."""
    until = time.monotonic() + GRACE
    gc.collect()  # what is left in a cycle of references is not a leak
    while True:
        names = [
            f"thread {one.name}" for one in threading.enumerate() if one.name not in ("MainThread", "xvcomm-mover")
        ]
        names += [
            f"connection {one.laddr} {one.raddr} {one.status}" for one in psutil.Process().net_connections("inet")
        ]
        if not names or time.monotonic() > until:
            return tuple(names)
        time.sleep(0.01)


def _strike(comm: Any, run: Run, folder: str) -> None:
    """Cause the fault in this rank."""
    match run.fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill later":
            _later(run.delay, os.kill, os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exception":
            raise Stumble("the victim failed")
        case "leave":
            comm.close()
        case "abort":
            comm.abort("the victim gave up")
        case "missing":
            time.sleep(2 * PATIENCE)  # computes, and comes too late
        case "fork":
            _fork(comm)
        case "signal":
            signal.signal(signal.SIGUSR2, _stumble)
            _later(run.delay, signal.pthread_kill, threading.main_thread().ident, signal.SIGUSR2)
        case "no descriptors":
            _use_up_descriptors(run.room)
        case "full shm":
            _fill(folder, run.room)
        case "cut link":
            _turn("down", 1)
            _later(30 * run.delay, _turn, "up", 1)
        case "cut off":
            _turn("down", 0, 1)
        case "cut one way":
            _change([1], run.victim % 2, loss=1)
            _later(30 * run.delay, _change, [1], run.victim % 2, loss=0)
        case "cut off one way":
            _change([0, 1], run.victim % 2, loss=1)
        case "lost packets":
            _change([0, 1], **LOSSY)


_timers: list[threading.Timer] = []


def _later(seconds: float, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    _timers.append(threading.Timer(seconds, function, args, kwargs))
    _timers[-1].start()


def _turn(state: str, *links: int) -> None:
    """Turn this host's interfaces to some links `down` or `up`."""
    for _, name in socket.if_nameindex():
        if name != "lo" and int(name[-1]) in links:
            subprocess.run(["ip", "link", "set", name, state], check=True)


def _change(links: list[int], *sides: int, **properties: float) -> None:
    """Change links for what these hosts send, or both if none is named."""
    controls = os.environ["LINKS"].split(os.pathsep)
    for link in links:
        change(controls[link], *sides, **properties)


_came = threading.Event()


def _stumble(number: int, frame: Any) -> None:
    _came.set()
    raise Stumble("a signal's handler raised")


def _await_signal() -> None:
    """Wait until the handler has raised, including in a finalizer, whose exceptions Python drops."""
    _came.wait(AMPLE)
    raise Stumble("a signal's handler raised, and nothing came of it")


LATER: dict[str, Callable[[], None]] = {"kill later": signal.pause, "signal": _await_signal}
"""Faults that happen some time after the step, and how the victim waits for them at the end."""


def _use_up_descriptors(left: int) -> None:
    """Limit the number of further files that this process can open."""
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(left + 1)]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(opened), hard))
    for fd in opened:
        os.close(fd)


def _fill(folder: str, left: int) -> None:
    """Fill the shared memory folder except for a number of pages."""
    free = os.statvfs(folder)
    size = (free.f_bavail - left) * free.f_frsize
    if size > 0:
        with open(os.path.join(folder, "of others"), "wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, size)  # another rank may take of it meanwhile


def _fork(comm: Any) -> None:
    """Fork a child that tries to take part, and leaves the block like its parent."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with comm:
                comm.all_reduce(np.ones(1))
        except ClosedError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child's communicator is not dead"
