"""Maps operations to calls of NCCL or RCCL."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import NamedTuple

from xvcomm.types.dtype import BY_NAME, UINT8, DType, ReduceOp, Reduction

_ALIGN = 64
_PLAIN = frozenset((ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX))
_SUMS = frozenset((ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM))
_ORS = frozenset((ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR))


class Scale(enum.Enum):
    """When the device multiplies or divides, because the library does not."""

    NEVER = enum.auto()
    BEFORE = enum.auto()
    AFTER = enum.auto()


class Route(NamedTuple):
    """How a reduction is carried out.

    Attributes:
        native: dtype that the library gets; None if members exchange elements and reduce on their own.
        op: the reduction by the library, or by `Device.reduce`.
        width: elements of `native` per element of the array.
        scale: scaling by the device.
    """

    native: DType | None
    op: ReduceOp
    width: int = 1
    scale: Scale = Scale.NEVER


def route(dtype: DType, op: ReduceOp, reducible: Collection[str]) -> Route:
    """The Route of a reduction, for a library that can reduce the dtypes with these names."""
    if dtype.kind == "b" and op is not ReduceOp.BXOR:
        return Route(UINT8, ReduceOp.MAX if op in _ORS else ReduceOp.MIN)
    if dtype.kind == "c" and op in _SUMS:
        return Route(BY_NAME[f"float{dtype.itemsize * 4}"], op, width=2)
    known = dtype.name in reducible
    if known and (op in _PLAIN or (dtype.kind == "f" and op in _SUMS)):
        return Route(dtype, op)
    base = Reduction(op).base
    if op is ReduceOp.PREMUL_SUM:
        return Route(None, base, scale=Scale.BEFORE)
    if op is ReduceOp.AVG:
        return Route(dtype if known else None, base, scale=Scale.AFTER)
    return Route(None, base)


class Native(NamedTuple):
    """A Route in the library's own numbers, for a reduction that it carries out.

    Attributes:
        dtype, op: the library's.
        width: as in Route.
        divide: whether a division by the number of members remains.
    """

    dtype: int
    op: int
    width: int
    divide: bool


def cut(count: int, members: int, itemsize: int) -> list[int]:
    """Elements of each member's share of an array; shares begin at aligned offsets."""
    grain = max(1, _ALIGN // itemsize)
    share = -(-count // (members * grain)) * grain
    return [max(0, min(share, count - member * share)) for member in range(members)]


Part = tuple[int, int]
"""Address, or offset in an array; and number of bytes."""

_NOTHING: Part = (0, 0)


def parts(begin: int, counts: Sequence[int], itemsize: int) -> list[Part]:
    """Consecutive blocks."""
    sizes = [count * itemsize for count in counts]
    return [(begin + end - size, size) for end, size in zip(accumulate(sizes), sizes, strict=True)]


class At(NamedTuple):
    """A position in an operation's arrays.

    Attributes:
        array: 0 for the input, 1 for the output.
        offset: in bytes.
    """

    array: int
    offset: int = 0


INPUT, OUTPUT = At(0), At(1)


class LibraryCall(NamedTuple):
    """One call of the library.

    Attributes:
        name: of the method of `Library`.
        places: positions that its first arguments point to; None for a null pointer.
        rest: the further arguments except for the last two, communicator and stream.
    """

    name: str
    places: tuple[At | None, ...]
    rest: tuple[int, ...]

    def arguments(self, arrays: tuple[int, int]) -> tuple[int, ...]:
        """All arguments but the last two, for arrays at these addresses."""
        return *(0 if at is None else arrays[at.array] + at.offset for at in self.places), *self.rest


class Calls:
    """Creates the calls for one member's operations: several are made as a group, empty blocks are skipped.

    Args:
        raw: the library's number of a dtype of one byte.
    """

    def __init__(self, me: int, members: int, raw: int) -> None:
        self._me, self._members, self._raw = me, members, raw

    def all_reduce(self, count: int, how: Native) -> list[LibraryCall]:
        """One call."""
        return [LibraryCall("all_reduce", (INPUT, OUTPUT), (count * how.width, how.dtype, how.op))] if count else []

    def reduce(self, count: int, how: Native, root: int, begin: int = 0) -> list[LibraryCall]:
        """One call; the input begins `begin` bytes after its array."""
        places = At(0, begin), OUTPUT if root == self._me else None
        return [LibraryCall("reduce", places, (count * how.width, how.dtype, how.op, root))] if count else []

    def reduce_scatter(self, counts: Sequence[int], itemsize: int, how: Native) -> list[LibraryCall]:
        """One call; for unequal blocks, a reduction to each member."""
        mine = counts[self._me]
        if counts.count(mine) < self._members:
            begins = [begin for begin, _ in parts(0, counts, itemsize)]
            blocks = enumerate(zip(counts, begins, strict=True))
            return [call for root, (count, begin) in blocks for call in self.reduce(count, how, root, begin)]
        return [LibraryCall("reduce_scatter", (INPUT, OUTPUT), (mine * how.width, how.dtype, how.op))] if mine else []

    def all_gather(self, counts: Sequence[int], itemsize: int) -> list[LibraryCall]:
        """One call; for unequal blocks, a broadcast from each member."""
        mine = counts[self._me]
        if counts.count(mine) < self._members:
            blocks = enumerate(parts(0, counts, itemsize))
            return [call for root, (begin, nbytes) in blocks for call in self.broadcast(nbytes, root, begin)]
        return [LibraryCall("all_gather", (INPUT, OUTPUT), (mine * itemsize, self._raw))] if mine else []

    def broadcast(self, nbytes: int, root: int, begin: int = 0) -> list[LibraryCall]:
        """One call; the output begins `begin` bytes after its array."""
        into = At(1, begin)
        places = INPUT if root == self._me else into, into
        return [LibraryCall("broadcast", places, (nbytes, self._raw, root))] if nbytes else []

    def gather(self, counts: Sequence[int], itemsize: int, root: int) -> list[LibraryCall]:
        """Messages to the root."""
        sends = self._one(root, counts[self._me] * itemsize)
        return self.exchange(sends, parts(0, counts, itemsize) if root == self._me else self._one(root, 0))

    def scatter(self, counts: Sequence[int], itemsize: int, root: int) -> list[LibraryCall]:
        """Messages from the root."""
        recvs = self._one(root, counts[self._me] * itemsize)
        return self.exchange(parts(0, counts, itemsize) if root == self._me else self._one(root, 0), recvs)

    def all_to_all(self, counts: Sequence[int], recv_counts: Sequence[int], itemsize: int) -> list[LibraryCall]:
        """Messages to all and from all."""
        return self.exchange(parts(0, counts, itemsize), parts(0, recv_counts, itemsize))

    def exchange(self, sends: Sequence[Part], recvs: Sequence[Part]) -> list[LibraryCall]:
        """Send a part of the input to each member, and receive a part of the output from each; the library copies its own."""
        calls = []
        for peer, ((src, out), (dst, nbytes)) in enumerate(zip(sends, recvs, strict=True)):
            if out:
                calls.append(LibraryCall("send", (At(0, src),), (out, self._raw, peer)))
            if nbytes:
                calls.append(LibraryCall("recv", (At(1, dst),), (nbytes, self._raw, peer)))
        return calls

    def _one(self, member: int, nbytes: int) -> list[Part]:
        """A list of parts that is empty for all members but one."""
        found = [_NOTHING] * self._members
        found[member] = 0, nbytes
        return found
