"""A benchmark case: one operation at one size, its buffers, and the expected result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from xvcomm.cli.bench.memory import Memory
from xvcomm.types.dtype import DType
from xvcomm.types.topology import Topology

#: Operations and their bus-bandwidth factor for n ranks, as nccl-tests defines them.
OPS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "sendrecv": lambda n: 1.0,
    "send": lambda n: 1.0,
    "p2p": lambda n: 1.0,
    "barrier": lambda n: 0.0,
}
#: The part of `Case.size` that each of n ranks, half of them in each of two islands, must at least send to the other island
#: and receive from it. A broadcast crosses one way only.
CROSSING: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 / n,
    "all_gather": lambda n: 1 / n,
    "reduce_scatter": lambda n: 1 / n,
    "broadcast": lambda n: 2 / n,
    "all_to_all": lambda n: 1 / 2,
}
M = TypeVar("M")
"""Type of a message in the calls of a library."""

_DIVIDED = frozenset(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"))
_PAIR = frozenset(("p2p", "send"))
_PERIOD = 3 << 16


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table.

    Attributes:
        op: a key of `OPS`. `p2p` and `send` use ranks 0 and 1 only: `p2p` is a ping-pong, reported as the time one way; `send`
            sends from 0 to 1 repeatedly. The root is rank 0.
        size: bytes as nccl-tests counts them: of the larger of input and output.
        dtype: element type.
        ranks: size of the job.
        in_place: whether the result replaces the input, if the operation has both.
    """

    op: str
    size: int
    dtype: DType
    ranks: int
    in_place: bool

    @property
    def block(self) -> int:
        """Elements per rank for operations that divide the array, otherwise elements of the array."""
        parts = self.ranks if self.op in _DIVIDED else 1
        return self.size // (self.dtype.itemsize * parts)

    @property
    def count(self) -> int:
        """Elements of the larger of input and output."""
        return self.block * (self.ranks if self.op in _DIVIDED else 1)

    @property
    def bytes(self) -> int:
        """`size` rounded down to a whole number of blocks."""
        return self.count * self.dtype.itemsize

    def crossing(self, topology: Topology, rank: int) -> tuple[int, int] | None:
        """Bytes that a rank must at least send across the border of two equal islands, and receive; None if not known."""
        islands = topology.islands
        if len(islands) != 2 or islands[0].size != islands[1].size or self.op not in CROSSING:
            return None
        nbytes = int(CROSSING[self.op](self.ranks) * self.bytes)
        if self.op != "broadcast":
            return nbytes, nbytes
        return (nbytes, 0) if topology.island_of(rank) is topology.island_of(0) else (0, nbytes)

    def takes_part(self, rank: int) -> bool:
        """Whether `rank` takes part in the operation."""
        return self.op not in _PAIR or rank < 2


@dataclass(slots=True)
class Buffers:
    """One rank's input and output, and their memory; the same array for in-place operations."""

    src: Any
    dst: Any
    memory: Memory


def allocate(case: Case, memory: Memory) -> Buffers:
    """Create zeroed buffers of the case's sizes."""
    src = memory.zeros(case.block if case.op in ("all_gather", "gather") else case.count, case.dtype)
    if case.op == "broadcast" or (case.in_place and case.op in ("all_reduce", "reduce")):
        return Buffers(src, src, memory)
    one_block = case.op in ("reduce_scatter", "scatter")
    return Buffers(src, memory.zeros(case.block if one_block else case.count, case.dtype), memory)


def fill(case: Case, rank: int, buffers: Buffers) -> None:
    """Write this rank's pattern to the input, and an unrelated value to a separate output."""
    buffers.memory.tile(buffers.dst, np.full(1, 9, case.dtype.numpy))
    buffers.memory.tile(buffers.src, _pattern(case, rank, 0))


def clear(case: Case, buffers: Buffers) -> None:
    """Set the input to zero, so that repeated sums stay zero."""
    buffers.memory.tile(buffers.src, np.zeros(1, case.dtype.numpy))


def wrong(case: Case, rank: int, buffers: Buffers) -> int:
    """Number of elements of the output that differ from the expected result."""
    differ = buffers.memory.differ
    return sum(differ(buffers.dst[at : at + case.block], values) for at, values in _expected(case, rank))


def _expected(case: Case, rank: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """Start of each block of the output, and the values that repeat in it."""
    n, block = case.ranks, case.block
    match case.op:
        case "all_gather" | "all_to_all":
            start = rank * block if case.op == "all_to_all" else 0
            yield from ((source * block, _pattern(case, source, start)) for source in range(n))
        case "all_reduce" | "reduce" | "reduce_scatter":
            if case.op != "reduce" or rank == 0:
                yield 0, _sum(case, rank * block if case.op == "reduce_scatter" else 0)
        case "gather" if rank == 0:
            yield from ((source * block, _pattern(case, source, 0)) for source in range(n))
        case "scatter":
            yield 0, _pattern(case, 0, rank * block)
        case "broadcast":
            yield 0, _pattern(case, 0, 0)
        case "sendrecv":
            yield 0, _pattern(case, (rank - 1) % n, 0)
        case "p2p" if rank < 2:
            yield 0, _pattern(case, 0, 0)
        case "send" if rank == 1:
            yield 0, _pattern(case, 0, 0)


def _pattern(case: Case, rank: int, start: int) -> NDArray[Any]:
    return ((_index(case, start) + rank) % 3).astype(case.dtype.numpy)


def _sum(case: Case, start: int) -> NDArray[Any]:
    index = _index(case, start)
    return np.asarray(sum((index + rank) % 3 for rank in range(case.ranks))).astype(case.dtype.numpy)


def _index(case: Case, start: int) -> NDArray[Any]:
    return np.arange(start, start + max(1, min(case.count, _PERIOD)))


def one_way(
    rank: int, send: Callable[[M], object], recv: Callable[[M], object], src: M, dst: M
) -> Callable[[], object]:
    """The operation `send`: send from rank 0, receive on rank 1.

    Args:
        send, recv: calls of the library; `src`, `dst` are their arguments.
    """
    return partial(send, src) if rank == 0 else partial(recv, dst)


def ping_pong(
    rank: int, send: Callable[[M], object], recv: Callable[[M], object], src: M, dst: M
) -> Callable[[], object]:
    """The operation `p2p`: a round trip; arguments as for `one_way`.

    Each rank sends what it received last, so a message has just been written, as in real programs. A message that is sent
    repeatedly stays in the receiver's caches, which favours libraries that copy once: 64 KiB 9.9 -> 4.5 µs.
    """
    out, into = (src, dst) if rank == 0 else (dst, dst)

    def there() -> None:
        nonlocal out, into
        send(out)
        recv(into)
        out, into = into, out

    def back() -> None:
        recv(into)
        send(out)

    return there if rank == 0 else back
