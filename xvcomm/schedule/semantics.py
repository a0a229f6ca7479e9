"""Semantics of the steps on numpy arrays: the memory of a simulated rank, and the arithmetic of each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xvcomm.schedule.describe import span_text
from xvcomm.schedule.layout import in_count, in_place, out_count
from xvcomm.schedule.partition import Cut
from xvcomm.schedule.steps import Buf, Collective, Native, Request, Span
from xvcomm.types.dtype import ReduceOp, from_numpy

Array = NDArray[Any]
_COMBINE: dict[ReduceOp, Callable[[Array, Array], Array]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


class Fault(Exception):
    """A step breaks a rule; the simulator adds which rank and step."""


class Memory:
    """IN, OUT, TMP and WIDE of one rank, and which elements have been written.

    Args:
        given: contents of IN.
        scratch, wide: elements of TMP and of WIDE.
        shared: whether IN and OUT are in one array, as in an in-place call; in a broadcast they always are.
    """

    def __init__(self, request: Request, rank: int, given: Array, scratch: int, wide: int, shared: bool) -> None:
        shared = shared or request.op is Collective.BROADCAST
        counts = {Buf.IN: in_count(request, rank), Buf.OUT: out_count(request, rank), Buf.TMP: scratch, Buf.WIDE: wide}
        starts = dict(zip((Buf.IN, Buf.OUT), in_place(request, rank) if shared else (0, counts[Buf.IN]), strict=True))
        starts[Buf.TMP] = max(starts[buf] + counts[buf] for buf in starts)
        starts[Buf.WIDE] = starts[Buf.TMP] + scratch
        self._ranges = {buf: (starts[buf], starts[buf] + counts[buf]) for buf in Buf}
        self._data = np.zeros(starts[Buf.WIDE] + wide, given.dtype)
        self._wide = np.zeros(self._data.size, np.float32 if from_numpy(given.dtype).low_precision else given.dtype)
        self._known = np.zeros(self._data.size, bool)
        source = slice(*self._ranges[Buf.IN])
        self._data[source] = given
        self._known[source] = True

    def address(self, span: Span) -> int:
        """Index of a span's first element in this rank's memory.

        Raises:
            Fault: the span exceeds its buffer.
        """
        start, stop = self._ranges[span.buf]
        if span.start < 0 or span.count < 0 or start + span.stop > stop:
            raise Fault(f"{span_text(span)} exceeds its buffer of {stop - start} elements")
        return start + span.start

    def read(self, span: Span) -> Array:
        """Copy a span.

        Raises:
            Fault: the span exceeds its buffer, or contains elements that were never written.
        """
        place = slice(self.address(span), self.address(span) + span.count)
        if not self._known[place].all():
            raise Fault(
                f"reads {span_text(span)}, of which element {int(np.argmin(self._known[place]))} was never written"
            )
        return self._at(span)[place].copy()

    def write(self, span: Span, values: Array) -> None:
        """Fill a span.

        Raises:
            Fault: the span exceeds its buffer, is in IN, or has a different size.
        """
        if span.count != values.size:
            raise Fault(f"{values.size} elements cannot fill {span_text(span)}")
        place = slice(self.address(span), self.address(span) + span.count)
        if span.buf is Buf.IN and span.count:
            raise Fault(f"writes to the caller's input, {span_text(span)}")
        self._at(span)[place] = values
        self._known[place] = True

    def _at(self, span: Span) -> Array:
        return self._wide if span.buf is Buf.WIDE else self._data

    def result(self) -> Array:
        """Contents of OUT.

        Raises:
            Fault: a part of it was never written.
        """
        start, stop = self._ranges[Buf.OUT]
        return self.read(Span(Buf.OUT, 0, stop - start))


def scaled(operation: Callable[[Array, Any], Array], values: Array, by: float, wide: bool) -> Array:
    """Multiply or divide `values` by `by`, with the rounding of the backends.

    Low-precision dtypes compute in float32, and stay in it if `wide`; integers compute in float64 and truncate.
    """
    dtype = from_numpy(values.dtype)
    if dtype.low_precision:
        found = operation(values.astype(np.float32), np.float32(by))
        return found if wide else found.astype(values.dtype)
    if dtype.kind in "iu":
        return operation(values.astype(np.float64), by).astype(values.dtype)
    return operation(values, values.dtype.type(by)).astype(values.dtype)


def combine(op: ReduceOp, arrays: Sequence[Array], rounds: bool = True, divisor: int = 1) -> Array:
    """Reduce arrays in order and divide by `divisor`; low precision accumulates in float32, rounded at the end if `rounds`."""
    dtype = arrays[0].dtype
    wide = np.float32 if from_numpy(dtype).low_precision else dtype
    total = arrays[0].astype(wide)
    for array in arrays[1:]:
        total = _COMBINE[op](total, array.astype(wide))
    if divisor != 1:
        total = scaled(np.divide, total, divisor, wide=True)
    return total.astype(dtype) if rounds else total


def native(op: ReduceOp, memories: Sequence[Memory], calls: Sequence[Native]) -> None:
    """Simulate one native call; `memories` and `calls` are in the order of the island's members.

    Raises:
        Fault: members disagree, sizes do not fit, or source and result overlap in a way that the call does not allow.
    """
    first = calls[0]
    for call in calls[1:]:
        same = (call.op, call.root) == (first.op, first.root)
        if not same or (first.op is not Collective.ALL_TO_ALL and call.counts != first.counts):
            raise Fault(f"members make different calls: {first} and {call}")
    for member, (memory, call) in enumerate(zip(memories, calls, strict=True)):
        _check_overlap(memory, call, member)
    results = _NATIVE[first.op](op, memories, calls)
    for memory, call, values in zip(memories, calls, results, strict=True):
        memory.write(call.dst, values)


def _check_overlap(memory: Memory, call: Native, member: int) -> None:
    src, dst = memory.address(call.src), memory.address(call.dst)
    if min(src + call.src.count, dst + call.dst.count) <= max(src, dst):
        return
    before = sum(call.counts[:member])
    expected = src
    if call.op in (Collective.REDUCE_SCATTER, Collective.SCATTER):
        expected = src + before
    elif call.op in (Collective.ALL_GATHER, Collective.GATHER):
        expected = src - before
    if dst != expected or call.op is Collective.ALL_TO_ALL:
        raise Fault(f"{span_text(call.src)} and {span_text(call.dst)} overlap without coinciding")


_Results = list[Array]


def _sources(memories: Sequence[Memory], calls: Sequence[Native]) -> _Results:
    return [memory.read(call.src) for memory, call in zip(memories, calls, strict=True)]


def _cut(array: Array, counts: Sequence[int]) -> _Results:
    cut = Cut.of(counts)
    if cut.total != array.size:
        raise Fault(f"counts add up to {cut.total}, but there are {array.size} elements")
    return [array[slice(*cut.part(i))] for i in range(len(counts))]


def _joined(memories: Sequence[Memory], calls: Sequence[Native]) -> Array:
    sources = _sources(memories, calls)
    if tuple(s.size for s in sources) != calls[0].counts:
        raise Fault(f"counts are {calls[0].counts}, but members give {[s.size for s in sources]} elements")
    return np.concatenate(sources)


def _only_root(values: Array, calls: Sequence[Native]) -> _Results:
    return [values if member == calls[0].root else values[:0] for member in range(len(calls))]


def _all_reduce(op: ReduceOp, memories: Sequence[Memory], calls: Sequence[Native]) -> _Results:
    return [combine(op, _sources(memories, calls))] * len(calls)


def _reduce_scatter(op: ReduceOp, memories: Sequence[Memory], calls: Sequence[Native]) -> _Results:
    into = {call.dst.buf is Buf.WIDE for call in calls}
    if len(into) > 1:
        raise Fault("members disagree whether the result is rounded")
    return _cut(combine(op, _sources(memories, calls), rounds=into == {False}), calls[0].counts)


def _all_gather(op: ReduceOp, memories: Sequence[Memory], calls: Sequence[Native]) -> _Results:
    return [_joined(memories, calls)] * len(calls)


def _broadcast(op: ReduceOp, memories: Sequence[Memory], calls: Sequence[Native]) -> _Results:
    root = calls[0].root
    return [memories[root].read(calls[root].src)] * len(calls)


def _all_to_all(op: ReduceOp, memories: Sequence[Memory], calls: Sequence[Native]) -> _Results:
    sent = [_cut(memory.read(call.src), call.counts) for memory, call in zip(memories, calls, strict=True)]
    for member, call in enumerate(calls):
        if call.recv_counts != tuple(blocks[member].size for blocks in sent):
            raise Fault(f"member {member} expects {call.recv_counts}, but others send {[b[member].size for b in sent]}")
    return [np.concatenate([blocks[member] for blocks in sent]) for member in range(len(calls))]


def _gather(op: ReduceOp, memories: Sequence[Memory], calls: Sequence[Native]) -> _Results:
    return _only_root(_joined(memories, calls), calls)


def _scatter(op: ReduceOp, memories: Sequence[Memory], calls: Sequence[Native]) -> _Results:
    root = calls[0].root
    return _cut(memories[root].read(calls[root].src), calls[0].counts)


def _reduce(op: ReduceOp, memories: Sequence[Memory], calls: Sequence[Native]) -> _Results:
    return _only_root(combine(op, _sources(memories, calls)), calls)


_NATIVE: dict[Collective, Callable[[ReduceOp, Sequence[Memory], Sequence[Native]], _Results]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.ALL_GATHER: _all_gather,
    Collective.BROADCAST: _broadcast,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.GATHER: _gather,
    Collective.SCATTER: _scatter,
    Collective.REDUCE: _reduce,
}
