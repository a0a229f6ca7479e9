"""How operations become calls of NCCL or RCCL: what of a reduction is theirs, and which calls make an operation."""

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
        native: what the library takes the elements for; None where members exchange them and reduce by themselves.
        op: what is left to do for the library, or for `Device.reduce`.
        width: elements of `native` in one of the array.
    """

    native: DType | None
    op: ReduceOp
    width: int = 1
    scale: Scale = Scale.NEVER


def route(dtype: DType, op: ReduceOp, reducible: Collection[str]) -> Route:
    """The Route of a reduction, over a library that reduces the dtypes of these names."""
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
    """The same in the library's own numbers, of a reduction that it carries out.

    Attributes:
        dtype, op: the library's.
        width: as in Route.
        divide: whether a division by the number of members is left.
    """

    dtype: int
    op: int
    width: int
    divide: bool


def cut(count: int, members: int, itemsize: int) -> list[int]:
    """Elements of each member's share of an array; shares begin at aligned offsets of it."""
    grain = max(1, _ALIGN // itemsize)
    share = -(-count // (members * grain)) * grain
    return [max(0, min(share, count - member * share)) for member in range(members)]


Part = tuple[int, int]
"""Address, or offset in an array, and bytes."""

_NOTHING: Part = (0, 0)


def parts(begin: int, counts: Sequence[int], itemsize: int) -> list[Part]:
    """Blocks that lie one after the other."""
    sizes = [count * itemsize for count in counts]
    return [(begin + end - size, size) for end, size in zip(accumulate(sizes), sizes, strict=True)]


class At(NamedTuple):
    """A place in an operation's arrays.

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
        places: what its first arguments point to; None for a null pointer.
        rest: the arguments behind those, but for the last two: communicator and stream.
    """

    name: str
    places: tuple[At | None, ...]
    rest: tuple[int, ...]

    def arguments(self, arrays: tuple[int, int]) -> tuple[int, ...]:
        """Those but for the last two, where the arrays are at these addresses."""
        return *(0 if at is None else arrays[at.array] + at.offset for at in self.places), *self.rest


class Calls:
    """Which calls make one member's operations: several are made as a group, for empty blocks there are none.

    Args:
        me, members: number of the member, and how many there are.
        raw: the library's number of the dtype of one byte.
    """

    def __init__(self, me: int, members: int, raw: int) -> None:
        self._me, self._members, self._raw = me, members, raw

    def all_reduce(self, count: int, how: Native) -> list[LibraryCall]:
        """One call."""
        return [LibraryCall("all_reduce", (INPUT, OUTPUT), (count * how.width, how.dtype, how.op))] if count else []

    def reduce(self, count: int, how: Native, root: int, begin: int = 0) -> list[LibraryCall]:
        """One call; of an input that begins so many bytes behind its array."""
        places = At(0, begin), OUTPUT if root == self._me else None
        return [LibraryCall("reduce", places, (count * how.width, how.dtype, how.op, root))] if count else []

    def reduce_scatter(self, counts: Sequence[int], itemsize: int, how: Native) -> list[LibraryCall]:
        """One call; where blocks are unequal, a reduction to each member."""
        mine = counts[self._me]
        if counts.count(mine) < self._members:
            begins = [begin for begin, _ in parts(0, counts, itemsize)]
            blocks = enumerate(zip(counts, begins, strict=True))
            return [call for root, (count, begin) in blocks for call in self.reduce(count, how, root, begin)]
        return [LibraryCall("reduce_scatter", (INPUT, OUTPUT), (mine * how.width, how.dtype, how.op))] if mine else []

    def all_gather(self, counts: Sequence[int], itemsize: int) -> list[LibraryCall]:
        """One call; where blocks are unequal, a broadcast from each member."""
        mine = counts[self._me]
        if counts.count(mine) < self._members:
            blocks = enumerate(parts(0, counts, itemsize))
            return [call for root, (begin, nbytes) in blocks for call in self.broadcast(nbytes, root, begin)]
        return [LibraryCall("all_gather", (INPUT, OUTPUT), (mine * itemsize, self._raw))] if mine else []

    def broadcast(self, nbytes: int, root: int, begin: int = 0) -> list[LibraryCall]:
        """One call; to an output that begins so many bytes behind its array."""
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
        """A part of the input to each member, and one of the output from each; to oneself the library copies."""
        calls = []
        for peer, ((src, out), (dst, nbytes)) in enumerate(zip(sends, recvs, strict=True)):
            if out:
                calls.append(LibraryCall("send", (At(0, src),), (out, self._raw, peer)))
            if nbytes:
                calls.append(LibraryCall("recv", (At(1, dst),), (nbytes, self._raw, peer)))
        return calls

    def _one(self, member: int, nbytes: int) -> list[Part]:
        """A part for one member alone."""
        found = [_NOTHING] * self._members
        found[member] = 0, nbytes
        return found
