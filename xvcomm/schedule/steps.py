"""The data types of a schedule: its steps, and the request that it carries out.

All positions and counts are in elements. Steps read and write spans of four buffers: the caller's input, the caller's output
(possibly the same memory), and two scratch buffers that the executor provides, one with the caller's element type, one in
float32 for unrounded partial results of low-precision dtypes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Buf(enum.Enum):
    """Buffer of a span."""

    IN = "in"
    OUT = "out"
    TMP = "tmp"
    WIDE = "wide"  # float32 if the dtype is low precision, else the caller's dtype

    __hash__ = object.__hash__  # Enum.__hash__ is a Python function, too slow for lookups of addresses


class Lane(enum.Enum):
    """The queue of a rank that runs a step. Lanes run concurrently; `after` orders steps of different lanes."""

    NATIVE = "native"
    SEND = "send"
    RECV = "recv"

    __hash__ = object.__hash__  # as in Buf


class Collective(enum.Enum):
    """A collective that a schedule carries out, or the same within an island, as one call of the native library."""

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_ALL = "all_to_all"


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
    """Base class of all steps.

    Attributes:
        lane: the queue it runs on; steps of one lane run in order.
        after: indices of earlier steps of this schedule that must be complete before it starts.
    """

    lane: Lane
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Native(Step):
    """One call of the island's native library. Members are numbered by their index in the island.

    Attributes:
        op: which call. A reduce_scatter into WIDE does not round.
        src: this rank's input.
        dst: this rank's output. May coincide with `src` or with this rank's part of it.
        counts: elements per member for reduce_scatter, all_gather, gather and scatter; for all_to_all what this rank sends to
            each; otherwise empty.
        recv_counts: for all_to_all what this rank receives from each; otherwise empty.
        root: member that has the source or the result; -1 if the op has none.
    """

    op: Collective
    src: Span
    dst: Span
    counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()
    root: int = -1


@dataclass(frozen=True, slots=True)
class Put(Step):
    """Send a span to rank `peer`, in order."""

    peer: int
    src: Span


@dataclass(frozen=True, slots=True)
class Get(Step):
    """Receive a span from rank `peer`, in order."""

    peer: int
    dst: Span


@dataclass(frozen=True, slots=True)
class GetReduce(Step):
    """Receive from `peer` and reduce with `own`, which may be `dst`: `remote op own` if `remote_first`, else `own op remote`.

    The order is fixed so that both ends compute bitwise equal results (signed zeros, NaN payloads).
    """

    peer: int
    own: Span
    dst: Span
    remote_first: bool


@dataclass(frozen=True, slots=True)
class Copy(Step):
    """Copy within the rank, with conversion to and from WIDE. No-op if both spans are the same memory."""

    src: Span
    dst: Span


@dataclass(frozen=True, slots=True)
class Reduce(Step):
    """Reduce `srcs` in their order into `dst`; low precision accumulates in float32 and rounds once.

    `dst` may coincide with one of `srcs`. Either all spans are in WIDE, or none.

    Attributes:
        average: whether the result is divided by the communicator's size before it is rounded.
    """

    srcs: tuple[Span, ...]
    dst: Span
    average: bool = False


class Factor(enum.Enum):
    """Multiplier of a Scale step."""

    PREMUL = "premul"
    AVERAGE = "average"


@dataclass(frozen=True, slots=True)
class Scale(Step):
    """`dst = src * factor`: this rank's own factor (premul_sum), or the reciprocal of the communicator's size (avg)."""

    src: Span
    dst: Span
    factor: Factor


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of one rank for one collective.

    Attributes:
        steps: in an order that is itself a correct sequential program if consecutive border steps (Put, Get, GetReduce without
            a Native between them) progress together, as `after` permits. With one segment they may also run one by one if no
            Put has to wait for its Get; those of `Exchange.ARRAYS` and `Exchange.RANKS` rely on that.
        scratch, wide: required elements of TMP and of WIDE.
    """

    steps: tuple[Step, ...]
    scratch: int
    wide: int = 0


class Exchange(enum.Enum):
    """What the ranks of an all-reduce send each other."""

    RANKS = "arrays of all ranks"  # to every other rank, without a native call, through rings that hold each of them
    ARRAYS = (
        "sums of whole arrays"  # between islands, in the fewest steps; rings must be able to buffer each message whole
    )
    SUMS = "sums"  # two islands send their sums, and both add all of them; more of them send PARTS
    PARTS = "parts of sums, then of results"  # the additions are divided among all ranks


@dataclass(frozen=True, slots=True)
class Request:
    """One collective, as described by all ranks, without values that differ between ranks.

    Attributes:
        op: which collective.
        itemsize: bytes per element; shares are multiples of 16 bytes.
        count: all_reduce, reduce, broadcast: elements of the array. Otherwise 0.
        counts: all_gather, reduce_scatter, gather, scatter: elements of each rank's block, the same tuple on all ranks.
            all_to_all: what this rank sends to each rank.
        recv_counts: all_to_all: what this rank receives from each rank. Otherwise empty.
        root: the root, or -1 if the op has none.
        average, premul: whether the result is an average; whether inputs are multiplied by a factor.
        low_precision: whether it is a sum, product, avg or premul_sum of a dtype with less precision than float32.
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
