"""How `xvcomm bench` and the benchmarks measure: the same operation by several libraries, in turns, in one job.

Every rank runs the same calls. What is timed is one operation at a time, on every rank; a case's time is the slowest
rank's median. The libraries take turns in rounds, so that a disturbance meets all of them, and rounds during which
other processes were busy are run again.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from xvcomm.abc.store import Store
from xvcomm.deadline import Deadline
from xvcomm.dtype import DType

_TICK = os.sysconf("SC_CLK_TCK")
_TICK_ERROR = 3 / _TICK
_PERIOD = 3 << 16
_MOST = 20_000
_NOISY_SPREAD = 3.0
_NOISY_CORES = 0.1

#: Operations and their bus-bandwidth factor for n ranks, as nccl-tests defines them.
OPS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "all_to_all": lambda n: (n - 1) / n,
    "sendrecv": lambda n: 1.0,
    "p2p": lambda n: 1.0,
    "barrier": lambda n: 0.0,
}
#: Libraries that can be measured beside xvcomm.
PEERS = ("gloo", "mpi", "memcpy")
_DIVIDED = frozenset(("all_gather", "reduce_scatter", "all_to_all"))
_SUMS = frozenset(("all_reduce", "reduce", "reduce_scatter"))


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table.

    Attributes:
        op: a key of `OPS`. `p2p` is a ping-pong between ranks 0 and 1, its time one way; root is rank 0.
        size: bytes as nccl-tests counts them: of the larger of input and output.
        dtype: element type.
        ranks: size of the job.
        in_place: whether the result replaces the input, where the operation has both.
    """

    op: str
    size: int
    dtype: DType
    ranks: int
    in_place: bool

    @property
    def block(self) -> int:
        """Elements a rank of the operations that divide, else elements of the array."""
        parts = self.ranks if self.op in _DIVIDED else 1
        return self.size // (self.dtype.itemsize * parts)

    @property
    def count(self) -> int:
        """Elements of the larger of input and output."""
        return self.block * (self.ranks if self.op in _DIVIDED else 1)

    @property
    def bytes(self) -> int:
        """`size` less what does not divide."""
        return self.count * self.dtype.itemsize

    def takes_part(self, rank: int) -> bool:
        """Whether `rank` has anything to do."""
        return self.op != "p2p" or rank < 2


@dataclass(slots=True)
class Buffers:
    """One rank's input and output; the same memory for in-place operations."""

    src: Any
    dst: Any


def allocate(case: Case) -> Buffers:
    """Zeroed buffers of the case's sizes, every page touched."""
    dtype = case.dtype.numpy
    if case.op == "all_gather":
        dst = np.zeros(case.count, dtype)
        buffers = Buffers(np.zeros(case.block, dtype), dst)
    elif case.op == "reduce_scatter":
        buffers = Buffers(np.zeros(case.count, dtype), np.zeros(case.block, dtype))
    else:
        src = np.zeros(case.count, dtype)
        alike = case.op == "broadcast" or (case.in_place and case.op in ("all_reduce", "reduce"))
        buffers = Buffers(src, src if alike else np.zeros(case.count, dtype))
    buffers.src[...] = 0
    buffers.dst[...] = 0
    return buffers


def fill(case: Case, rank: int, buffers: Buffers) -> None:
    """Put this rank's pattern into the input, and nonsense into a separate output."""
    buffers.dst[...] = 9
    buffers.src[...] = _pattern(case, rank, 0, len(buffers.src))


def wrong(case: Case, rank: int, buffers: Buffers) -> int:
    """Number of elements of the output that differ from what the operation defines."""
    n, block = case.ranks, case.block
    if case.op in ("all_gather", "all_to_all"):
        start = rank * block if case.op == "all_to_all" else 0
        want = np.concatenate([_pattern(case, source, start, block) for source in range(n)])
    elif case.op in _SUMS:
        if case.op == "reduce" and rank != 0:
            return 0
        want = _sum(case, rank * block if case.op == "reduce_scatter" else 0, block)
    elif case.op == "barrier" or not case.takes_part(rank):
        return 0
    else:
        source = {"broadcast": 0, "p2p": 1 - rank, "sendrecv": (rank - 1) % n}[case.op]
        want = _pattern(case, source, 0, block)
    return int(np.count_nonzero(buffers.dst != want))


def _pattern(case: Case, rank: int, start: int, count: int) -> Any:
    tile = (np.arange(start, start + min(count, _PERIOD)) + rank) % 3
    return np.resize(tile.astype(case.dtype.numpy), count)


def _sum(case: Case, start: int, count: int) -> Any:
    index = np.arange(start, start + min(count, _PERIOD))
    tile = sum((index + rank) % 3 for rank in range(case.ranks))
    return np.resize(np.asarray(tile).astype(case.dtype.numpy), count)


class Contender(Protocol):
    """A library that can be measured.

    Attributes:
        name: what the table calls it.
        communicates: False for a mere reference, whose results are not checked.
    """

    name: str
    communicates: bool

    def refuses(self, case: Case) -> str | None:
        """Why it cannot run the case, or None."""

    def bind(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        """One operation as a call without arguments. For p2p: a round trip."""

    def close(self) -> None:
        """Let go of everything."""


class Meeting:
    """Where the ranks agree between measurements: through the store, which blocks, so that waiting ranks stay quiet."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self._store, self.rank, self.size, self._timeout = store, rank, size, timeout
        self._count = 0

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value (anything JSON can hold), in rank order; blocks until all have come."""
        self._count += 1
        deadline = Deadline.after(self._timeout)
        key = f"bench/{self._count}"
        self._store.set(f"{key}/{self.rank}", json.dumps(value).encode())
        return [json.loads(self._store.get(f"{key}/{rank}", deadline)) for rank in range(self.size)]


class Bystanders:
    """How busy the machine's other processes are, in cores."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self.reset()

    def reset(self) -> None:
        """Start to watch."""
        self._begin = self._read()

    def cores(self) -> float:
        """Cores that others used since `reset`."""
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
        seconds: time to spend on a case by each library, in all.
        iterations: fixed number of iterations a round instead, or None.
        warmup: iterations before the first round.
        rounds: turns each library takes.
        patience: seconds to wait before a turn for other processes to calm down, at most; with 0 disturbed turns are
            not repeated either.
    """

    seconds: float = 0.3
    iterations: int | None = None
    warmup: int = 5
    rounds: int = 3
    patience: float = 1.0


@dataclass(frozen=True, slots=True)
class Record:
    """What was measured of one case by one library.

    Attributes:
        time: median of the slowest rank in microseconds; `p10`, `p90` and `least` are of the same rank.
        algbw: size over time in 10^9 bytes a second; `busbw` is what the links carried of it.
        wrong: elements in error over all ranks; None for a reference that does not communicate.
        others: cores that other processes used meanwhile.
        noisy: whether the figure is doubtful: iterations differ widely, or others were busy.
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
    algbw: float
    busbw: float
    wrong: int | None
    others: float
    noisy: bool


def measure(
    case: Case, contenders: Sequence[Contender], meeting: Meeting, watch: Bystanders, effort: Effort
) -> list[Record]:
    """Measure a case by each library that can run it. Collective: every rank calls it with the same arguments.

    Returns:
        A record a library, in the order of `contenders`, the same on every rank.
    """
    turns = [_Turns(case, c, meeting, watch, effort) for c in contenders if c.refuses(case) is None]
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


class _Turns:
    """One library's turns at one case."""

    def __init__(self, case: Case, contender: Contender, meeting: Meeting, watch: Bystanders, effort: Effort) -> None:
        self._case, self._name, self._checked = case, contender.name, contender.communicates
        self._meeting, self._watch, self._effort = meeting, watch, effort
        self._buffers = allocate(case)
        self._call = contender.bind(case, self._buffers)
        self._scale = 0.5 if case.op == "p2p" else 1.0
        self._iterations = 1
        self._wrong: int | None = None
        self._taken: list[tuple[float, list[float]]] = []

    def check(self) -> None:
        """Run once on a pattern and count what is wrong on any rank; then leave zeros, whose sums stay zeros."""
        if not self._checked:
            return
        rank = self._meeting.rank
        fill(self._case, rank, self._buffers)
        self._meeting.exchange(None)
        self._loop(1)
        self._wrong = sum(self._meeting.exchange(wrong(self._case, rank, self._buffers)))
        self._buffers.src[...] = 0

    def calibrate(self) -> None:
        """Warm up, and settle on a number of iterations that is the same on every rank."""
        effort = self._effort
        self._meeting.exchange(None)
        times = self._loop(max(1, effort.warmup))
        slowest = max(self._meeting.exchange(statistics.median(times) if times else 0.0)) / self._scale
        wanted = effort.seconds * 1e6 / effort.rounds / max(slowest, 0.1)
        self._iterations = effort.iterations or int(min(_MOST, max(3, wanted)))

    @property
    def calm(self) -> bool:
        """Whether enough turns were not disturbed by other processes."""
        return sum(others <= _NOISY_CORES for others, _ in self._taken) >= self._effort.rounds

    def take(self) -> None:
        """One turn; what it measured is kept with how busy others were."""
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

    def _loop(self, iterations: int) -> list[float]:
        if not self._case.takes_part(self._meeting.rank):
            return []
        call, now, times = self._call, time.perf_counter_ns, [0] * iterations
        gc.disable()
        try:
            for i in range(iterations):
                begin = now()
                call()
                times[i] = now() - begin
        finally:
            gc.enable()
        return [t * self._scale / 1e3 for t in times]

    def record(self) -> Record:
        """The slowest rank's figures over the calmest turns."""
        calmest = sorted(self._taken, key=lambda taken: taken[0])[: self._effort.rounds]
        pooled = sorted(t for _, times in calmest for t in times)
        mine = [_quantile(pooled, q) for q in (0.5, 0.1, 0.9, 0.0)] if pooled else [0.0] * 4
        middle, p10, p90, least = max(self._meeting.exchange(mine))
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
            algbw=algbw,
            busbw=algbw * OPS[self._case.op](self._case.ranks),
            wrong=self._wrong,
            others=others,
            noisy=p90 > _NOISY_SPREAD * p10 or others > _NOISY_CORES,
        )


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]
