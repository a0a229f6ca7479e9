"""The ring: where things lie in its memory, how a message is cut, and what both ends write about it.

    page 0   line 0: magic, protocol version, lanes, slots, slot bytes, whether the slots are apart
             line 1: abort word (0, or why everybody must stop)
             line 2: messages consumed
             lines 3, 4: turn of the producer, of the consumer: the messages n it has finished; -1 - n once it gave up
                         the next one
             line 5: the process that has imported the slots; see `engine.session.peer_rings`
             lines 6, 7: where the producer's process is, the consumer's; line 8: which chunks of a message that goes
                         straight between the ends' arrays are claimed; all of ends in host memory only
    then     head[lane], tail[lane]: slots produced and consumed since the start, each alone on its line
    then     ledger: LEDGER entries of the producer, LEDGER of the consumer, one cache line each
    then     slots, page-aligned, lane by lane; or apart from all this, in a GPU's memory

Counters only grow. A line is 128 bytes: neighbouring counters never share what a core or a GPU fetches at once.
`header()` gives the same numbers to kernels written in C++.
"""

from __future__ import annotations

import ctypes
import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from xvcomm.errors import ResourceError
from xvcomm.memory.segment import PAGE, Segment, round_up
from xvcomm.system.interrupts import held_back
from xvcomm.types.dtype import BY_CODE
from xvcomm.types.opcode import OpCode

MAGIC = 0x78_76_63_6F_6D_6D
VERSION = 4
LINE = 128
ABORT = LINE
CONSUMED = 2 * LINE
TURNS = 3 * LINE
IMPORTER = 5 * LINE
MEETING = 6 * LINE
CLAIMS = 8 * LINE
COUNTERS = PAGE
MAX_LANES = 64
LEDGER = 64
ENTRY = 64
ALIGN = 16
LEAST_CHUNK = 16 << 10
LEAST_APART_CHUNK = 32 << 10
"""The same of slots in a GPU's memory, where copying is fast and the hand-over through host memory is not."""
LEAST_WIRE_CHUNK = 64 << 10
"""The same between hosts, where each slot costs both ends a system call."""

FROM_ARRAY_BYTES = 128 << 10
"""From this size on copying a message between hosts costs more than waiting for its receiver: it goes from the sender's array."""

_SEND = int(OpCode.SEND)
_PIECES = 4
"""Slots of a lane that a message takes, if they are large enough: so both ends copy at the same time."""


class Reason(enum.IntEnum):
    """Low byte of an abort word; above it lie the rank concerned, in 24 bits, and who found out, where that matters."""

    PEER_LOST = 1
    MISMATCH = 2
    DEADLINE = 3
    ABORTED = 4
    LEFT = 5
    SERVER_LOST = 6  # the rank is the number in the whole job of who served the store

    def word(self, rank: int, reporter: int = 0) -> int:
        """The abort word for a failure of `rank`, which `reporter` found."""
        return self | (rank << 8) | (reporter << 32)

    @staticmethod
    def bad(word: int) -> bool:
        """Whether a word says that all is over; it is not when a rank merely left."""
        return word & 0xFF not in (0, Reason.LEFT)

    @classmethod
    def parse(cls, word: int) -> tuple[Reason, int]:
        """Reason and rank of an abort word."""
        return cls(word & 0xFF), (word >> 8) & 0xFFFFFF

    @staticmethod
    def reporter(word: int) -> int:
        """The rank that found the failure."""
        return word >> 32


@dataclass(frozen=True, slots=True)
class RingLayout:
    """The shape of a ring; both ends use the one of whoever made it.

    Attributes:
        apart: whether the slots lie in a GPU's memory instead of behind the ledger.
        wired: whether it is one half of a ring between hosts, of which each half may be apart or not.
        fixed: whether whoever makes the ring must keep to it, because somebody counts on what the ring takes at once; else
            the ring may be smaller where memory is short.
    """

    lanes: int
    slots: int
    slot_bytes: int
    apart: bool = False
    wired: bool = False
    fixed: bool = field(default=False, compare=False)

    @property
    def least_chunk(self) -> int:
        """Bytes that a slot of a message carries at least, but the last; see `chunk_bytes`."""
        return LEAST_WIRE_CHUNK if self.wired else LEAST_APART_CHUNK if self.apart else LEAST_CHUNK

    @property
    def ledger(self) -> int:
        """Offset of the producer's entries; the consumer's follow."""
        return COUNTERS + round_up(2 * self.lanes * LINE, PAGE)

    @property
    def data(self) -> int:
        """Offset of the first slot."""
        return self.ledger + round_up(2 * LEDGER * ENTRY, PAGE)

    @property
    def size(self) -> int:
        """Bytes of shared memory."""
        return self.data if self.apart else self.data + self.capacity

    @property
    def capacity(self) -> int:
        """Bytes of all slots."""
        return self.lanes * self.slots * self.slot_bytes

    def at_once(self, messages: int) -> int:
        """Bytes of so many messages, all together, that an empty ring takes before any of them is received."""
        if messages < 2 and self.slots >= _PIECES:
            return self.capacity
        # Of each message but one, a lane's last slot may be nearly empty.
        return self.lanes * max(0, self.slots - max(0, messages - 1)) * min(self.slot_bytes, LEAST_CHUNK)

    def smaller(self) -> RingLayout | None:
        """About half of it, in as many lanes; None if it is as small as a ring should be, or fixed."""
        if self.fixed or self.apart:
            return None
        if self.slot_bytes > LEAST_CHUNK:  # smaller slots cost less speed than fewer
            return replace(self, slot_bytes=max(LEAST_CHUNK, round_up(self.slot_bytes // 2, PAGE)))
        return replace(self, slots=max(_PIECES, self.slots // 2)) if self.slots > _PIECES else None

    def head(self, lane: int) -> int:
        """Offset of a lane's count of produced slots."""
        return COUNTERS + 2 * lane * LINE

    def tail(self, lane: int) -> int:
        """Offset of a lane's count of consumed slots."""
        return COUNTERS + (2 * lane + 1) * LINE


def header() -> str:
    """C++ constants for kernels, so that no number is written down twice."""
    names = {
        "ABORT": ABORT, "CONSUMED": CONSUMED, "TURNS": TURNS, "COUNTERS": COUNTERS, "LINE": LINE, "LEDGER": LEDGER,
        "ENTRY": ENTRY, "ALIGN": ALIGN, "MISMATCH": Reason.MISMATCH,
    }  # fmt: skip
    return "".join(f"constexpr long long XV_{name} = {+value};\n" for name, value in names.items())


def chunk_bytes(nbytes: int, lanes: int, slot_bytes: int, least: int) -> int:
    """Bytes of a message that one slot carries: a quarter of a lane's part, but no less than is worth a hand-over.
    Movers compile this very function."""
    pieces = _PIECES * lanes
    quarter = (nbytes + pieces * PAGE - 1) // (pieces * PAGE) * PAGE
    return min(slot_bytes, max(least, quarter))


def lanes_used(nbytes: int, lanes: int, chunk: int) -> int:
    """Lanes that carry a part of a message; one that fits a chunk takes one. Movers compile this very function."""
    return min(lanes, max(1, (nbytes + chunk - 1) // chunk))


def part_bytes(nbytes: int, used: int) -> int:
    """Bytes of each lane's part but the last, a multiple of 16. Movers compile this very function."""
    return ((nbytes + used - 1) // used + ALIGN - 1) // ALIGN * ALIGN


def may_go_from_array(nbytes: int, capacity: int) -> bool:
    """Whether a message between hosts may go from the sender's array, so that the sender waits for the receiver, see
    `must_wait`. Movers and the wire compile this function.
    """
    return nbytes >= min(capacity, FROM_ARRAY_BYTES)


def must_wait(op: int, nbytes: int, capacity: int) -> bool:
    """Whether the sender of such a message waits until it was received. Else its receiver may be sending, too: if the message is
    not received soon, it is copied to the ring, which it fits. Movers compile this very function.
    """
    return nbytes > capacity or op != _SEND


class Message(NamedTuple):
    """What an end says of a message in the ledger; all fields must agree. Plain integers: compiled code takes them.

    Attributes:
        op: `OpCode.SEND` for point-to-point, else the code of the collective it belongs to.
        dtype: code of the element type.
        nbytes: length.
        tag: the user's tag, or the sequence number of the collective.
        detail: root and reduction of a collective, packed; 0 for point-to-point.
    """

    op: int
    dtype: int
    nbytes: int
    tag: int
    detail: int = 0

    def describe(self) -> str:
        """`4096 x float32, tag 7`."""
        dtype = BY_CODE.get(self.dtype)
        if dtype is None:
            return f"{self.nbytes} bytes of dtype {self.dtype}, tag {self.tag}"
        return f"{self.nbytes // dtype.itemsize} x {dtype}, tag {self.tag}"


MESSAGE = np.dtype([(name, "i8") for name in Message._fields])
"""A `Message` for compiled code."""

LEDGER_ENTRY = np.dtype([
    ("number", "i8"),  # of the message, from 1 on; written last
    ("message", MESSAGE),
    ("offer", "i8"),  # address of the end's array, if the other end or the carrier may touch it; else 0
    ("took", "i8"),  # nanoseconds of the consumer's newest message for which it offered its array
])  # fmt: skip
"""What an end writes of a message into the ledger: ENTRY bytes."""


def ledger_at(address: int) -> np.ndarray[Any, Any]:
    """The LEDGER entries that one end, or one rank, writes."""
    return np.ndarray(LEDGER, LEDGER_ENTRY, memoryview((ctypes.c_byte * (LEDGER * ENTRY)).from_address(address)))


GEOMETRY = [(name, "i8") for name in ("lanes", "slots", "slot_bytes", "ledger", "data", "least_chunk")]
"""What movers and the carrier need of a layout; `ledger` and `data` are offsets."""

CARRIER = np.dtype([
    ("progress", "i8"),  # function that carries frames while a mover waits
    ("wake", "i8"),  # function that lets the carrier's thread look at the rings, for movers that do not carry
    ("registered", "i8"),  # function that says whether RDMA devices may use an array, by its address and bytes
    ("to_ring", "i8"),  # function that copies to the ring what was sent from an array, by the ring's DIRECT record
])  # fmt: skip
"""What movers call of the process's carrier, see `wire.progress`: its record begins with this, and is the first argument."""

COPIES, EXPECTS = 1, 2
"""What a thread that calls `CARRIER.progress` does meanwhile: it copies a long message; it expects a message soon."""

DIRECT = np.dtype([
    ("message", "i8"),  # number of the message, from 1 on; written last
    ("first", "i8", MAX_LANES),  # consumer: the lane's first slot that goes into the array; earlier ones go into the ring
    # of a producer; only its mover writes these
    ("may_wait", "i8"),  # whether a message that fits the ring may go from its array and wait for its receiver for a short time
    ("late", "i8"),  # how many more of these were received too late than in time
    ("copies_left", "i8"),  # how many of the next ones are copied at once for that reason
    ("last_end", "i8"),  # when the latest one ended
])  # fmt: skip
"""What the carrier says of the newest message that it receives into the consumer's array; to the producer of the newest one for
whose slots the consumer has advertised a registered array. A producer's mover keeps its statistics here, too."""


class RingEnd:
    """One end of a ring in this process.

    Attributes:
        channel: which of the pair's channels of messages it is, as `Rings` opened it.
        counter: address of the number of the next message, for compiled code; `sequence` in memory.
        geometry: the values of GEOMETRY.
        slots: where this process's device sees the slots, if they are apart; else 0.
        stuck: whether something on the device may still use the ring when it is closed.
        turn: address of this end's turn word, by which transfers keep their order whichever thread moves them.
        replays: address of the word of `replayed`, for compiled code.
        kept: what the movers of this process's device keep with the end.
        carrier: address of the `CARRIER` record of a ring between hosts; 0 where both ends map the same memory.
        direct: address of the `DIRECT` record of a ring between hosts; else 0.
        begun: called when a message was enqueued whose mover does not carry frames, and when the ring was stopped.
        told: whether the other end knows that the ring was stopped.
        carried: the bytes of the newest messages that each connection to another host has carried, by the messages' numbers, from
            1 on, and the connections' names.
        gave_up: called when a message of this end was given up; returns when the other end does not touch its array.
        closing: called before the memory is unmapped, by whoever pinned it.
        dispose: unmaps it, at once or later.
    """

    def __init__(self, segment: Segment, layout: RingLayout, *, peer: int, producer: bool, made: bool = False) -> None:
        self._segment = segment
        self.made = made
        self.stuck = False
        self.dispose: Callable[[Segment], None] = Segment.close
        self.layout = layout
        self.peer = peer
        self.producer = producer
        self.channel = 0
        self.geometry = (
            layout.lanes, layout.slots, layout.slot_bytes, layout.ledger, layout.data, layout.least_chunk
        )  # fmt: skip
        self.slots = 0
        self._sequence, self._replayed = ctypes.c_int64(), ctypes.c_int64()
        self.counter = ctypes.addressof(self._sequence)
        self.replays = ctypes.addressof(self._replayed)
        self.address = segment.address
        self.turn = segment.address + TURNS + (0 if producer else LINE)
        self.kept: Any = None
        self.carrier = 0
        self.direct = 0
        self.begun: Callable[[], None] | None = None
        self.told: Callable[[], bool] = lambda: True
        self.carried: Callable[[], dict[int, dict[str, int]]] = dict
        self.gave_up: Callable[[], None] | None = None
        self._leaving = threading.RLock()  # a signal handler may close in the middle of anything
        self.closing: list[Callable[[], None]] = []

    @classmethod
    def create(cls, segment: Segment, layout: RingLayout, *, peer: int, producer: bool) -> RingEnd:
        """An end in a fresh segment; writes page 0."""
        words = (ctypes.c_int64 * 6).from_address(segment.address)
        words[1:] = [VERSION, layout.lanes, layout.slots, layout.slot_bytes, layout.apart]
        words[0] = MAGIC
        return cls(segment, layout, peer=peer, producer=producer, made=True)

    @classmethod
    def open(cls, segment: Segment, *, peer: int, producer: bool) -> RingEnd:
        """An end of a ring that the other rank made.

        Raises:
            ResourceError: the segment holds no ring, or one of another protocol version, or is too small for it.
        """
        magic, version, lanes, slots, slot_bytes, apart = (ctypes.c_int64 * 6).from_address(segment.address)
        if (magic, version) != (MAGIC, VERSION):
            raise ResourceError(
                f"rank {peer} offers ring protocol {version}, this rank speaks {VERSION}; install one xvcomm everywhere"
            )
        layout = RingLayout(lanes, slots, slot_bytes, bool(apart))
        if not 0 < lanes <= MAX_LANES or slots < 1 or slot_bytes < 1 or layout.size > segment.size:
            raise ResourceError(f"rank {peer} offers a ring that does not fit its shared memory: {layout}")
        return cls(segment, layout, peer=peer, producer=producer)

    @property
    def sequence(self) -> int:
        """Number of the next message."""
        return self._sequence.value

    @sequence.setter
    def sequence(self, number: int) -> None:
        self._sequence.value = number

    @property
    def replayed(self) -> bool:
        """Whether graphs have messages of it, which count when they run: `sequence` may then be too low."""
        return bool(self._replayed.value)

    @replayed.setter
    def replayed(self, value: bool) -> None:
        self._replayed.value = value

    def abort(self, word: int) -> None:
        """Tell both ends to stop; the first reason stays."""
        if self.address:
            cell = ctypes.c_int64.from_address(self.address + ABORT)
            if not cell.value:
                cell.value = word
                if self.begun is not None:
                    self.begun()

    def abort_word(self) -> int:
        """0, or why the ring stopped."""
        return ctypes.c_int64.from_address(self.address + ABORT).value if self.address else 0

    def give_up(self) -> None:
        """Say that a message of this end will never be finished; those behind it stop as soon as the ring does.

        The array is the caller's again afterwards. May block for a second if the other end is stuck in it. Any thread.
        """
        # Of several threads none returns before the first one need not wait any more. An exception of a signal's handler would
        # give the array back too early.
        with self._leaving, held_back():
            if self.address and self.finished()[1]:
                ctypes.c_int64.from_address(self.turn).value ^= -1
                if self.gave_up is not None:
                    self.gave_up()

    def finished(self) -> tuple[int, bool]:
        """How many messages this end has finished, and whether it goes on: not if it gave one up, or was closed."""
        if not self.address:
            return 0, False
        turn = ctypes.c_int64.from_address(self.turn).value
        return (turn, True) if turn >= 0 else (-1 - turn, False)

    def mismatch(self) -> tuple[Message, Message] | None:
        """The newest message that both ends described, and differently: (this end's words, the other's).

        Only of those that were not received: an entry of an older one may hold words of the next one there already, which
        its end then gave up before it made them valid.
        """
        if not self.address:
            return None
        consumed = ctypes.c_int64.from_address(self.address + CONSUMED).value
        pairs = zip(*map(self._ledger, range(2)), strict=True)
        differing = [(sent, due) for sent, due in pairs if sent[0] == due[0] > consumed and sent != due]
        if not differing:
            return None
        sent, due = (Message(*message) for _, message in max(differing))
        return (sent, due) if self.producer else (due, sent)

    def described(self) -> dict[int, Message]:
        """What this end has said of its newest messages, by their numbers, from 1 on."""
        said = self._ledger(0 if self.producer else 1) if self.address else []
        return {number: Message(*message) for number, message in said if number}

    def _ledger(self, side: int) -> list[Any]:
        """Number and message of each entry of the producer, 0, or the consumer, 1."""
        found = ledger_at(self.address + self.layout.ledger + side * LEDGER * ENTRY)
        entries: list[Any] = found[["number", "message"]].tolist()
        return entries

    def close(self) -> None:
        """Unmap this end. After a good end the other one can still open the ring and read what was sent. Idempotent."""
        while self.closing:
            self.closing.pop()()
        if not self.address:
            return
        if Reason.bad(self.abort_word()):
            self._segment.unlink()
        self.address = 0
        self.dispose(self._segment)
