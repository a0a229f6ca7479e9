"""Collectives of a communicator: arguments are checked, an output is made where none is given, and one request is run."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

from xvcomm.comm.counts import blocks, in_elements, own_block, whole
from xvcomm.engine import collectives
from xvcomm.engine.context import Context
from xvcomm.engine.inflight.work import Work
from xvcomm.engine.request import CollectiveRequest, Key
from xvcomm.errors import ArgumentError, ArrayError
from xvcomm.memory import array
from xvcomm.memory.array_view import ArrayView
from xvcomm.types.deadline import Deadline, checked
from xvcomm.types.dtype import UINT8, ReduceOp, Reduction, reduction_on
from xvcomm.types.opcode import OpCode

Op = str | ReduceOp | Reduction
# Looked up once: access to a member of an Enum takes longer than most steps of a small operation.
_BROADCAST, _ALL_REDUCE = OpCode.BROADCAST, OpCode.ALL_REDUCE
_ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL = OpCode.ALL_GATHER, OpCode.REDUCE_SCATTER, OpCode.ALL_TO_ALL


class Collectives:
    """Part of Communicator; see there for the common arguments and errors.

    Attributes:
        collectives: runs `CollectiveRequest`s, and prepares them for compiled code; for adapters.
    """

    _context: Context
    collectives: collectives.Collectives
    rank: int
    size: int
    timeout: float

    def broadcast(
        self, x: Any, root: int = 0, *, async_op: bool = False, timeout: float | None = None, stream: Any = None
    ) -> Any:
        """Copy the root's array to every rank.

        Args:
            x: the array on the root; on the other ranks a buffer of equal shape and dtype.
        """
        self._check_root(root)
        mine = self.rank == root
        src = array.view(x, output=not mine)
        key = _key(_BROADCAST, root, src, src, async_op)
        if key and self.collectives.again(key, src, src, self.timeout if timeout is None else checked(timeout), stream):
            return src.array
        dst = src if mine or not src.immutable else self._empty_like(src, src.shape)
        call = CollectiveRequest(_BROADCAST, src, dst, src.dtype, count=src.count, root=root, key=key)
        return self._call(call, async_op, timeout, stream)

    def all_reduce(
        self, x: Any, op: Op = "sum", *, out: Any = None,
        async_op: bool = False, timeout: float | None = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Reduce elementwise over all ranks; every rank gets bitwise equal results.

        Args:
            x: the input; also the output unless `out` is given or `x` is immutable.
            op: `"sum"`, `"avg"`, `"prod"`, `"min"`, `"max"`, `"band"`, `"bor"`, `"bxor"`, `xvcomm.premul_sum(factor)`.
            out: output of equal shape and dtype.
        """
        src, given = array.view(x, output=out is None), None if out is None else array.view(out, output=True)
        dst = given or src
        key = _key(_ALL_REDUCE, op, src, dst, async_op)
        if key and self.collectives.again(key, src, dst, self.timeout if timeout is None else checked(timeout), stream):
            return dst.array
        how = reduction_on(op, src.dtype)
        if given or src.immutable:
            dst = self._output(src, given, None, src.count)
        call = CollectiveRequest(_ALL_REDUCE, src, dst, src.dtype, how, count=src.count, key=key)
        return self._call(call, async_op, timeout, stream)

    def reduce(
        self, x: Any, root: int = 0, op: Op = "sum", *, out: Any = None,
        async_op: bool = False, timeout: float | None = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Reduce elementwise over all ranks; only the root gets the result. Other ranks' `x` is unchanged and returned."""
        self._check_root(root)
        mine = self.rank == root
        src = array.view(x, output=mine and out is None)
        how = reduction_on(op, src.dtype)
        dst = None
        if mine:
            dst = src if out is None and not src.immutable else self._output(src, out, None, src.count)
        call = CollectiveRequest(OpCode.REDUCE, src, dst, src.dtype, how, count=src.count, root=root)
        return self._call(call, async_op, timeout, stream)

    def reduce_scatter(
        self, x: Any, op: Op = "sum", *, out: Any = None, counts: Sequence[int] | None = None,
        async_op: bool = False, timeout: float | None = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Reduce elementwise over all ranks, and give rank i the i-th block of rows.

        Args:
            x: `sum(counts)` rows along axis 0; without `counts` their number must be a multiple of `size`.
            out: this rank's block; allocated by default.
            counts: rows per rank; by default equal.
        """
        src, given = array.view(x), None if out is None else array.view(out, output=True)
        key = _key(_REDUCE_SCATTER, op, src, given, async_op or counts is not None)
        seconds = self.timeout if timeout is None else checked(timeout)
        if key and given and self.collectives.again(key, src, given, seconds, stream):
            return given.array
        how = reduction_on(op, src.dtype)
        rows, elements = blocks(src, counts, self.size, self.rank)
        dst = self._output(src, given, rows, elements[self.rank])
        call = CollectiveRequest(
            _REDUCE_SCATTER, src, dst, src.dtype, how, counts=elements, uneven=counts is not None, key=key
        )
        return self._call(call, async_op, timeout, stream)

    def all_gather(
        self, x: Any, *, out: Any = None, counts: Sequence[int] | None = None,
        async_op: bool = False, timeout: float | None = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Concatenate the blocks of all ranks along axis 0, on every rank.

        Args:
            x: this rank's block, `counts[rank]` rows. A scalar counts as one row.
            out: output for all rows; allocated by default.
            counts: rows per rank; by default equal.
        """
        src, given = array.view(x), None if out is None else array.view(out, output=True)
        key = _key(_ALL_GATHER, None, src, given, async_op or counts is not None)
        seconds = self.timeout if timeout is None else checked(timeout)
        if key and given and self.collectives.again(key, src, given, seconds, stream):
            return given.array
        rows, elements = own_block(src, counts, self.size, self.rank)
        dst = self._output(src, given, rows, sum(elements))
        call = CollectiveRequest(_ALL_GATHER, src, dst, src.dtype, counts=elements, uneven=counts is not None, key=key)
        return self._call(call, async_op, timeout, stream)

    def gather(
        self, x: Any, root: int = 0, *, out: Any = None, counts: Sequence[int] | None = None,
        async_op: bool = False, timeout: float | None = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Concatenate the blocks of all ranks along axis 0 on the root; None elsewhere. Arguments as in `all_gather`."""
        self._check_root(root)
        src = array.view(x)
        rows, elements = own_block(src, counts, self.size, self.rank)
        dst = self._output(src, out, rows, sum(elements)) if self.rank == root else None
        call = CollectiveRequest(
            OpCode.GATHER, src, dst, src.dtype, counts=elements, root=root, uneven=counts is not None
        )
        return self._call(call, async_op, timeout, stream)

    def scatter(
        self, x: Any, root: int = 0, *, out: Any = None, counts: Sequence[int] | None = None,
        async_op: bool = False, timeout: float | None = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Give rank i the i-th block of the root's rows.

        Args:
            x: all rows on the root; on other ranks None, or an array that defines shape and dtype if `out` is not given.
            out: this rank's block; required if `x` is None.
            counts: rows per rank, the same on all ranks; by default equal.
        """
        self._check_root(root)
        mine = self.rank == root
        if x is None and (mine or out is None):
            raise ArgumentError("scatter: the root needs the array x, the other ranks need out (or x for its shape)")
        src = None if x is None else array.view(x)
        if src is not None:
            rows, elements = blocks(src, counts, self.size, self.rank)
            dst = self._output(src, out, rows, elements[self.rank])
        else:
            dst = array.view(out, output=True)
            _, elements = own_block(dst, counts, self.size, self.rank)
            dst = self._empty_like(dst, dst.shape) if dst.immutable else dst
        call = CollectiveRequest(
            OpCode.SCATTER, src if mine else None, dst, dst.dtype, counts=elements, root=root, uneven=counts is not None
        )  # fmt: skip
        return self._call(call, async_op, timeout, stream)

    def all_to_all(
        self, x: Any, *, out: Any = None, send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None, async_op: bool = False, timeout: float | None = None,
        stream: Any = None,
    ) -> Any:  # fmt: skip
        """Send the i-th block of rows to rank i, and receive one block from each rank, in rank order.

        Args:
            x: `sum(send_counts)` rows along axis 0.
            out: `sum(recv_counts)` rows; allocated by default. Must not overlap `x`.
            send_counts, recv_counts: rows for and from each rank; by default equal. Give both or neither.
        """
        if (send_counts is None) != (recv_counts is None):
            raise ArgumentError("all_to_all: give both send_counts and recv_counts, or neither")
        src, given = array.view(x), None if out is None else array.view(out, output=True)
        special = async_op or send_counts is not None or (given is not None and given.address == src.address)
        key = _key(_ALL_TO_ALL, None, src, given, special)
        seconds = self.timeout if timeout is None else checked(timeout)
        if key and given and self.collectives.again(key, src, given, seconds, stream):
            return given.array
        _, elements = blocks(src, send_counts, self.size, self.rank)
        rows, back = src.shape[0], elements
        if recv_counts is not None:
            counts = whole("recv_counts", recv_counts)
            if len(counts) != self.size or min(counts) < 0:
                raise ArgumentError(f"recv_counts {counts}: expected {self.size} numbers of rows")
            rows, back = sum(counts), in_elements(counts, src.shape)
        dst = self._output(src, given, rows, sum(back))
        if dst.address == src.address and src.nbytes:
            raise ArrayError("all_to_all: out must not be x; omit it or pass another array")
        uneven = send_counts is not None
        call = CollectiveRequest(
            _ALL_TO_ALL, src, dst, src.dtype, counts=elements, recv_counts=back, uneven=uneven, key=key
        )
        return self._call(call, async_op, timeout, stream)

    def barrier(self, *, async_op: bool = False, timeout: float | None = None, stream: Any = None) -> Work | None:
        """Wait until every rank has called this."""
        token = self.collectives.token()
        call = CollectiveRequest(OpCode.BARRIER, token, token, UINT8, Reduction(ReduceOp.MAX), count=1)
        result = self._call(call, async_op, timeout, stream)
        return result if async_op else None

    def _call(self, call: CollectiveRequest, async_op: bool, timeout: float | None, stream: Any) -> Any:
        call.deadline = Deadline(monotonic() + (self.timeout if timeout is None else checked(timeout)))
        if stream is not None:
            call.stream = array.stream_handle(stream)
        return self.collectives.start(call) if async_op else self.collectives.run(call)

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ArgumentError(f"root {root}: ranks of this communicator go from 0 to {self.size - 1}")

    def _empty_like(self, x: ArrayView, shape: tuple[int, ...]) -> ArrayView:
        return array.empty_like(x, shape, self._context.device.empty)

    def _output(self, src: ArrayView, out: Any, rows: int | None, count: int) -> ArrayView:
        """The output array, with the shape of the input except for the number of rows, if `rows` is given."""
        dst = None if out is None else array.view(out, output=True)
        if dst is not None and dst.dtype is src.dtype and dst.count == count:
            return self._empty_like(dst, dst.shape) if dst.immutable else dst
        shape = src.shape if rows is None else (rows, *src.shape[1:])
        if dst is not None:
            raise ArrayError(f"out has {dst.count} x {dst.dtype}, needed are {count} x {src.dtype} (shape {shape})")
        return self._empty_like(src, shape)


def _key(op: OpCode, how: object, src: ArrayView, dst: ArrayView | None, special: bool) -> Key | None:
    """Key of a repeated collective for the compiled call; None if it is asynchronous, uneven, or allocates its output."""
    if special or dst is None:
        return None
    kind = src.kind or _host_kind(src)
    other = 0 if dst is src else dst.kind or _host_kind(dst)
    return (op, how, kind, other) if kind and other is not None else None


def _host_kind(x: ArrayView) -> tuple[int, tuple[int, ...]] | None:
    """The same as `ArrayView.kind` for an array in host memory that can be filled."""
    return (x.dtype.code, x.shape) if x.device == "host" and not x.immutable else None
