"""A collective written as data: the words a schedule is made of.

All positions and counts are in elements. A step reads and writes spans of three buffers: the caller's input, the
caller's output (they may be the same memory), and scratch memory that the executor provides, of the caller's elements
and of such as partial results in low precision have until they are rounded.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Buf(enum.Enum):
    """Which buffer a span lies in."""

    IN = "in"
    OUT = "out"
    TMP = "tmp"
    WIDE = "wide"  # its elements are float32 where those of the others are low precision

    __hash__ = object.__hash__  # an enumeration's own is a function in Python, and addresses are looked up by these


class Lane(enum.Enum):
    """Which of a rank's three queues runs the step; lanes overlap, `after` orders them."""

    NATIVE = "native"
    SEND = "send"
    RECV = "recv"

    __hash__ = object.__hash__  # as of Buf


class NativeOp(enum.Enum):
    """What the vendor's library is asked for, within this rank's island."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    GATHER = "gather"
    SCATTER = "scatter"
    REDUCE = "reduce"


@dataclass(frozen=True, slots=True)
class Span:
    """`count` contiguous elements of `buf` from `start` on."""

    buf: Buf
    start: int
    count: int

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Step:
    """Base of all steps.

    Attributes:
        lane: the queue it runs on; steps of one lane run in order.
        after: indices of earlier steps of this schedule that must be complete before it starts.
    """

    lane: Lane
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Native(Step):
    """One call of the island's own library. Members are numbered by their place in the island.

    Attributes:
        op: which call. A reduce_scatter into WIDE does not round.
        src: what this rank puts in.
        dst: what this rank gets. May coincide with `src` or with this rank's part of it.
        counts: elements a member for the ops that divide (reduce_scatter, all_gather, gather, scatter); for
            all_to_all what this rank sends to each; empty otherwise.
        recv_counts: for all_to_all what this rank receives from each; empty otherwise.
        root: member that holds the source or the result; -1 where the op has none.
    """

    op: NativeOp
    src: Span
    dst: Span
    counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()
    root: int = -1


@dataclass(frozen=True, slots=True)
class Put(Step):
    """Send a span over the border to rank `peer`, in order."""

    peer: int
    src: Span


@dataclass(frozen=True, slots=True)
class Get(Step):
    """Receive a span over the border from rank `peer`, in order."""

    peer: int
    dst: Span


@dataclass(frozen=True, slots=True)
class GetReduce(Step):
    """Receive from `peer` and reduce into `dst`: `remote op dst` if `remote_first`, else `dst op remote`.

    The order is fixed so that both ends compute the same bits (signed zeros, NaN payloads).
    """

    peer: int
    dst: Span
    remote_first: bool


@dataclass(frozen=True, slots=True)
class Copy(Step):
    """Copy within the rank, to and from WIDE by conversion; nothing happens where both spans are the same memory."""

    src: Span
    dst: Span


@dataclass(frozen=True, slots=True)
class Reduce(Step):
    """`dst` becomes the reduction of `srcs` in their order; low precision accumulates in float32 and rounds once.

    `dst` may coincide with one of `srcs`. All lie in WIDE, or none.

    Attributes:
        average: whether the result is divided by the communicator's size before it is rounded.
    """

    srcs: tuple[Span, ...]
    dst: Span
    average: bool = False


class Factor(enum.Enum):
    """What a Scale step multiplies by."""

    PREMUL = "premul"
    AVERAGE = "average"


@dataclass(frozen=True, slots=True)
class Scale(Step):
    """`dst = src * factor`: this rank's own factor (premul_sum), or one over the communicator's size (avg)."""

    src: Span
    dst: Span
    factor: Factor


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one rank does for one collective.

    Attributes:
        steps: in an order that is itself a correct sequential program, provided that neighbouring border steps
            (Put, Get, GetReduce with no Native between them) progress together. In one segment also one by one, if
            no Put has to wait for its Get; those for short arrays rely on that.
        scratch, wide: elements of TMP and of WIDE needed.
    """

    steps: tuple[Step, ...]
    scratch: int
    wide: int = 0


class Collective(enum.Enum):
    """The collectives of the public interface that need a schedule."""

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_ALL = "all_to_all"


@dataclass(frozen=True, slots=True)
class Request:
    """One collective as all ranks describe it, less what differs by rank.

    Attributes:
        op: which collective.
        itemsize: bytes an element; shares are cut at 16-byte multiples.
        count: all_reduce, reduce, broadcast: elements of the array. Else 0.
        counts: all_gather, reduce_scatter, gather, scatter: elements of each rank's block, the same tuple on all
            ranks. all_to_all: what this rank sends to each rank.
        recv_counts: all_to_all: what this rank receives from each rank. Else empty.
        root: where the op has one, else -1.
        average, premul: whether scaling is asked for.
        low_precision: whether it is a sum or product, or made of these, in a dtype that rounds more than float32.
    """

    op: Collective
    itemsize: int
    count: int = 0
    counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()
    root: int = -1
    average: bool = False
    premul: bool = False
    low_precision: bool = False
