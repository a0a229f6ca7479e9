"""One operation under way, and the words for it."""

from __future__ import annotations

import zlib

import msgspec

from xvcomm.memory.ring import Message
from xvcomm.types.dtype import BY_CODE, ReduceOp
from xvcomm.types.opcode import OpCode

NO_PEER, ANY_PEER = -1, -2


class Operation(msgspec.Struct, eq=False, gc=False):
    """An operation that a rank is in.

    Attributes:
        sequence: number of this collective in its communicator; of the next one, for point-to-point; -1 before any.
        message: what the ranks must agree on.
        peer: the rank at the other end of a point-to-point operation, or ANY_PEER; else NO_PEER.
        record: its number in the flight recorder.
        channel: of a point-to-point operation.
    """

    name: OpCode
    sequence: int
    message: Message
    peer: int = NO_PEER
    record: int = 0
    channel: int = 0

    def __str__(self) -> str:
        if self.peer != NO_PEER:
            peer = "any rank" if self.peer == ANY_PEER else f"rank {self.peer}"
            return f"{self.name} with {peer}" + (f" (channel {self.channel})" if self.channel else "")
        return f"{self.name} #{self.sequence}" if self.sequence >= 0 else str(self.name)


def pack_detail(root: int, op: int, counts: tuple[int, ...] = ()) -> int:
    """Root, reduction and uneven counts in one word, for ledgers; equal words mean equal calls."""
    word = (root + 1) | (op << 20)
    return word | (zlib.crc32(repr(counts).encode()) << 28) if counts else word


def describe(message: Message) -> str:
    """A collective as a ledger describes it: `all_reduce(sum) of 4096 x float32`."""
    if message.op == OpCode.BARRIER:
        return "barrier"
    op, root = (message.detail >> 20) & 0xFF, (message.detail & 0xFFFFF) - 1
    dtype = BY_CODE.get(message.dtype)
    text = str(OpCode(message.op))
    text += f"({ReduceOp(op)})" if op else ""
    text += f" of {message.nbytes // dtype.itemsize} x {dtype}" if dtype else ""
    text += f" with root {root}" if root >= 0 else ""
    return text + (" and uneven counts" if message.detail >> 28 else "")
