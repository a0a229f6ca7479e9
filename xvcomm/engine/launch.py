"""Launches operations of a known shape on a device's stream by one compiled call.

The call does all that Python does for the first operation of a shape: it writes the flight recorder, posts and compares the
contract check, enqueues the steps, and appends to the launch log, from which `Tracker` takes the operation. Where compiled
code cannot launch an operation, it returns before it has begun anything.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from xvcomm.abc.collective import CollectiveStopped
from xvcomm.abc.launch import CAPTURED, ITEM, EnqueuedCall, EnqueuedEvents, EnqueuedMessages
from xvcomm.engine.branch import BRANCH, Branch
from xvcomm.engine.context import Context
from xvcomm.engine.gate import LaunchGate
from xvcomm.engine.inflight.log import ENTRY, ROOM, fits, log_operations, record_event
from xvcomm.jit.atomics import load, store
from xvcomm.jit.ccall import bits_of, call_3, call_5
from xvcomm.jit.compile import brief, compiling
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import compiled_at, python_type
from xvcomm.memory.ring import Message, RingEnd
from xvcomm.schedule.steps import Buf
from xvcomm.trace.contract import aborted, note_message, post
from xvcomm.trace.format import State
from xvcomm.trace.operation import NO_PEER, Operation
from xvcomm.types.opcode import OpCode

_FAILED, _FULL, _UNREADY = -1, -3, -4


class Place(NamedTuple):
    """A place in the input, the output or the scratch memory of a collective.

    Attributes:
        buf: which of the three.
        offset: in bytes.
    """

    buf: Buf
    offset: int


class EnqueuedStep(NamedTuple):
    """One step for compiled code: a native call, a copy, a scaling, a reduction, or messages that start together.

    Attributes:
        places: what a collective's step reads and what it writes last; for each of its messages the array, and the elements
            that are reduced with it or again the array. Empty for a user's messages, whose arrays differ from call to call.
        rings: for messages their ring ends.
    """

    call: EnqueuedCall | EnqueuedMessages
    places: Sequence[Place] = ()
    rings: Sequence[RingEnd] = ()


class EnqueuedOperation(NamedTuple):
    """An operation of fixed shape: its name, its description without the tag, and for a message its ring end."""

    name: OpCode
    message: Message
    end: RingEnd | None = None


_LAUNCH = np.dtype([
    ("place", "i8"),  # `Context.place`
    ("collective", "i8"),  # whether it is a collective, which the contract check compares; else messages
    ("operations", "i8"),  # address of `ENTRY` records: what is logged
    ("operation_count", "i8"),
    ("steps", "i8"),  # address of `_STEP` records
    ("step_count", "i8"),
    ("input", "i8"),  # addresses of the memory of `Place`
    ("output", "i8"),
    ("scratch", "i8"),
    ("result", "i8"),  # return code of the function that failed
    ("failed_step", "i8"),  # index of its step; after the last step, the recording of the event
])  # fmt: skip
_STEP = np.dtype([
    ("ready", "i8"),  # for messages see `EnqueuedMessages`; else 0
    ("function", "i8"),
    ("argument", "i8"),
    ("places", "i8"),  # address of `_PLACE` records
    ("place_count", "i8"),
    ("items", "i8"),  # for messages the address of `ITEM` records
    ("operands", "i8"),  # for a reduction the address of words that get the operands' addresses
])  # fmt: skip
_PLACE = np.dtype([
    ("base", "i8"),  # address of the word that holds the address of its memory
    ("offset", "i8"),
])  # fmt: skip

_Launch, _launch_at = python_type(_LAUNCH), compiled_at(_LAUNCH)
_Entry, _operation_at = python_type(ENTRY), compiled_at(ENTRY)
_Step, _step_at = python_type(_STEP), compiled_at(_STEP)
_Place, _place_at = python_type(_PLACE), compiled_at(_PLACE)
_branch_at = compiled_at(BRANCH)
_Item, _item_at = python_type(ITEM), compiled_at(ITEM)
_BASES = {Buf.IN: _Launch.input.offset, Buf.OUT: _Launch.output.offset, Buf.TMP: _Launch.scratch.offset}


@register_jitable
def _address(step, number):  # type: ignore[no-untyped-def]
    """Address of a step's place."""
    place = _place_at(step.places, number)
    return load(place.base) + place.offset


@register_jitable
def _do(step, sequence, stream, bits):  # type: ignore[no-untyped-def]
    """Enqueue a step; 0, or the return code of its function."""
    if step.operands != 0:
        last = step.place_count - 1
        for number in range(last):
            store(step.operands + 8 * number, _address(step, number))
        return call_5(step.function, step.argument, step.operands, _address(step, last), stream, 0)
    if step.items == 0:
        return call_5(step.function, step.argument, _address(step, 0), _address(step, 1), stream, bits)
    for number in range(step.place_count // 2):
        item, address = _item_at(step.items, number), _address(step, 2 * number)
        item.address, item.apart, item.tag = address, _address(step, 2 * number + 1) - address, sequence
    return call_5(step.function, step.argument, step.items, 0, stream, 0)


@register_jitable
def _begin(launch, sequence, call_site):  # type: ignore[no-untyped-def]
    """Record the operations, and post a collective; False if the communicator is aborted."""
    first = _operation_at(launch.operations)
    if launch.collective:
        told = first.message
        number = post(launch.place, sequence, told.op, told.dtype, told.nbytes, told.tag, told.detail, call_site)
        for i in range(launch.operation_count):
            _operation_at(launch.operations, i).record = number
        return number >= 0
    items = _step_at(launch.steps).items
    for i in range(launch.operation_count):
        one, item = _operation_at(launch.operations, i), _item_at(items, i)
        told = one.message
        told.tag = item.tag
        where = item.call_site if item.call_site else call_site
        one.record = note_message(launch.place, sequence, one.name, told.dtype, told.nbytes, one.peer, item.tag, where)
    return True


def _launch(call, log, sequence, call_site, src, dst, stream, deadline, branch, user, event):  # type: ignore[no-untyped-def]
    launch = _launch_at(call)
    if not fits(log, launch.operation_count, deadline):
        return _FULL
    if not launch.collective and aborted(launch.place):
        return _UNREADY
    for i in range(launch.step_count):
        step = _step_at(launch.steps, i)
        if step.ready != 0 and call_3(step.ready, step.argument, stream, 0) == 0:
            return _UNREADY
    beside = _branch_at(branch)
    if branch != 0 and call_3(beside.branch, beside.argument, user, stream) != 0:
        return _UNREADY
    if not _begin(launch, sequence, call_site):
        return _FAILED
    launch.input, launch.output = src, dst
    code, bits, at = 0, bits_of(deadline), 0
    while at < launch.step_count and code == 0:
        code = _do(_step_at(launch.steps, at), sequence, stream, bits)
        at += code == 0
    if code == 0:
        code = record_event(log, stream) if branch == 0 else call_3(beside.record, beside.argument, event, stream)
    if code != 0:
        launch.result, launch.failed_step = code, at
        return CAPTURED if code == CAPTURED else _FAILED
    return log_operations(log, launch.operations, launch.operation_count, sequence, deadline)


with compiling():
    _kernel = brief("int64(int64, int64, int64, int64, int64, int64, int64, float64, int64, int64, int64)")(_launch)


class Launch:
    """A collective of fixed shape, or a user's messages of fixed shapes that start together, on one stream.

    Args (of the constructor):
        steps: they follow one another on the stream; for messages a single one.
        scratch: gives the address of scratch memory, by the stream's handle and the output's address; None for none.

    Attributes:
        rings: the ring ends that it uses.
    """

    def __init__(
        self, context: Context, gate: LaunchGate, operations: Sequence[EnqueuedOperation],
        steps: Sequence[EnqueuedStep], scratch: Callable[[int, int], int] | None = None,
    ) -> None:  # fmt: skip
        self._context, self._launch_gate, self._scratch = context, gate, scratch
        self._calls = [step.call for step in steps]  # compiled code knows them by address
        self._rings = rings = [ring for step in steps for ring in step.rings]
        self.rings = frozenset(rings)
        context.tracker.rings.update((ring.counter, ring) for ring in rings)
        self._collective = operations[0].end is None
        logged = [(name, *_end_of(end), 0, 0, 0, message) for name, message, end in operations]
        if self._collective:  # its messages through ring ends are logged with it
            name, message, _ = operations[0]
            logged += [(name, NO_PEER, 0, ring.counter, 0, 0, 0, message) for ring in rings]
        self._operations = (_Entry * len(logged))(*logged)
        self._most = ROOM - len(logged)
        self._launch = _Launch(context.place, self._collective)
        self._address = ctypes.addressof(self._launch)
        self._steps, self._places, self._items, self._operands = self._pack(steps)
        self._given = (ctypes.c_int64 * (ITEM.itemsize // 8 * len(self._items))).from_buffer(self._items)
        self._launch.operations, self._launch.operation_count = ctypes.addressof(self._operations), len(logged)
        self._launch.steps, self._launch.step_count = ctypes.addressof(self._steps), len(steps)

    def _pack(self, steps: Sequence[EnqueuedStep]) -> tuple[ctypes.Array[Any], ...]:
        """The steps for compiled code, their places, the items of their messages, and the operands of their reductions."""
        packed = (_Step * len(steps))()
        places = [(self._address + _BASES[buf], offset) for step in steps for buf, offset in step.places]
        where, items = (_Place * len(places))(*places), (_Item * len(self._rings))()
        operands = (ctypes.c_int64 * len(places))()
        place, item, operand = map(ctypes.addressof, (where, items, operands))
        for record, (call, among, rings) in zip(packed, steps, strict=True):
            if isinstance(call, EnqueuedMessages):
                record.ready = call.ready
            elif call.reduces:
                record.operands = operand
            record.function, record.argument, record.items = call.function, call.argument, item if rings else 0
            record.places, record.place_count = place, len(among)
            place, item = place + len(among) * _PLACE.itemsize, item + len(rings) * ITEM.itemsize
            operand += 8 * len(among)
        return packed, where, items, operands

    def run(
        self, handle: int, until: float, call_site: int, src: int = 0, dst: int = 0, items: list[int] | None = None,
        branch: Branch | None = None,
    ) -> bool:  # fmt: skip
        """Enqueue it on a user's stream, or on a branch after what the user's stream holds now.

        Args:
            handle: of the user's stream.
            until: `Deadline.at`.
            call_site: where the user called it; of messages, those that do not say so themselves.
            items: of each message an `ITEM`, in which the call site may be 0.

        Returns:
            False if nothing has begun, and Python must run it.

        Raises:
            MismatchError, PeerLost, DeadlineExceeded, Aborted: as operations of the communicator do.
        """
        context, gate = self._context, self._launch_gate
        if branch is None:
            log, beside, user, event = gate.logs.get(handle) or gate.log(handle), 0, 0, 0
            if not log:
                return False
        else:
            log, beside, user, event = branch.log, branch.address, handle, branch.take_event()
            handle = branch.handle
        with gate.lock:
            if not gate.open or (self._collective and context.lifecycle.departed):
                return False  # Python compares the collective's number with those of ranks that have left
            if items is not None:
                self._given[:] = items  # type: ignore[assignment]
            if self._scratch is not None:
                self._launch.scratch = self._scratch(handle, dst)
            sequence = context.sequence
            call = self._address, log, sequence, call_site, src, dst, handle, until, beside, user, event
            code = _kernel(*call)
            if code == _FULL:
                context.tracker.seal(handle)
                code = _kernel(*call)
            if code in (_FULL, _UNREADY):
                return False
            if self._collective:
                context.sequence = sequence + 1
            if code < 0:
                self._end(sequence, code, branch or context.tracker.events(handle))
            if branch is not None:
                branch.sequence, branch.ends = sequence, [(ring, ring.sequence) for ring in self._rings]
        if code > self._most:
            context.tracker.seal(handle)
        return True

    def _end(self, sequence: int, code: int, events: Branch | EnqueuedEvents | None) -> None:
        """End operations that were captured or have failed; `events` records the event after the steps."""
        context, launch = self._context, self._launch
        begun = self._operations[:1] if self._collective else self._operations[:]
        first, *others = [
            Operation(OpCode(o.name), sequence, _message(o.message), o.peer, max(o.record, ~o.record), o.channel)
            for o in begun
        ]
        if code == CAPTURED:
            context.end_all([first, *others])
            return
        context.end_all(others, State.FAILED)
        try:
            if begun[0].record < 0:
                raise CollectiveStopped(context.lifecycle.word())
            [*self._calls, events or self._calls[-1]][launch.failed_step].failed(launch.result)
        except BaseException as error:
            context.fail(error, first)


def _end_of(end: RingEnd | None) -> tuple[int, int, int]:
    """Peer, channel and counter of an operation's ring end, as in `ENTRY`."""
    return (NO_PEER, 0, 0) if end is None else (end.peer, end.channel, end.counter)


def _message(record: Any) -> Message:
    return Message(*(getattr(record, field) for field in Message._fields))
