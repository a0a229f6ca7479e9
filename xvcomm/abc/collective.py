"""Contract of a native collective library: NCCL, RCCL, or xvcomm's own on host memory.

One instance joins the members of one island for one communicator. Addresses are plain integers, counts are elements.
All members call the same operations in the same order. Each call is ordered on `stream`; on host memory it returns
when the operation is done. In place means `dst` is `src`, or this member's part of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

from xvcomm.abc.device import Stream
from xvcomm.abc.launch import EnqueuedCall
from xvcomm.types.dtype import DType, Reduction
from xvcomm.types.opcode import OpCode


class CollectiveForm(NamedTuple):
    """A collective but for its arrays, as one member calls it.

    Attributes:
        counts: of each member, or the one number of operations that have one; a barrier is an all-reduce.
        recv_counts, root: of operations that have them.
    """

    op: OpCode
    counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    dtype: DType
    reduction: Reduction
    root: int


class PreparedCollective(NamedTuple):
    """An operation of fixed shape for compiled code, which blocks. Calls take turns with all others.

    Attributes:
        function: address of a C function that needs no interpreter lock, of `argument`, `src`, `dst` and, if it takes a
            fourth word, the collective's number. It returns READY of `xvcomm.jit.atomics`, or PENDING or STOPPED when `resume`
            must end the operation.
        argument: its first word.
        resume: goes on with an operation on these addresses; raises as the collective does.
    """

    function: int
    argument: int
    resume: Callable[[int, int, Stream], None]


class Collective(ABC):
    """The native library's communicator. Every operation raises `CollectiveStopped` or `CollectiveStalled`.

    Attributes:
        failure: what the library itself says went wrong, or nothing; `error` is then its own word.
        eager: whether a member may finish an operation, and leave, before others have begun it.
    """

    failure: str = ""
    eager: ClassVar[bool] = False

    @abstractmethod
    def run(self, form: CollectiveForm, src: int, dst: int, stream: Stream) -> None:
        """Run an operation: all ranks' blocks lie one after the other; what only the root has counts only there.

        ALL_REDUCE, BARRIER: everybody gets the reduction of all inputs. REDUCE: the root gets it.
        REDUCE_SCATTER: member i gets the reduction of everybody's i-th block, `counts[i]` elements.
        ALL_GATHER: everybody gets all blocks; member i puts in `counts[i]` elements. GATHER: the root gets them.
        BROADCAST: everybody gets the root's array. SCATTER: member i gets the i-th block of the root's array.
        ALL_TO_ALL: member i gets everybody's i-th block.
        """

    def prepare(self, form: CollectiveForm) -> PreparedCollective | None:
        """An operation for compiled code; None if this library has none."""
        return None

    def enqueued(self, form: CollectiveForm) -> EnqueuedCall | None:
        """The same on a device's stream; None if this library has none, or needs more than calls of its own."""
        return None

    @abstractmethod
    def abort(self, word: int, delay: float = 0.0) -> None:
        """Make every member leave what it is in. Safe from any thread; does not wait.

        Args:
            word: a ring abort word.
            delay: seconds for which operations on a device's streams may go on; none begins any more.
        """

    @abstractmethod
    def error(self) -> int:
        """0, or the abort word that some member set."""

    @abstractmethod
    def close(self) -> None:
        """Free what it owns. Idempotent."""


class CollectiveStopped(Exception):
    """A member set the abort word while this one was waiting."""

    def __init__(self, word: int) -> None:
        super().__init__("the native collective stopped")
        self.word = word


class CollectiveStalled(Exception):
    """The deadline passed; `missing` are the members that had not arrived."""

    def __init__(self, missing: Sequence[int]) -> None:
        super().__init__("the native collective did not finish in time")
        self.missing = tuple(missing)
