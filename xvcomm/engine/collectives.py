"""How a collective runs: contract check, then the native library alone, or a schedule across islands."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from xvcomm.abc.collective import CollectiveForm
from xvcomm.abc.device import Stream
from xvcomm.engine.context import Context
from xvcomm.engine.executor import Buffers, Executor
from xvcomm.engine.inflight.work import OrderedWorker, Work
from xvcomm.engine.prepared import BUSY, Gate, PreparedCall
from xvcomm.jit.atomics import READY
from xvcomm.memory import array
from xvcomm.memory.array_view import ArrayView
from xvcomm.memory.ring import Message
from xvcomm.schedule.steps import Collective as Op
from xvcomm.schedule.steps import Request
from xvcomm.trace.callsite import find_call_site
from xvcomm.trace.operation import Operation, pack_detail
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import DType, ReduceOp, Reduction
from xvcomm.types.opcode import OpCode

_NO_REDUCTION = Reduction(ReduceOp.SUM)
_BARRIER = OpCode.BARRIER
_CLOSE_SECONDS = 2.0
_SHAPES = 1000
_INSIDE_RUN, _INSIDE_START = 3, 4
"""Functions of xvcomm that are under way at the least when a collective asks for the call site: blocking, asynchronous."""
_REQUESTS = {
    OpCode.BROADCAST: Op.BROADCAST, OpCode.REDUCE: Op.REDUCE, OpCode.ALL_REDUCE: Op.ALL_REDUCE,
    OpCode.BARRIER: Op.ALL_REDUCE, OpCode.REDUCE_SCATTER: Op.REDUCE_SCATTER, OpCode.ALL_GATHER: Op.ALL_GATHER,
    OpCode.GATHER: Op.GATHER, OpCode.SCATTER: Op.SCATTER, OpCode.ALL_TO_ALL: Op.ALL_TO_ALL,
}  # fmt: skip


Key = tuple[OpCode, object, int, int]
"""A blocking collective of equal counts: root, or the reduction as the user gave it, and `ArrayView.kind` of input and output,
0 for an output that is the input."""


class Call(msgspec.Struct, eq=False, gc=False):
    """One collective as this rank calls it; counts are elements.

    Attributes:
        src, dst: input and output; None where this rank has none.
        counts, recv_counts, root, count: as in `schedule.steps.Request`.
        uneven: whether the user gave counts, so that all ranks must give the same.
        call_site: where the user called it, if that is not the thread's caller; see `trace.callsite`.
        key: what `Caller.again` is to know it by from now on.
    """

    op: OpCode
    src: ArrayView | None
    dst: ArrayView | None
    dtype: DType
    reduction: Reduction | None = None
    count: int = 0
    counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()
    root: int = -1
    uneven: bool = False
    call_site: int = 0
    key: Key | None = None

    def how(self) -> Reduction:
        """The reduction, for operations that do not care which."""
        return self.reduction or _NO_REDUCTION

    def idle(self) -> bool:
        """Whether a rank alone has nothing to do for it: its result is its input, and lies where that does."""
        src, dst, how = self.src, self.dst, self.reduction
        return (
            src is not None
            and dst is not None
            and src.address == dst.address
            and (how is None or how.op is not ReduceOp.PREMUL_SUM)
        )

    def result(self) -> Any:
        """The user's result array, once it is there."""
        dst = self.dst
        if self.op is _BARRIER:
            return None
        if dst is not None:
            return array.finish(dst) if dst.staged else dst.array
        return self.src.array if self.op is OpCode.REDUCE and self.src is not None else None

    def message(self) -> Message:
        """What all ranks must agree on."""
        how = self.reduction.op if self.reduction is not None else 0
        return _message(self.op, self.dtype, how, self.count, self.counts, self.root, self.uneven)

    def form(self) -> CollectiveForm:
        """The same for the native library."""
        counts = self.counts or (self.count,)
        return CollectiveForm(self.op, counts, self.recv_counts, self.dtype, self.how(), self.root)

    def request(self) -> Request:
        """The same for the planner."""
        how = self.reduction
        op = ReduceOp.SUM if how is None else how.op
        return Request(
            _REQUESTS[self.op], self.dtype.itemsize, self.count, self.counts, self.recv_counts, self.root,
            average=op is ReduceOp.AVG, premul=op is ReduceOp.PREMUL_SUM,
            low_precision=how is not None and self.dtype.low_precision and op not in (ReduceOp.MIN, ReduceOp.MAX),
        )  # fmt: skip


@lru_cache(maxsize=1024)
def _message(
    op: OpCode, dtype: DType, reduction: int, count: int, counts: tuple[int, ...], root: int, uneven: bool
) -> Message:
    if not uneven:
        return Message(+op, dtype.code, (count or sum(counts)) * dtype.itemsize, 0, pack_detail(root, reduction))
    if op is OpCode.ALL_TO_ALL:  # each rank has its own counts
        return Message(+op, dtype.code, 0, 0, pack_detail(root, reduction))
    return Message(+op, dtype.code, sum(counts) * dtype.itemsize, 0, pack_detail(root, reduction, counts))


class Caller:
    """Runs a communicator's collectives in order: in the calling thread, or behind asynchronous ones on its worker."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._gate = Gate(context)
        self._once: set[object] = set()
        self._prepared: dict[object, PreparedCall | None] = {}
        self._worker = OrderedWorker(f"xvcomm-{context.path}")
        self._native_only = context.topology.homogeneous and context.topology.size > 1
        self._alone = context.topology.size == 1
        self._executor = Executor(context)
        self._stream = context.device.streams(1)[0]
        self._token = array.view(np.zeros(1, np.uint8))
        context.lifecycle.on_close(self._close)

    def token(self) -> ArrayView:
        """One byte for operations that carry no data."""
        return self._token

    def again(self, key: Key, src: ArrayView, dst: ArrayView, timeout: float, stream: Any) -> bool:
        """Run a blocking collective that has run before with arrays of these kinds; False if nothing has begun."""
        return False

    def run(self, call: Call, deadline: Deadline, stream: int | None = None) -> Any:
        """Run a collective and give the result array.

        Args:
            stream: handle of the stream that it is ordered on, where the user gave one.
        """
        self._admit(call)
        if not self._worker.idle:
            return Work(self._submit(call, deadline), str(call.op)).wait()
        prepared = self._known(call) if self._native_only else None
        if prepared is not None:
            src, dst = array.address(call.src), array.address(call.dst)
            code = prepared.run(src, dst, call.call_site or find_call_site(_INSIDE_RUN))
            if code != BUSY:
                if code != READY:
                    prepared.finish(src, dst, deadline)
                return call.result()
        self._context.lifecycle.ensure_open(call.op)  # in a forked child nobody may ever open the gate
        with self._gate:
            return self._run(call, deadline)

    def _known(self, call: Call) -> PreparedCall | None:
        """The collective prepared, from its second time in this shape on; None if it cannot be."""
        how = call.reduction
        shape = (
            call.op, call.dtype.code, how and how.op, call.count, call.counts, call.recv_counts, call.root, call.uneven,
        )  # fmt: skip
        try:
            return self._prepared[shape]
        except KeyError:
            again = shape in self._once
        if not again:
            if len(self._once) >= _SHAPES:
                self._once.clear()
                self._prepared.clear()
            self._once.add(shape)
            return None
        found = self._prepared[shape] = self.prepare(call)
        return found

    def start(self, call: Call, deadline: Deadline, stream: int | None = None) -> Work:
        """Run a collective behind those that were started before."""
        self._admit(call)
        return Work(self._submit(call, deadline), str(call.op))

    def _admit(self, call: Call) -> None:
        kind, src, dst = self._context.kind, call.src, call.dst
        if src is not None and (src.device != kind or kind != "host"):
            self._context.admit(src)
        if dst is not None and dst is not src and (dst.device != kind or kind != "host"):
            self._context.admit(dst)

    def _submit(self, call: Call, deadline: Deadline) -> Future[Any]:
        def locked() -> Any:
            try:
                with self._gate:
                    return self._run(call, deadline)
            finally:
                self._gate.queue(-1)

        self._context.lifecycle.ensure_open(call.op)
        self._gate.queue(1)
        return self._worker.submit(locked, call.call_site or find_call_site(_INSIDE_START))

    def prepare(self, call: Call) -> PreparedCall | None:
        """The same collective for compiled code, on any addresses; None before one has run, or if compiled code cannot."""
        native = self._context.joined_native()
        if native is None or not self._native_only:
            return None
        found = native.prepare(call.form())
        return self._gate.admit(call.op, call.message(), call.call_site, found) if found is not None else None

    def _run(self, call: Call, deadline: Deadline) -> Any:
        context = self._context
        operation = context.begin(call.op, call.message(), call_site=call.call_site)
        try:
            if self._native_only:
                self._native(call, deadline, self._stream)
            elif not (self._alone and call.idle()):
                self._scheduled(call, operation, deadline)
        except BaseException as error:
            context.fail(error, operation)
        context.end(operation)
        return call.result()

    def _native(self, call: Call, deadline: Deadline, stream: Stream) -> None:
        native = self._context.native(deadline)
        dtype, op = call.dtype, call.how()
        stream.deadline = deadline
        src, dst = array.address(call.src), array.address(call.dst)
        match call.op:
            case OpCode.ALL_REDUCE | OpCode.BARRIER:
                native.all_reduce(src, dst, call.count, dtype, op, stream)
            case OpCode.BROADCAST:
                native.broadcast(src, dst, call.count, dtype, call.root, stream)
            case OpCode.REDUCE:
                native.reduce(src, dst, call.count, dtype, op, call.root, stream)
            case OpCode.REDUCE_SCATTER:
                native.reduce_scatter(src, dst, call.counts, dtype, op, stream)
            case OpCode.ALL_GATHER:
                native.all_gather(src, dst, call.counts, dtype, stream)
            case OpCode.GATHER:
                native.gather(src, dst, call.counts, dtype, call.root, stream)
            case OpCode.SCATTER:
                native.scatter(src, dst, call.counts, dtype, call.root, stream)
            case OpCode.ALL_TO_ALL:
                native.all_to_all(src, dst, call.counts, call.recv_counts, dtype, stream)

    def _scheduled(self, call: Call, operation: Operation, deadline: Deadline) -> None:
        plan = self._context.planner.plan(call.request())
        src, dst = array.address(call.src), array.address(call.dst)
        self._executor.run(plan.schedule, Buffers(src, dst), call.dtype, call.how(), operation, deadline)

    def _close(self) -> None:
        """End the worker; what it still runs was stopped by the context."""
        with contextlib.suppress(RuntimeError):
            self._worker.close(_CLOSE_SECONDS)
