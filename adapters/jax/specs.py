"""Descriptions of operations without their data: the parameter of the primitives, and a text in compiled programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from xvcomm.adapters.jax.communicators import name_of
from xvcomm.adapters.jax.status import Slot
from xvcomm.comm.communicator import Communicator
from xvcomm.trace.operation import ANY_PEER, NO_PEER
from xvcomm.types.dtype import ReduceOp, Reduction
from xvcomm.types.opcode import OpCode

TAGS = 1 << 60
"""Tags of users are below this; those of derivatives have bits above."""

ANY = -1
"""In place of the tag of a message to receive: any tag."""

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Spec(ABC):
    """One operation of one communicator. Equal specs on equal arrays are the same code in a program.

    Attributes:
        carried: whether it has a token as operand, after the arrays, and as last result.
        linked: whether it has another token as last operand, which it is also ordered after.
        ordered: whether JAX orders it by an effect.
        lone: whether only one of a process's devices takes part; the others' results are zeros.
        call_site: the user's call site, `file.py:line`.
    """

    comm: Communicator
    carried: bool = False
    linked: bool = False
    ordered: bool = True
    lone: bool = False
    call_site: str = field(default="", compare=False)

    @abstractmethod
    def results(self, shape: Shape) -> list[Shape]:
        """Shapes of the arrays that are written, one or none; `shape` is that of the last input array."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the operation."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do: the results are the operands."""
        return False

    @property
    def passes(self) -> bool:
        """Whether this rank's result is its input, so that the first operand is the first result.

        It is a result of the operation nevertheless: using it keeps the operation in the program.
        """
        return False

    @property
    def mute(self) -> bool:
        """Whether this rank gets no array while others do: the operation is kept even if its token is unused."""
        return False

    @property
    def effectful(self) -> bool:
        """Whether it has JAX's effect."""
        return self.ordered and not self.idle

    @abstractmethod
    def details(self) -> str:
        """Text that distinguishes specs of the same operation and communicator."""

    def text(self, arrays: Sequence[Any], device: int | None) -> str:
        """The text in compiled programs.

        Args:
            arrays: operands, or objects that define shape and dtype of each.
            device: index of the device that takes part, for a `lone` operation.
        """
        where = "" if device is None else f" by device {device}"
        of = " and ".join(f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in arrays)
        return f"{self.name} {self.details()} of {of} on {name_of(self.comm)}{where}"

    def but(self, **changes: Any) -> Self:
        """A copy with changes."""
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class CollectiveSpec(Spec):
    """A collective.

    Attributes:
        reduction: for reductions.
        root: for collectives with a root.
        rows: rows per rank along axis 0 of the array that contains all ranks' rows.
        back: the same for the output of all_to_all.
        uneven: whether the user passed rows.
        replicated: for all_reduce: whether every rank uses the result in the same way; see there.
        identity: for a replicated all_reduce: whether it is the transposed one.
    """

    op: OpCode
    reduction: Reduction | None = None
    root: int = -1
    rows: tuple[int, ...] = ()
    back: tuple[int, ...] = ()
    uneven: bool = False
    replicated: bool = False
    identity: bool = False

    @property
    def name(self) -> str:
        return str(self.op)

    @property
    def idle(self) -> bool:
        return self.identity

    @property
    def passes(self) -> bool:
        mine = self.comm.rank == self.root
        return mine if self.op is OpCode.BROADCAST else self.op is OpCode.REDUCE and not mine

    @property
    def mute(self) -> bool:
        return self.op is OpCode.GATHER and self.root != self.comm.rank

    def results(self, shape: Shape) -> list[Shape]:
        mine = self.comm.rank
        match self.op:
            case OpCode.ALL_REDUCE:
                return [shape]
            case OpCode.REDUCE:
                return [shape] if self.root == mine else []
            case OpCode.BROADCAST:
                return [] if self.root == mine else [shape]
            case OpCode.REDUCE_SCATTER | OpCode.SCATTER:
                return [(self.rows[mine], *shape[1:])]
            case OpCode.ALL_GATHER:
                return [(sum(self.rows), *shape[1:])]
            case OpCode.GATHER:
                return [(sum(self.rows), *shape[1:])] if self.root == mine else []
            case OpCode.ALL_TO_ALL:
                return [(sum(self.back), *shape[1:])]
        return []

    def details(self) -> str:
        parts = []
        if self.reduction is not None:
            factor = f" {self.reduction.factor.hex()}" if self.reduction.op is ReduceOp.PREMUL_SUM else ""
            parts.append(f"{self.reduction.op}{factor}")
        if self.root >= 0:
            parts.append(f"root {self.root}")
        if self.rows:
            parts.append(f"{'uneven ' if self.uneven else ''}rows {','.join(map(str, self.rows))}")
        if self.back:
            parts.append(f"back {','.join(map(str, self.back))}")
        return f"({', '.join(parts)})"


@dataclass(frozen=True, kw_only=True)
class MessageSpec(Spec):
    """A message, or one in each direction.

    Attributes:
        dst, src: the other ranks; NO_PEER if there is none; `src` may be ANY_PEER.
        send_tag, recv_tag: tags of the messages; ANY accepts any tag.
        channel: of both.
        status: filled with source and tag of the received message.
    """

    dst: int = NO_PEER
    src: int = NO_PEER
    send_tag: int = 0
    recv_tag: int = 0
    channel: int = 0
    status: Slot | None = None

    @property
    def name(self) -> str:
        if self.src == NO_PEER:
            return "send"
        return "recv" if self.dst == NO_PEER else "sendrecv"

    @property
    def mute(self) -> bool:
        return self.src == NO_PEER

    @property
    def wild(self) -> bool:
        """Whether source or tag are only known from the message."""
        return self.src == ANY_PEER or self.recv_tag == ANY

    def results(self, shape: Shape) -> list[Shape]:
        return [] if self.src == NO_PEER else [shape]

    def details(self) -> str:
        out = f"to {self.dst} tag {self.send_tag}" if self.dst != NO_PEER else ""
        src, tag = "any" if self.src == ANY_PEER else self.src, "any" if self.recv_tag == ANY else self.recv_tag
        back = f"from {src} tag {tag}" if self.src != NO_PEER else ""
        status = f", status {self.status.number}" if self.status is not None else ""
        return f"({', '.join(filter(None, (out, back)))}, channel {self.channel}{status})"

    def tagged(self, bits: int) -> MessageSpec:
        """A copy with bits of the tags inverted, and without status."""
        return self.but(send_tag=self.send_tag ^ bits, recv_tag=self.recv_tag ^ bits, status=None)

    def reversed(self) -> MessageSpec:
        """The message in the opposite direction between the same ranks."""
        return self.but(dst=self.src, src=self.dst, send_tag=self.recv_tag, recv_tag=self.send_tag)
