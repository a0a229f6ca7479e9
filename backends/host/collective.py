"""The host's native collective library: compiled kernels over an arena that the island's ranks share."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import astuple

import numpy as np

from xvcomm.abc.collective import Collective, CollectiveStalled, CollectiveStopped
from xvcomm.abc.device import Stream
from xvcomm.abc.store import Store
from xvcomm.atomics import READY, STOPPED
from xvcomm.backends.host import kernels
from xvcomm.backends.host.batch import BUDGET
from xvcomm.backends.host.kernels import Mode
from xvcomm.backends.host.reducers import BLOCK, kit, scaler
from xvcomm.config import Config
from xvcomm.deadline import Deadline
from xvcomm.dtype import DType, ReduceOp, Reduction
from xvcomm.ring import ABORT, LINE
from xvcomm.shm import PAGE, Segment, round_up

ONE_SHOT = 8 << 10
"""Bytes up to which an all-reduce takes one barrier and reduces everything everywhere."""

_ATTACHED = 2 * LINE
_Functions = tuple[tuple[int, ...], tuple[int, float, int]]
_PIECES = 3


def fair_blocks(count: int, ranks: int, itemsize: int) -> np.ndarray:
    """Offsets and bytes (2 x ranks) of the shares of `count` elements, cut at cache lines."""
    grain = max(1, 64 // itemsize)
    share = round_up(-(-count // ranks), grain)
    cuts = np.minimum(np.arange(ranks + 1, dtype=np.int64) * share, count) * itemsize
    return np.ascontiguousarray(np.stack([cuts[:-1], np.diff(cuts)]))


def blocks(counts: Sequence[int], itemsize: int) -> np.ndarray:
    """Offsets and bytes (2 x ranks) of blocks that lie one after the other."""
    sizes = np.asarray(counts, np.int64) * itemsize
    return np.ascontiguousarray(np.stack([np.cumsum(sizes) - sizes, sizes]))


class HostCollective(Collective):
    """One island's shared arena, seen from one member. One call at a time."""

    def __init__(self, config: Config, job: str, me: int, ranks: int, name: str, store: Store, deadline: Deadline) -> None:
        """Map the arena that member 0 makes; its name leaves the folder when the last member has mapped it."""
        self._me, self._ranks = me, ranks
        self._stage = max(config.stage_bytes, 64 * ranks)
        size = kernels.stages(ranks) + 2 * ranks * self._stage
        if me == 0:
            self._segment = Segment.create(config.shm_dir, job, size)
            store.set(name, self._segment.name.encode())
        else:
            self._segment = Segment.attach(config.shm_dir, store.get(name, deadline).decode())
        self._arena = self._segment.address
        if kernels.join(self._arena + _ATTACHED) == ranks - 1:
            self._segment.unlink()
        self._spins = int(config.spin_us * 500)
        self._state = np.zeros(4, np.int64)
        self._accumulator = np.empty(BLOCK * 16, np.uint8)
        self._work = np.zeros(ranks + 1, np.int64)
        self._work[ranks] = self._accumulator.ctypes.data
        self._kits: dict[int, _Functions] = {}
        self._fair: dict[tuple[int, int], np.ndarray] = {}

    def all_reduce(self, src: int, dst: int, count: int, dtype: DType, op: Reduction, stream: Stream) -> None:
        """See `Collective.all_reduce`."""
        nbytes = count * dtype.itemsize
        if nbytes <= min(ONE_SHOT, self._stage):
            numbers, scale = self._functions(dtype, op)
            src, _keep = self._scaled_input(src, count, dtype, op)
            self._run(kernels.one_shot, stream, src, dst, nbytes, numbers, scale, dtype.itemsize, self._work)
        else:
            self._reduce(src, dst, self._shares(count, dtype.itemsize), Mode.ALL, 0, dtype, op, stream)

    def reduce(self, src: int, dst: int, count: int, dtype: DType, op: Reduction, root: int, stream: Stream) -> None:
        """See `Collective.reduce`."""
        self._reduce(src, dst, self._shares(count, dtype.itemsize), Mode.ROOT, root, dtype, op, stream)

    def reduce_scatter(
        self, src: int, dst: int, counts: Sequence[int], dtype: DType, op: Reduction, stream: Stream
    ) -> None:
        """See `Collective.reduce_scatter`."""
        self._reduce(src, dst, blocks(counts, dtype.itemsize), Mode.SCATTER, 0, dtype, op, stream)

    def all_gather(self, src: int, dst: int, counts: Sequence[int], dtype: DType, stream: Stream) -> None:
        """See `Collective.all_gather`."""
        parts = np.zeros((4, self._ranks), np.int64)
        parts[1, 0] = counts[self._me] * dtype.itemsize
        parts[2:] = blocks(counts, dtype.itemsize)
        self._exchange(src, dst, parts, 1, stream)

    def broadcast(self, src: int, dst: int, count: int, dtype: DType, root: int, stream: Stream) -> None:
        """See `Collective.broadcast`."""
        parts = np.zeros((4, self._ranks), np.int64)
        if self._me == root:
            parts[1, 0] = count * dtype.itemsize
        if self._me != root or src != dst:
            parts[3, root] = count * dtype.itemsize
        self._exchange(src, dst, parts, 1, stream)

    def gather(self, src: int, dst: int, counts: Sequence[int], dtype: DType, root: int, stream: Stream) -> None:
        """See `Collective.gather`."""
        parts = np.zeros((4, self._ranks), np.int64)
        if self._me == root:
            parts[2:] = blocks(counts, dtype.itemsize)
        else:
            parts[1, 0] = counts[self._me] * dtype.itemsize
        self._exchange(src, dst, parts, 1, stream)

    def scatter(self, src: int, dst: int, counts: Sequence[int], dtype: DType, root: int, stream: Stream) -> None:
        """See `Collective.scatter`."""
        parts = np.zeros((4, self._ranks), np.int64)
        if self._me == root:
            parts[:2] = blocks(counts, dtype.itemsize)
        parts[3, root] = counts[self._me] * dtype.itemsize
        self._exchange(src, dst, parts, self._ranks, stream)

    def all_to_all(
        self, src: int, dst: int, counts: Sequence[int], recv_counts: Sequence[int], dtype: DType, stream: Stream
    ) -> None:
        """See `Collective.all_to_all`."""
        parts = np.concatenate([blocks(counts, dtype.itemsize), blocks(recv_counts, dtype.itemsize)])
        self._exchange(src, dst, np.ascontiguousarray(parts), self._ranks, stream)

    def abort(self, word: int) -> None:
        """See `Collective.abort`."""
        if self._arena:
            cell = ctypes.c_int64.from_address(self._arena + ABORT)
            if not cell.value:
                cell.value = word

    def error(self) -> int:
        """See `Collective.error`."""
        return ctypes.c_int64.from_address(self._arena + ABORT).value if self._arena else 0

    def close(self) -> None:
        """See `Collective.close`."""
        if self._arena:
            self._arena = 0
            self._segment.unlink()
            self._segment.close()

    def _shares(self, count: int, itemsize: int) -> np.ndarray:
        found = self._fair.get((count, itemsize))
        if found is None:
            if len(self._fair) > 1000:
                self._fair.clear()
            found = self._fair[count, itemsize] = fair_blocks(count, self._ranks, itemsize)
        return found

    def _functions(self, dtype: DType, op: Reduction) -> _Functions:
        """The kernels' arguments for a reduction: the kit's addresses; scaler or 0, factor, divisor."""
        key = dtype.code << 8 | op.op
        found = self._kits.get(key)
        if found is None:
            average = op.op is ReduceOp.AVG and not dtype.small_range
            scale = (scaler(dtype) if average else 0, 0.0, self._ranks)
            found = self._kits[key] = astuple(kit(dtype, op.base)), scale
        return found

    def _scaled_input(self, src: int, count: int, dtype: DType, op: Reduction) -> tuple[int, np.ndarray | None]:
        """The input's address, or that of a scaled copy (which must be kept): premul_sum, averages that may overflow."""
        divisor = self._ranks if op.op is ReduceOp.AVG and dtype.small_range else 0
        if op.op is not ReduceOp.PREMUL_SUM and not divisor:
            return src, None
        scaled = np.empty(count * dtype.itemsize, np.uint8)
        kernels.scale(scaler(dtype), scaled.ctypes.data, src, count, op.factor, divisor)
        return int(scaled.ctypes.data), scaled

    def _reduce(
        self, src: int, dst: int, table: np.ndarray, mode: Mode, root: int, dtype: DType, op: Reduction, stream: Stream
    ) -> None:
        numbers, scale = self._functions(dtype, op)
        total = int(table[1].sum()) // dtype.itemsize
        src, _keep = self._scaled_input(src, total, dtype, op)
        self._run(kernels.reduce, stream, int(mode), root, src, dst, table, numbers, scale, dtype.itemsize, self._work)

    def _exchange(self, src: int, dst: int, parts: np.ndarray, columns: int, stream: Stream) -> None:
        self._run(kernels.exchange, stream, columns, src, dst, parts)

    def _run(self, kernel, stream: Stream, *arguments) -> None:  # type: ignore[no-untyped-def]
        stream.synchronize()
        state = self._state
        state[:_PIECES] = 0
        while True:
            code = kernel(self._arena, self._ranks, self._me, self._stage, *arguments, state, self._spins, BUDGET)
            if code == READY:
                return
            if code == STOPPED:
                raise CollectiveStopped(self.error())
            if stream.deadline.expired():
                raise CollectiveStalled(self._missing())

    def _missing(self) -> list[int]:
        """Members that arrived less often than this one."""
        arrivals = [
            ctypes.c_int64.from_address(self._arena + PAGE + r * LINE).value for r in range(self._ranks)
        ]
        return [r for r, n in enumerate(arrivals) if n < arrivals[self._me]]
