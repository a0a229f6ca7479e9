"""Implements the upper-case collectives with xvcomm's operations.

A plan is a function without arguments, created from validated arguments. A blocking call runs it at once; a non-blocking one
puts it into the communicator's queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xvcomm.adapters.mpi.buffers import IN_PLACE, Blocks, block, blocks, carried, vector
from xvcomm.adapters.mpi.ops import SUM, Op
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import ArgumentError

Array = NDArray[Any]
Plan = Callable[[], Any]


class Plans:
    """Creates the plans of one communicator's collectives; `Comm` has methods of the same arguments."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._rank, self._size = comm.rank, comm.size

    def barrier(self) -> Plan:
        """Wait until all ranks have called this."""
        return self._comm.barrier

    def bcast(self, buf: Any, root: int = 0) -> Plan:
        """Copy the root's buffer to every rank."""
        x = carried(vector(buf))
        return lambda: self._comm.broadcast(x, root)

    def gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Plan:
        """Concatenate equal blocks of all ranks on the root."""
        if self._rank != root:
            x = carried(vector(sendbuf))
            return lambda: self._comm.gather(x, root)
        target = block(recvbuf, self._size)
        out = carried(target.flat(self._size))
        mine = _own(out, self._rank, self._size) if _in_place(sendbuf) else carried(vector(sendbuf))
        _check_equal("Gather", mine, out, self._size)
        return lambda: self._comm.gather(mine, root, out=out)

    def gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Plan:
        """Gather blocks of different length on the root, which alone passes counts and displacements, and broadcasts them."""
        if self._rank != root:
            x = carried(vector(sendbuf))
            return lambda: self._comm.gather(x, root, counts=self._told(None, root))
        target = blocks(recvbuf, self._size)
        mine = target.part(root).copy() if _in_place(sendbuf) else vector(sendbuf)
        room = target.room()

        def run() -> None:
            self._comm.gather(carried(mine), root, out=carried(room), counts=self._told(_lengths(target), root))
            target.spread(room)

        return run

    def scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Plan:
        """Send an equal block of the root's buffer to every rank."""
        if self._rank != root:
            out = carried(vector(recvbuf))
            return lambda: self._comm.scatter(None, root, out=out)
        source = carried(block(sendbuf, self._size).flat(self._size))
        room = np.empty(source.size // self._size, source.dtype) if _in_place(recvbuf) else carried(vector(recvbuf))
        _check_equal("Scatter", room, source, self._size)
        return lambda: self._comm.scatter(source, root, out=room)

    def scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Plan:
        """Send a block of different length to every rank; the root alone passes counts and displacements, as in `gatherv`."""
        if self._rank != root:
            out = carried(vector(recvbuf))
            return lambda: self._comm.scatter(None, root, out=out, counts=self._told(None, root))
        source = blocks(sendbuf, self._size)
        x = carried(source.gathered())
        mine = np.empty(source.counts[root], source.type.numpy) if _in_place(recvbuf) else vector(recvbuf)
        return lambda: self._comm.scatter(x, root, out=carried(mine), counts=self._told(_lengths(source), root))

    def allgather(self, sendbuf: Any, recvbuf: Any) -> Plan:
        """Concatenate equal blocks of all ranks on every rank."""
        out = carried(block(recvbuf, self._size).flat(self._size))
        x = _own(out, self._rank, self._size) if _in_place(sendbuf) else carried(vector(sendbuf))
        _check_equal("Allgather", x, out, self._size)
        return lambda: self._comm.all_gather(x, out=out)

    def allgatherv(self, sendbuf: Any, recvbuf: Any) -> Plan:
        """Gather blocks of different length of all ranks on every rank."""
        target = blocks(recvbuf, self._size)
        x = target.part(self._rank).copy() if _in_place(sendbuf) else vector(sendbuf)
        room = target.room()

        def run() -> None:
            self._comm.all_gather(carried(x), out=carried(room), counts=_lengths(target))
            target.spread(room)

        return run

    def alltoall(self, sendbuf: Any, recvbuf: Any) -> Plan:
        """Send an equal block to every rank, and receive one from each."""
        out = carried(block(recvbuf, self._size).flat(self._size))
        x = out.copy() if _in_place(sendbuf) else carried(block(sendbuf, self._size).flat(self._size))
        _check_equal("Alltoall", x, out, 1)
        return lambda: self._comm.all_to_all(x, out=out)

    def alltoallv(self, sendbuf: Any, recvbuf: Any) -> Plan:
        """Send a block of different length to every rank, and receive one from each."""
        target = blocks(recvbuf, self._size)
        source = target if _in_place(sendbuf) else blocks(sendbuf, self._size)
        x = carried(source.gathered())
        if source is target:
            x = x.copy()
        room = target.room()

        def run() -> None:
            self._comm.all_to_all(x, out=carried(room), send_counts=_lengths(source), recv_counts=_lengths(target))
            target.spread(room)

        return run

    def reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Plan:
        """Reduce over all ranks; only the root gets the result."""
        if self._rank != root:
            x = vector(sendbuf)
            return lambda: self._reduce(x, None, op, root)
        out = vector(recvbuf)
        x = out if _in_place(sendbuf) else vector(sendbuf)
        _check_equal("Reduce", x, out, 1)
        return lambda: self._reduce(x, out, op, root)

    def allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
        """Reduce over all ranks; every rank gets bitwise equal results."""
        out = vector(recvbuf)
        x = out if _in_place(sendbuf) else vector(sendbuf)
        _check_equal("Allreduce", x, out, 1)
        return lambda: self._allreduce(x, out, op)

    def reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
        """Reduce over all ranks, and give every rank an equal block of the result."""
        if _in_place(sendbuf):
            x = vector(recvbuf)
            if x.size % self._size:
                raise ArgumentError(f"Reduce_scatter_block: {x.size} elements are not a multiple of {self._size} ranks")
            out = x[: x.size // self._size]
        else:
            x, out = vector(sendbuf), vector(recvbuf)
        _check_equal("Reduce_scatter_block", out, x, self._size)
        return lambda: self._reduce_scatter(x, out, op, (out.size,) * self._size)

    def reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM) -> Plan:
        """Reduce over all ranks, and give every rank a block of different length: without counts that of its buffer."""
        out = vector(recvbuf)
        x = out if _in_place(sendbuf) else vector(sendbuf)
        if recvcounts is None and x is out:
            raise ArgumentError("Reduce_scatter: counts cannot be derived from a buffer with IN_PLACE; pass recvcounts")
        counts = None if recvcounts is None else tuple(int(n) for n in recvcounts)
        if counts is not None and (len(counts) != self._size or min(counts) < 0 or sum(counts) > x.size):
            raise ArgumentError(f"recvcounts {counts}: expected {self._size} numbers that add up to {x.size} elements")

        def run() -> None:
            rows = counts if counts is not None else self._everybodys(out.size)
            self._reduce_scatter(x[: sum(rows)], out[: rows[self._rank]], op, rows)

        return run

    def scan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
        """Reduce over the ranks up to this one. Gathers all buffers on every rank, so it is meant for small ones."""
        return self._scan(sendbuf, recvbuf, op, self._rank + 1)

    def exscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
        """Reduce over the ranks before this one; rank 0's buffer is unchanged. Gathers all buffers like `scan`."""
        return self._scan(sendbuf, recvbuf, op, self._rank)

    def _scan(self, sendbuf: Any, recvbuf: Any, op: Op, ranks: int) -> Plan:
        """Reduce over the first ranks."""
        out = vector(recvbuf)
        x = out if _in_place(sendbuf) else vector(sendbuf)
        _check_equal("Scan", x, out, 1)

        def run() -> None:
            rows = self._gathered(x)[:ranks]
            if len(rows):
                out[...] = op.fold(rows)

        return run

    def _reduce(self, x: Array, out: Array | None, op: Op, root: int) -> None:
        if op.carries(x.dtype):
            self._comm.reduce(x, root, str(op.core), out=None if out is x else out)
        elif op.logical is not None and self._size > 1:  # a single rank's values are returned unchanged
            truth = self._comm.reduce((x != 0).view(np.uint8), root, op.logical)
            if out is not None:
                out[...] = truth
        else:
            rows = self._comm.gather(carried(x), root)
            if out is not None:
                out[...] = op.fold(rows.view(x.dtype).reshape(self._size, -1))

    def _allreduce(self, x: Array, out: Array, op: Op) -> None:
        if op.carries(x.dtype):
            self._comm.all_reduce(x, str(op.core), out=None if out is x else out)
        elif op.logical is not None and self._size > 1:  # a single rank's values are returned unchanged
            out[...] = self._comm.all_reduce((x != 0).view(np.uint8), op.logical)
        else:
            out[...] = op.fold(self._gathered(x))

    def _reduce_scatter(self, x: Array, out: Array, op: Op, counts: tuple[int, ...]) -> None:
        if op.carries(x.dtype):
            apart = not np.may_share_memory(x, out)
            result = self._comm.reduce_scatter(x, str(op.core), out=out if apart else None, counts=counts)
            if not apart:
                out[...] = result
        elif op.logical is not None and self._size > 1:  # a single rank's values are returned unchanged
            out[...] = self._comm.reduce_scatter((x != 0).view(np.uint8), op.logical, counts=counts)
        else:
            start = sum(counts[: self._rank])
            out[...] = op.fold(self._gathered(x))[start : start + counts[self._rank]]

    def _gathered(self, x: Array) -> Array:
        """The vectors of all ranks, as rows."""
        everything: Array = self._comm.all_gather(carried(x)).view(x.dtype)
        return everything.reshape(self._size, -1)

    def _told(self, counts: tuple[int, ...] | None, root: int) -> list[int]:
        """Broadcast the root's counts."""
        known = np.empty(self._size, np.int64) if counts is None else np.array(counts, np.int64)
        told: list[int] = self._comm.broadcast(known, root).tolist()
        return told

    def _everybodys(self, count: int) -> tuple[int, ...]:
        return tuple(self._comm.all_gather(np.array([count], np.int64)).tolist())


def _in_place(buf: Any) -> bool:
    return buf is IN_PLACE or buf is None


def _own(out: Array, rank: int, size: int) -> Array:
    """Copy of this rank's block of a buffer that an operation overwrites."""
    each = out.size // size
    return out[rank * each : (rank + 1) * each].copy()


def _lengths(b: Blocks) -> tuple[int, ...]:
    """Counts in elements as xvcomm sees them: in bytes if the data is sent as bytes."""
    return b.counts if b.type.carried else tuple(n * b.type.size for n in b.counts)


def _check_equal(what: str, one: Array, all_: Array, ranks: int) -> None:
    """Raise ArgumentError if this rank's two buffers differ, which the collective would report less clearly."""
    if one.dtype != all_.dtype or one.size * ranks != all_.size:
        raise ArgumentError(
            f"{what}: {one.size} x {one.dtype}"
            + (f" a rank, {ranks} ranks," if ranks > 1 else "")
            + f" and {all_.size} x {all_.dtype}; both buffers must be equal"
        )
