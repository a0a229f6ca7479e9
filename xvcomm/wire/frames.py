"""What goes over a rail: frames, a header of fixed size each, and a payload of at most one slot.

Every frame can be sent again over another rail: the receiver drops what it has already, by the numbers in the header.

| kind | number | payload |
| --- | --- | --- |
| OPEN | name of the wire; `slot` is the sender's number of it | see `OPEN_WORDS` |
| SLOT | where its bytes are in the message | the slot, as long as it is filled; the header has its message's description |
| ENTRY | none | none: the description of a message without slots |
| CREDIT | messages consumed | slots consumed, of each lane |
| STOP | abort word; a producer has sent `entry.number` messages before, a consumer has consumed `slot` | slots produced or \
consumed, of each lane |
| STOPPED | none | none: the answer to STOP, once everything before it has arrived |
| PING, PONG | what the PONG repeats | none |
| LEAVE | none | none: the process has closed its session |
| ASK | of the question; `lane`: its `Topic`; `wire`: the rank's index on its host, or -1; `slot`: the most parts | none |
| TELL | of the question; `slot`: how many frames follow | the rank's `Life`; the time there; a part, if there is one |
| WRITTEN | over RDMA: a SLOT whose bytes were written into the ring before | none behind the header; `length` as of SLOT |
| TAKEN | none | none: only what goes with every frame over RDMA, see `posting` |
| ARRAY | none; the header has the description of the message that is received | see `ARRAY_WORDS`, or none: the array is \
withdrawn, or, from the producer, used no more |
| PLACED | over RDMA: a SLOT whose bytes were written into the consumer's array before | as of WRITTEN |
| FAILED | name of the receiver's queue pair; `slot`: of the sender's, which has failed; `lane`: 1 if this is an answer | none |
"""

from __future__ import annotations

import enum

import numpy as np

from xvcomm.memory.ring import MAX_LANES, MESSAGE


class Kind(enum.IntEnum):
    """Kind of a frame."""

    OPEN = 1
    SLOT = 2
    ENTRY = 3
    CREDIT = 4
    STOP = 5
    STOPPED = 6
    PING = 7
    PONG = 8
    LEAVE = 9
    ASK = 10
    TELL = 11
    TAKEN = 12
    FAILED = 13
    WRITTEN = 14
    ARRAY = 15
    PLACED = 16


FRAME = np.dtype([
    ("kind", "i8"),
    ("wire", "i8"),  # the receiver's number of the wire; of OPEN 1 if the sender wants that number
    ("lane", "i4"),
    ("attempt", "i4"),  # of SLOT: how often it was sent before, over rails that were lost
    ("slot", "i8"),  # number of the slot in its lane
    ("number", "i8"),
    ("length", "i8"),  # bytes of the payload
    ("entry", [("number", "i8"), ("message", MESSAGE)]),  # as in the ring's ledger
])  # fmt: skip
"""The header of a frame, in the byte order of little-endian machines, which all GPU hosts have."""

HEADER = FRAME.itemsize
CONTROL_BYTES = 8 * MAX_LANES
"""Most bytes of the payload of any frame but SLOT."""
MAX_DEVICES = 8
"""Most RDMA devices of a process."""
BUFFERS = 64
"""Frames that a rail of RDMA may send before the other side has handled the first of them."""
SHORT_BYTES = 1 << 10
"""Most bytes of a payload that goes with its frame over RDMA, into the same buffer."""
BUFFER_BYTES = 64 * -(-(8 + HEADER + SHORT_BYTES) // 64)
"""Bytes of a buffer: how many frames its sender has handled, the frame, its payload."""
OPEN_WORDS = 8 + MAX_DEVICES
"""Words of the payload of OPEN: the ring's three measures, whether the sender is its producer, the communicator and the
receiver's rank there, or -1; whether the slots are in a GPU's memory, where they are, and their rkey on each of the sender's
devices, or 0 if RDMA devices may not write to them."""

ARRAY_WORDS = 1 + MAX_DEVICES
"""Words of the payload of ARRAY: by which address devices find the registered array that the message goes into, and its rkey on
each of the consumer's devices."""

assert np.little_endian
