"""Probes: find messages without a posted receive, by the descriptions that senders write into the rings' ledgers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xvcomm.abc.device import RingStalled, RingStopped
from xvcomm.engine.session.rings import Use
from xvcomm.jit.atomics import BUDGET, PENDING, READY, STOPPED, budget_of_more, full_fence, load_acquire, relax
from xvcomm.jit.compile import compiling, kernel
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at, python_type
from xvcomm.memory.ring import ABORT, CONSUMED, LEDGER, LEDGER_ENTRY, MESSAGE, Message, Reason, RingEnd
from xvcomm.trace.callsite import find_call_site
from xvcomm.trace.format import State
from xvcomm.trace.operation import ANY_PEER, Operation
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import BY_CODE, DType
from xvcomm.types.opcode import OpCode

if TYPE_CHECKING:
    from xvcomm.engine.context import Context

_GONE = 3  # beside READY, PENDING and STOPPED: nothing is there, and nothing will come
_LEFT = int(Reason.LEFT)
_SPINS_PER_US = 100  # a look costs about 10 ns; the figure needs no precision
_ONCE = -1
_INSIDE = 2  # functions of xvcomm that are under way when `wait` asks for the call site
_NOTHING = Message(int(OpCode.PROBE), 0, 0, -1)


class Probe(NamedTuple):
    """A message that can be received.

    Attributes:
        tag: as the sender gave it.
    """

    src: int
    tag: int
    nbytes: int
    dtype: DType


_ROW = np.dtype([
    ("ring", "i8"),  # its address
    ("ledger", "i8"),  # address of its producer's entries
    ("counter", "i8"),  # address of the number of receives posted
])  # fmt: skip
_Row, _row_at = python_type(_ROW), compiled_at(_ROW)
_Description, _description_at = python_type(MESSAGE), compiled_at(MESSAGE)
_entry_at = compiled_at(LEDGER_ENTRY)


@register_jitable
def _next(row: Any) -> int:
    """Number of the first message without a posted receive. Receives in a graph count once they have run."""
    return max(load_acquire(row.counter), load_acquire(row.ring + CONSUMED))


@register_jitable
def _look(row: Any, found: int) -> int:
    """Look at one ring; if it has a message, write its description to `found`."""
    word = load_acquire(row.ring + ABORT)  # first: what was published before it is still delivered
    if word & 0xFF != 0 and word & 0xFF != _LEFT:
        return STOPPED
    number = _next(row)
    entry = _entry_at(row.ledger, number % LEDGER)
    if load_acquire(address_of(entry, "number")) != number + 1:
        return PENDING if word == 0 else _GONE
    described, message = _description_at(found), entry.message
    described.dtype, described.nbytes, described.tag = message.dtype, message.nbytes, message.tag
    full_fence()
    # A receive of another thread may have taken it meanwhile, and a later one be written in its place.
    return READY if _next(row) == number else PENDING


def _await(rows: int, count: int, first: int, found: int, spins: int, budget: int) -> int:
    """Look at rings in turn, from row `first` on, until one has a message.

    Args:
        rows: address of `count` records of `_ROW`.
        found: address of a `MESSAGE` for the description.
        spins: rounds before yielding the core.
        budget: nanoseconds off the core in all before coming back; one round only if negative.

    Returns:
        READY or STOPPED, with the row's index from bit 8 on, or PENDING.
    """
    idle = slept = 0
    while True:
        gone = 0
        for i in range(count):
            at = (first + i) % count
            code = _look(_row_at(rows, at), found)
            if code == READY or code == STOPPED:
                return code | at << 8
            gone += code == _GONE
        if gone == count:
            return STOPPED | first << 8
        if slept > budget:
            return PENDING
        slept += relax(idle, spins)
        idle += 1


with compiling():
    _await_kernel = kernel("int64(int64, int64, int64, int64, int64, int64)")(_await)


class Sources:
    """Consumer ends of rings that are probed together, in turn, so that none starves the others. Thread-safe."""

    def __init__(self, ends: Sequence[RingEnd], spin_us: float) -> None:
        self.ends = tuple(ends)
        rows = [(end.address, end.address + end.layout.ledger, end.counter) for end in ends]
        self._rows = (_Row * len(rows))(*rows)
        self._address = ctypes.addressof(self._rows)
        self._spins = int(spin_us * _SPINS_PER_US) // len(ends)
        self._first = 0

    def look(self, budget: int) -> Probe | None:
        """The next message; None if there is none after `budget` nanoseconds off the core, or at once if it is negative.

        Raises:
            RingStopped: one ring was aborted, or the ranks of all of them have left.
        """
        found = _Description()
        code = _await_kernel(self._address, len(self.ends), self._first, ctypes.addressof(found), self._spins, budget)
        if code == PENDING:
            return None
        at = code >> 8
        end = self.ends[at]
        if code & 0xFF == STOPPED:
            raise RingStopped(end, end.abort_word(), end.sequence)
        self._first = (at + 1) % len(self.ends)
        return Probe(end.peer, found.tag, found.nbytes, BY_CODE[found.dtype])


class Probing:
    """Probes of one communicator. Thread-safe."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sources: dict[tuple[int, int], Sources] = {}

    def look(self, src: int, channel: int, deadline: Deadline) -> Probe | None:
        """The message that can be received now from `src`, or ANY_PEER, on a channel; None if there is none. Does not wait.

        Args:
            deadline: for rings that are opened.

        Raises:
            PeerLost, Aborted, DeadlineExceeded, MismatchError: nothing can come any more, and why.
            ClosedError: this rank has closed the communicator.
            ResourceError: no memory for a ring.
        """
        context = self._context
        operation = Operation(OpCode.PROBE, -1, _NOTHING, src, channel=channel)
        context.lifecycle.enter(operation, OpCode.PROBE)
        try:
            return self._find(src, channel, deadline).look(_ONCE)
        except RingStopped as stopped:
            if not Reason.bad(stopped.word):
                # To ask is not to wait: that a rank has left finishes the communicator only for who needs it.
                # Where it aborted the communicator before, that is the reason.
                raise context.diagnosis.error(context.lifecycle.word() or stopped.word, operation) from None
        finally:
            context.lifecycle.users.discard(operation)
        return self.wait(src, channel, deadline)

    def wait(self, src: int, channel: int, deadline: Deadline, call_site: int = 0) -> Probe:
        """As `look`, but blocks the host until there is a message.

        Args:
            call_site: where the user called, if that is not the thread's caller; see `trace.callsite`.

        Raises:
            DeadlineExceeded: names the ranks that sent nothing.
        """
        context, call_site = self._context, call_site or find_call_site(_INSIDE)
        operation = context.begin(OpCode.PROBE, _NOTHING, src, call_site)
        operation.channel = channel
        try:
            sources = self._find(src, channel, deadline)
            budget = BUDGET
            while (found := sources.look(budget)) is None:
                if deadline.expired():
                    raise RingStalled([end for end in sources.ends if not end.abort_word()])
                budget = budget_of_more(deadline)
        except (RingStalled, RingStopped) as error:
            context.fail(error, operation)
        except BaseException:
            context.end(operation, State.FAILED)
            raise
        context.end(operation)
        return found

    def _find(self, src: int, channel: int, deadline: Deadline) -> Sources:
        """The rings from a rank, or from all; opens them on first use."""
        sources = self._sources.get((src, channel))
        if sources is None:
            context = self._context
            peers = [r for r in range(len(context.ranks)) if r != context.rank] if src == ANY_PEER else [src]
            ends = [
                context.rings.end(peer, Use.POINT_TO_POINT, deadline, producer=False, channel=channel) for peer in peers
            ]
            sources = self._sources[src, channel] = Sources(ends, context.session.config.spin_us)
        return sources
