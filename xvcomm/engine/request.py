"""What a user asks for, in one descriptor: a collective, or a message."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import msgspec

from xvcomm.abc.collective import CollectiveForm
from xvcomm.engine.inflight.work import Work
from xvcomm.memory import array
from xvcomm.memory.array_view import ArrayView
from xvcomm.memory.ring import Message, RingEnd
from xvcomm.schedule.steps import Collective as Op
from xvcomm.schedule.steps import Request
from xvcomm.trace.operation import Operation, pack_detail
from xvcomm.types.deadline import NEVER, Deadline
from xvcomm.types.dtype import DType, ReduceOp, Reduction
from xvcomm.types.opcode import OpCode

_NO_REDUCTION = Reduction(ReduceOp.SUM)
_BARRIER = OpCode.BARRIER
_REQUESTS = {OpCode[op.name]: op for op in Op} | {OpCode.BARRIER: Op.ALL_REDUCE}


Key = tuple[OpCode, object, Hashable, Hashable]
"""A blocking collective of equal counts: root, or the reduction as the user gave it, and what `ArrayView.kind` says of input
and output, 0 for an output that is the input."""


Shape = tuple[OpCode, int, int, float, int, tuple[int, ...], tuple[int, ...], int, bool, bool]


class CollectiveRequest(msgspec.Struct, eq=False, gc=False):
    """One collective as this rank calls it; counts are elements.

    Attributes:
        src, dst: input and output; None where this rank has none.
        counts, recv_counts, root, count: as in `schedule.steps.Request`.
        uneven: whether the user gave counts, so that all ranks must give the same.
        deadline: for all of it.
        stream: handle of the stream that it is ordered on, where the user gave one.
        call_site: where the user called it, if that is not the thread's caller; see `trace.callsite`.
        key: what `Collectives.again` is to know it by from now on.
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
    deadline: Deadline = NEVER
    stream: int | None = None
    call_site: int = 0
    key: Key | None = None

    @property
    def view(self) -> ArrayView | None:
        """The array whose stream it is ordered on: the output, if there is one."""
        return self.src if self.dst is None else self.dst

    @property
    def addresses(self) -> tuple[int, int]:
        """Where input and output begin; 0 for one that this rank does not have."""
        src, dst = self.src, self.dst
        return 0 if src is None else src.address, 0 if dst is None else dst.address

    def how(self) -> Reduction:
        """The reduction, for operations that do not care which."""
        return self.reduction or _NO_REDUCTION

    def shape(self) -> Shape:
        """What decides how it runs, but for the arrays' addresses."""
        how = self.reduction
        return (
            self.op, self.dtype.code, 0 if how is None else how.op, 0.0 if how is None else how.factor, self.count,
            self.counts, self.recv_counts, self.root, self.uneven, self.src is self.dst,
        )  # fmt: skip

    def idle(self) -> bool:
        """Whether a rank alone has nothing to do for it: its result is its input, and lies where that does."""
        src, dst, how = self.src, self.dst, self.reduction
        return (
            src is not None
            and dst is not None
            and src.address == dst.address
            and (how is None or how.op is not ReduceOp.PREMUL_SUM)
        )

    def release(self) -> None:
        """Let go of an input that is not needed any more: it may be large, and nothing else may hold its memory."""
        if self.dst is not None:
            self.src = None

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
        return _collective_description(self.op, self.dtype, how, self.count, self.counts, self.root, self.uneven)

    def described(self, sequence: int) -> Operation:
        """As an operation with this number, for error messages."""
        return Operation(self.op, sequence, self.message())

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
def _collective_description(
    op: OpCode, dtype: DType, reduction: int, count: int, counts: tuple[int, ...], root: int, uneven: bool
) -> Message:
    if not uneven:
        return Message(+op, dtype.code, (count or sum(counts)) * dtype.itemsize, 0, pack_detail(root, reduction))
    if op is OpCode.ALL_TO_ALL:  # each rank has its own counts
        return Message(+op, dtype.code, 0, 0, pack_detail(root, reduction))
    return Message(+op, dtype.code, sum(counts) * dtype.itemsize, 0, pack_detail(root, reduction, counts))


class MessageRequest(msgspec.Struct, eq=False):
    """One message that this rank sends or receives.

    Attributes:
        stream: handle of the stream that it is ordered on; None if it is unknown.
        channel: which of the pair's rings it uses.
        work: its Work, if it has one, until it starts or is given up.
        call_site: the call site, if the thread that enqueues it is not the user's; see `trace.callsite`.
        operation, end: its operation and its ring end, once it is enqueued.
    """

    name: OpCode
    view: ArrayView
    peer: int
    tag: int
    deadline: Deadline
    stream: int | None = None
    channel: int = 0
    work: Work | None = None
    call_site: int = 0
    operation: Operation | None = None
    end: RingEnd | None = None

    def shape(self) -> tuple[OpCode, int, int, int, int]:
        """What decides how it runs, but for the array's address and the tag."""
        return self.name, self.peer, self.channel, self.view.nbytes, self.view.dtype.code

    def message(self) -> Message:
        """The description that both ends must agree on."""
        return _message_description(self.view.dtype, self.view.nbytes, self.tag)

    def described(self, sequence: int) -> Operation:
        """As an operation, for error messages."""
        return Operation(self.name, sequence, self.message(), self.peer, channel=self.channel)

    def release(self) -> None:
        """Does nothing: a message has one array."""

    def result(self) -> Any:
        """The user's array, once the message is through."""
        return array.finish(self.view)


@lru_cache(maxsize=1024)
def _message_description(dtype: DType, nbytes: int, tag: int) -> Message:
    return Message(int(OpCode.SEND), dtype.code, nbytes, tag)
