"""Benchmarks of the movers between two NVIDIA GPUs of one host: messages through rings in host memory beside raw copies.

Run it on a quiet machine: `python benchmarks/mover.py`. It starts its two processes itself. Everything is measured in
one run; each ratio is to cudaMemcpyAsync on the same GPUs, with as many bytes in the same directions at the same
time. The transferred data is verified too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cupy.cuda import runtime as cuda

from xvcomm.backends.cuda.runtime import CudaRuntime
from xvcomm.backends.gpu.kernels import STATE_BYTES, Kernels, Transfer
from xvcomm.config import Config
from xvcomm.jit.cache import KernelCache
from xvcomm.memory.ring import Message, RingEnd, RingLayout
from xvcomm.memory.segment import Segment
from xvcomm.types.dtype import BY_NAME, ReduceOp
from xvcomm.types.opcode import OpCode

FLOAT32 = BY_NAME["float32"]
SIZES = ("8", "4K", "64K", "1M", "16M", "64M", "256M")
FROM_BULK = 1 << 20
PATIENCE = 60.0
REPEATS = 5


def sample(rank: int, count: int) -> np.ndarray:
    """The data that a rank sends: whole numbers, so that sums are exact."""
    return np.random.default_rng(rank).integers(-1000, 1000, count).astype(np.float32)


class Side:
    """One of the two processes: its GPU, its memory, and the barrier with the other process."""

    def __init__(self, rank: int, barrier: Any, times: Any, cache: str, most: int) -> None:
        self.rank, self.barrier, self.times = rank, barrier, times
        self.runtime = CudaRuntime()
        self.runtime.use(rank)
        self.kernels = Kernels(self.runtime, rank, KernelCache(cache))
        self.streams = (self.runtime.stream(), self.runtime.stream())
        self.data, self.target = self.runtime.allocate(most + 64), self.runtime.allocate(most + 64)
        self.write(self.data, sample(rank, most // 4 + 16))
        self.pinned = [Segment.create(Config().shm_dir, "raw", most) for _ in "io"]
        for segment in self.pinned:
            segment.unlink()
            self.runtime.register(segment.address, segment.size)

    def write(self, address: int, values: np.ndarray) -> None:
        """Copy an array to the device."""
        self.runtime.copy(address, values.ctypes.data, values.nbytes, self.streams[0])
        cuda.streamSynchronize(self.streams[0])

    def read(self, address: int, count: int) -> np.ndarray:
        """Copy an array from the device."""
        values = np.empty(count, np.float32)
        self.runtime.copy(values.ctypes.data, address, values.nbytes, self.streams[0])
        cuda.streamSynchronize(self.streams[0])
        return values

    def settle(self) -> None:
        """Wait for the GPU to be idle."""
        for stream in self.streams:
            cuda.streamSynchronize(stream)

    def timed(self, step: Callable[[], None], rounds: int, repeats: int = REPEATS) -> float:
        """Seconds of one round on the slower rank: the median of several repeats, after one warm-up."""
        found = []
        for _ in range(repeats + 1):
            self.settle()
            self.barrier.wait(PATIENCE)
            begun = time.perf_counter()
            for _ in range(rounds):
                step()
            self.settle()
            self.times[self.rank] = (time.perf_counter() - begun) / rounds
            self.barrier.wait(PATIENCE)
            found.append(max(self.times))
        return statistics.median(found[1:])

    def raw(self, nbytes: int, out: bool, back: bool) -> Callable[[], None]:
        """Copy to pinned host memory, from it, or both at the same time, by the copy engines."""

        def step() -> None:
            if out:
                self.runtime.copy(self.pinned[0].address, self.data, nbytes, self.streams[0])
            if back:
                self.runtime.copy(self.target, self.pinned[1].address, nbytes, self.streams[1])

        return step


class Link:
    """Both rings between the processes, as one of them maps them. `names[r]` is the segment that rank r writes."""

    def __init__(self, side: Side, names: Sequence[str]) -> None:
        self.side = side
        runtime, peer = side.runtime, 1 - side.rank
        self.ends, self.rings, self.states = [], [], []
        for number, producer in ((side.rank, True), (peer, False)):
            segment = Segment.attach(Config().shm_dir, names[number])
            self.ends.append(RingEnd.open(segment, peer=peer, producer=producer))
            self.rings.append(runtime.register(segment.address, segment.size))
            self.states.append(runtime.allocate(STATE_BYTES))
            runtime.zero(self.states[-1], STATE_BYTES, side.streams[0])
        side.settle()

    def transfer(self, producer: bool, nbytes: int, op: ReduceOp | None = None, offset: int = 0) -> Transfer:
        """Send or receive one message through one of the rings."""
        number = 0 if producer else 1
        end, data = self.ends[number], (self.side.data if producer else self.side.target) + offset
        message = Message(OpCode.SEND, FLOAT32.code, nbytes, 0)
        return Transfer(
            self.rings[number], 0, self.states[number], end.geometry, producer, data, message, end.peer, op
        )  # fmt: skip

    def one_way(self, nbytes: int, op: ReduceOp | None = None, offset: int = 0) -> Callable[[], None]:
        """Rank 0 sends, rank 1 receives."""
        sends = self.side.rank == 0
        transfers = [self.transfer(sends, nbytes, None if sends else op, offset)]
        return lambda: self.side.kernels.move(transfers, self.side.streams[0])

    def both_ways(self, nbytes: int, op: ReduceOp | None = None) -> Callable[[], None]:
        """Both ranks send and receive at the same time, in one launch."""
        transfers = [self.transfer(True, nbytes), self.transfer(False, nbytes, op)]
        return lambda: self.side.kernels.move(transfers, self.side.streams[0])

    def round_trip(self, nbytes: int) -> Callable[[], None]:
        """Rank 0 sends and receives, rank 1 receives and sends."""
        launches = [[self.transfer(True, nbytes)], [self.transfer(False, nbytes)]]
        first, second = launches if self.side.rank == 0 else reversed(launches)

        def step() -> None:
            self.side.kernels.move(first, self.side.streams[0])
            self.side.kernels.move(second, self.side.streams[0])

        return step

    def check(self, nbytes: int) -> None:
        """Send and reduce once, and compare with the expected data.

        Raises:
            AssertionError: other data arrived.
        """
        side, count = self.side, nbytes // 4
        theirs = sample(1 - side.rank, count)
        for op, want in ((None, theirs), (ReduceOp.SUM, theirs + theirs)):
            side.barrier.wait(PATIENCE)
            self.both_ways(nbytes, op)()
            side.settle()
            assert np.array_equal(side.read(side.target, count), want), f"{nbytes} bytes, {op}"

    def close(self) -> None:
        """Unregister and unmap."""
        for end in self.ends:
            self.side.runtime.unregister(end.address)
            end.close()


class Rings:
    """The segments of both rings, created before the processes start; leaving the block unlinks their names."""

    def __init__(self, layout: RingLayout) -> None:
        self._segments = [Segment.create(Config().shm_dir, "mover", layout.size) for _ in range(2)]
        for segment in self._segments:
            RingEnd.create(segment, layout, peer=0, producer=True)
        self.names = [segment.name for segment in self._segments]

    def __enter__(self) -> Rings:
        return self

    def __exit__(self, *exception: object) -> None:
        for segment in self._segments:
            segment.unlink()


def start(sides: Callable[..., None], *args: Any) -> None:
    """Run `sides(rank, barrier, times, *args)` in two processes.

    Raises:
        SystemExit: one of them failed.
    """
    context = multiprocessing.get_context("spawn")
    shared = (context.Barrier(2), context.Array("d", 2, lock=False))
    ranks = [context.Process(target=sides, args=(rank, *shared, *args)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        sys.exit(1)


def parse_size(text: str) -> int:
    """Parse a size in bytes: `8`, `4K`, `256M`."""
    unit = {"K": 10, "M": 20, "G": 30}.get(text[-1], 0)
    return int(text[:-1] if unit else text) << unit


def size_text(nbytes: int) -> str:
    """Format a size in bytes: the inverse of `parse_size`."""
    unit = 20 if nbytes >= 1 << 20 else 10 if nbytes >= 1 << 10 else 0
    return f"{nbytes >> unit}{' KM'[unit // 10].strip()}"


def line(*cells: Any) -> str:
    """One row of a Markdown table."""
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def bulk(side: Side, link: Link, nbytes: int) -> str:
    """GB/s of large messages, per direction, and ratios to raw copies."""
    rounds = max(4, min(50, (1 << 30) // nbytes))
    first = side.rank == 0
    raws = (side.raw(nbytes, first, not first), side.raw(nbytes, True, True), side.raw(nbytes, first, first))
    raw = [side.timed(step, rounds) for step in raws]
    steps = (
        link.one_way(nbytes), link.one_way(nbytes, ReduceOp.SUM), link.one_way(nbytes, None, 4),
        link.both_ways(nbytes), link.both_ways(nbytes, ReduceOp.SUM),
    )  # fmt: skip
    times = [side.timed(step, rounds) for step in steps]
    rate = [f"{nbytes / t / 1e9:.1f}" for t in raw]
    moved = [f"{nbytes / t / 1e9:.1f} ({raw[i] / t:.2f})" for t, i in zip(times, (0, 0, 0, 1, 1), strict=True)]
    return line(size_text(nbytes), *rate, *moved)


def small(side: Side, link: Link, nbytes: int) -> str:
    """Microseconds of small messages: a round trip, and the host's time for a launch."""
    step, calls = link.round_trip(nbytes), 200
    trip = side.timed(step, calls)
    side.barrier.wait(PATIENCE)
    begun = time.perf_counter()
    for _ in range(calls):
        step()
    cost = (time.perf_counter() - begun) / calls / 2
    side.settle()
    return line(size_text(nbytes), f"{trip * 1e6:.1f}", f"{cost * 1e6:.1f}")


def measure(rank: int, barrier: Any, times: Any, names: Sequence[str], sizes: Sequence[int], cache: str) -> None:
    """Main function of each of the two processes."""
    side = Side(rank, barrier, times, cache, max(*sizes, FROM_BULK))
    link = Link(side, names)
    for title, report, chosen in (
        (("bytes", "round trip, µs", "launch on the host, µs"), small, [n for n in sizes if n < FROM_BULK]),
        (
            ("bytes", "raw one way", "raw both ways", "raw both ways, one GPU", "one way", "one way, reducing",
             "one way, unaligned", "both ways", "both ways, reducing"), bulk, [n for n in sizes if n >= FROM_BULK],
        ),
    ):  # fmt: skip
        rows = [line(*title), line(*("---:" for _ in title))]
        for nbytes in chosen:
            link.check(nbytes)
            rows.append(report(side, link, nbytes))
        if rank == 0 and chosen:
            print("\n".join(rows), end="\n\n", flush=True)
    link.close()


def main() -> None:
    """Measure and print."""
    defaults = Config.from_env()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="message sizes, for instance 8 4K 256M")
    parser.add_argument("--lanes", type=int, default=defaults.gpu_ring_lanes)
    parser.add_argument("--slots", type=int, default=defaults.gpu_ring_slots)
    parser.add_argument("--slot-bytes", type=int, default=defaults.gpu_ring_slot_bytes)
    options = parser.parse_args()
    layout = RingLayout(options.lanes, options.slots, options.slot_bytes)
    print(f"{layout.lanes} lanes, {layout.slots} slots of {layout.slot_bytes >> 10} KiB; GB/s (ratio to raw)\n")
    with tempfile.TemporaryDirectory() as cache, Rings(layout) as rings:
        start(measure, rings.names, [parse_size(size) for size in options.sizes], cache)


if __name__ == "__main__":
    main()
