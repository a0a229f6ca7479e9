"""How `xvcomm bench` and the benchmarks measure: the same operation with several libraries, alternating, in one job.

Every rank runs the same calls; the time of a case is the slowest rank's median. On host memory operations are timed one by one.
On GPUs a burst of operations is enqueued and waited for once, and its time divided. The libraries alternate in rounds, so that
a disturbance affects all of them, and rounds during which other processes were busy are repeated.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from xvcomm.abc.store import Store
from xvcomm.cli.bench.case import OPS, Buffers, Case, allocate, clear, fill, wrong
from xvcomm.cli.bench.memory import Memory
from xvcomm.types.deadline import Deadline

_TICK = os.sysconf("SC_CLK_TCK")
_TICK_ERROR = 3 / _TICK
_MOST = 20_000
_NOISY_SPREAD = 3.0
_NOISY_CORES = 0.1
_BURST_US = 20_000
_BURST_MOST = 100
_NOISY_BURSTS = 1.2
_WAITED = 20
_WAITED_US = 1_000


@dataclass(frozen=True, slots=True)
class Peer:
    """A library that can be compared with xvcomm.

    Attributes:
        memory: kind of memory that it supports: `host`, `gpu` or `any`.
        environment: variables that its processes need. They would affect other libraries, so it gets separate processes.
    """

    memory: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def serves(self, kind: str) -> bool:
        """Whether it supports this device type."""
        return self.memory in ("any", "host" if kind == "host" else "gpu")


PEERS = {
    "gloo": Peer("any"),
    "mpi": Peer("host"),
    "memcpy": Peer("host"),
    "nccl": Peer("gpu"),
    "nccl-cupy": Peer("gpu"),
    "nccl-shm": Peer("gpu", {"NCCL_P2P_DISABLE": "1"}),
    "nccl-socket": Peer(
        "gpu",
        {
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_NET": "Socket",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_NTHREADS": "4",
            "NCCL_NSOCKS_PERTHREAD": "4",
            "NCCL_MIN_NCHANNELS": "4",
            "NCCL_MIN_P2P_NCHANNELS": "4",
            "NCCL_NCHANNELS_PER_NET_PEER": "4",
        },
    ),
    "raw": Peer("gpu"),
}


class Contender(Protocol):
    """A library that can be measured.

    Attributes:
        name: name in the table.
        communicates: False for a reference without communication, whose results are not verified.
    """

    name: str
    communicates: bool

    def refuses(self, case: Case) -> str | None:
        """Why it cannot run the case, or None."""

    def bind(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        """One operation as a call without arguments; for p2p a round trip."""

    def close(self) -> None:
        """Release its resources."""


class Meeting:
    """Exchange of values between measurements, through the store, so that waiting ranks block and use no CPU time."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self._store, self.rank, self.size, self._timeout = store, rank, size, timeout
        self._count = 0

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value (anything that JSON supports), in rank order; blocks until all ranks have called."""
        self._count += 1
        deadline = Deadline.after(self._timeout)
        key = f"bench/{self._count}"
        self._store.set(f"{key}/{self.rank}", json.dumps(value).encode(), deadline)
        return [json.loads(self._store.get(f"{key}/{rank}", deadline)) for rank in range(self.size)]


class Bystanders:
    """CPU use of the machine's other processes, in cores."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self.reset()

    def reset(self) -> None:
        """Start a measurement."""
        self._begin = self._read()

    def cores(self) -> float:
        """Cores that other processes have used since `reset`."""
        now = self._read()
        wall, busy, own = (b - a for a, b in zip(self._begin, now, strict=True))
        return max(0.0, busy - own - _TICK_ERROR) / max(wall, 1e-3)

    def _read(self) -> tuple[float, float, float]:
        with open("/proc/stat") as file:
            user, nice, system = (int(f) / _TICK for f in file.readline().split()[1:4])
        own = 0.0
        for pid in self._pids:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            own += (int(fields[11]) + int(fields[12])) / _TICK
        return time.monotonic(), user + nice + system, own


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure.

    Attributes:
        seconds: total time for a case and library.
        iterations: fixed number of iterations per round instead, or None.
        warmup: iterations before the first round.
        rounds: number of turns of each library.
        patience: maximum seconds to wait before a turn for other processes to become idle; with 0, disturbed turns are not
            repeated either.
        asynchronous: whether any rank's device runs asynchronously to the host.
    """

    seconds: float = 0.3
    iterations: int | None = None
    warmup: int = 5
    rounds: int = 3
    patience: float = 1.0
    asynchronous: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """Results of one case with one library.

    Attributes:
        time: median of the slowest rank in microseconds; `p10`, `p90`, `least`, `call` and `waited` are of the same rank.
        call: time until the call returns; on host memory the same as `time`.
        waited: time of an operation if the host waits for each; on host memory it always does.
        algbw: size over time in 10^9 bytes per second; `busbw` is the bandwidth on the links, as in nccl-tests.
        wrong: wrong elements over all ranks; None for a reference that does not communicate.
        others: cores that other processes used meanwhile.
        noisy: whether the result is doubtful: iterations differ widely, or other processes were busy.
    """

    library: str
    op: str
    ranks: int
    dtype: str
    in_place: bool
    size: int
    count: int
    iterations: int
    time: float
    p10: float
    p90: float
    least: float
    call: float
    waited: float
    algbw: float
    busbw: float
    wrong: int | None
    others: float
    noisy: bool


def measure(
    case: Case, contenders: Sequence[Contender], meeting: Meeting, memory: Memory, watch: Bystanders, effort: Effort
) -> list[Record]:
    """Measure a case with each library that supports it. Collective: every rank calls it with the same arguments.

    Returns:
        A record per library, in the order of `contenders`, the same on every rank.
    """
    turns = [_Turns(case, c, meeting, memory, watch, effort) for c in contenders if c.refuses(case) is None]
    for turn in turns:
        turn.check()
        turn.calibrate()
    done = 0
    most = 2 * effort.rounds if effort.patience else effort.rounds
    while done < effort.rounds or (done < most and not all(turn.calm for turn in turns)):
        for turn in turns:
            turn.take()
        done += 1
    return [turn.record() for turn in turns]


@dataclass(slots=True)
class _Times:
    """Microseconds per operation: `whole` until it was complete, `call` until the host was free."""

    whole: list[float]
    call: list[float]


class _Turns:
    """One library's turns at one case."""

    def __init__(
        self, case: Case, contender: Contender, meeting: Meeting, memory: Memory, watch: Bystanders, effort: Effort
    ) -> None:
        self._case, self._name, self._checked = case, contender.name, contender.communicates
        self._meeting, self._memory, self._watch, self._effort = meeting, memory, watch, effort
        self._buffers = allocate(case, memory)
        self._call = contender.bind(case, self._buffers)
        self._scale = 0.5 if case.op == "p2p" else 1.0
        self._iterations = self._burst = 1
        self._waited = 0.0
        self._wrong: int | None = None
        self._taken: list[tuple[float, _Times]] = []

    def check(self) -> None:
        """Run once on a pattern and count wrong elements on all ranks; then clear the input."""
        if not self._checked:
            return
        rank = self._meeting.rank
        fill(self._case, rank, self._buffers)
        self._memory.synchronize()
        self._meeting.exchange(None)
        self._loop(1)
        self._wrong = sum(self._meeting.exchange(wrong(self._case, rank, self._buffers)))
        clear(self._case, self._buffers)

    def calibrate(self) -> None:
        """Warm up, and choose a number of iterations that is the same on every rank."""
        effort = self._effort
        slowest = self._wait_for_each(1)
        if effort.warmup > 1 and slowest * effort.warmup < effort.seconds * 1e6:
            slowest = self._wait_for_each(effort.warmup - 1)
        if effort.asynchronous and effort.iterations is None:
            if slowest < _WAITED_US:
                slowest = self._wait_for_each(_WAITED)
            self._burst = _burst(slowest / self._scale)
            if self._burst > 1:
                slowest = self._slowest(self._burst)
        slowest = max(slowest / self._scale, 0.1)
        wanted = effort.seconds * 1e6 / effort.rounds / slowest
        least = 1 if effort.asynchronous else 3
        self._iterations = effort.iterations or int(min(_MOST, max(least, wanted)))
        self._burst = _burst(slowest)

    def _wait_for_each(self, iterations: int) -> float:
        """Time operations one by one; return the slowest rank's median."""
        self._burst = 1
        return self._slowest(iterations, waited=True)

    def _slowest(self, iterations: int, waited: bool = False) -> float:
        """The slowest rank's median. With `waited`, also stores this rank's median as `waited`."""
        self._memory.synchronize()
        self._meeting.exchange(None)
        times = self._loop(iterations).whole
        middle = statistics.median(times) if times else 0.0
        if waited:
            self._waited = middle
        return float(max(self._meeting.exchange(middle)))

    @property
    def calm(self) -> bool:
        """Whether enough turns were free of disturbance by other processes."""
        return sum(others <= _NOISY_CORES for others, _ in self._taken) >= self._effort.rounds

    def take(self) -> None:
        """Run one turn; store its times with the CPU use of other processes."""
        if self._meeting.rank == 0:
            self._wait_for_calm()
        self._meeting.exchange(None)
        self._watch.reset()
        times = self._loop(self._iterations)
        others = self._watch.cores()
        self._taken.append((self._meeting.exchange(others)[0], times))

    def _wait_for_calm(self) -> None:
        until = time.monotonic() + self._effort.patience
        while time.monotonic() < until:
            self._watch.reset()
            time.sleep(min(0.1, self._effort.patience))
            if self._watch.cores() <= _NOISY_CORES:
                return

    def _loop(self, iterations: int) -> _Times:
        if not self._case.takes_part(self._meeting.rank):
            return _Times([], [])
        gc.disable()
        try:
            if self._memory.asynchronous:
                return self._time_bursts(iterations)
            times = self._time_each(iterations)
            return _Times(times, times)
        finally:
            gc.enable()

    def _time_each(self, iterations: int) -> list[float]:
        call, now, times = self._call, time.perf_counter_ns, [0] * iterations
        for i in range(iterations):
            begin = now()
            call()
            times[i] = now() - begin
        return [t * self._scale / 1e3 for t in times]

    def _time_bursts(self, iterations: int) -> _Times:
        call, now, wait = self._call, time.perf_counter_ns, self._memory.synchronize
        times = _Times([], [])
        for done in range(0, iterations, self._burst):
            count = min(self._burst, iterations - done)
            begin = now()
            for _ in range(count):
                call()
            free = now()
            wait()
            share = self._scale / 1e3 / count
            times.whole.append((now() - begin) * share)
            times.call.append((free - begin) * share)
        return times

    def record(self) -> Record:
        """The slowest rank's results over the turns with the least disturbance."""
        calmest = sorted(self._taken, key=lambda taken: taken[0])[: self._effort.rounds]
        whole = sorted(t for _, times in calmest for t in times.whole)
        calls = sorted(t for _, times in calmest for t in times.call)
        mine = [0.0] * 7
        if whole:
            waited = self._waited if self._memory.asynchronous else _quantile(whole, 0.5)
            spread = _NOISY_BURSTS if self._memory.asynchronous else _NOISY_SPREAD
            mine = [*(_quantile(whole, q) for q in (0.5, 0.1, 0.9, 0.0)), _quantile(calls, 0.5), waited, spread]
        middle, p10, p90, least, call, waited, spread = max(self._meeting.exchange(mine))
        others = max(others for others, _ in calmest)
        algbw = self._case.bytes / middle / 1e3
        return Record(
            library=self._name,
            op=self._case.op,
            ranks=self._case.ranks,
            dtype=str(self._case.dtype),
            in_place=self._case.in_place,
            size=self._case.bytes,
            count=self._case.count,
            iterations=self._iterations * len(calmest),
            time=middle,
            p10=p10,
            p90=p90,
            least=least,
            call=call,
            waited=waited,
            algbw=algbw,
            busbw=algbw * OPS[self._case.op](self._case.ranks),
            wrong=self._wrong,
            others=others,
            noisy=p90 > spread * p10 or others > _NOISY_CORES,
        )


def _burst(microseconds: float) -> int:
    """How many operations of this duration are enqueued before they are waited for."""
    return int(min(_BURST_MOST, max(1, _BURST_US / max(microseconds, 0.1))))


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]
