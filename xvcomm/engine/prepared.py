"""Collectives on host memory that compiled code runs from begin to end, without the interpreter and its lock.

They serve shapes that were called before, and callers in compiled code, such as JAX's handlers. `run` numbers the
collective, writes the flight recorder, posts and compares the contract check, runs the native library's kernel, and watches
abort words. What it cannot end, `PreparedCall.finish` ends in Python: it waits, checks the deadline, and raises.

A gate, one word for each communicator, lets either compiled code or Python run a collective. Python opens it to compiled
code with the first prepared call; before that it costs nothing.
"""

from __future__ import annotations

import ctypes
import threading
import time

import numpy as np
from numba import types
from numba.extending import register_jitable

from xvcomm.abc.collective import CollectiveStopped, PreparedCollective
from xvcomm.engine.context import Context
from xvcomm.jit.atomics import READY, STOPPED, as_pointer, compare_and_swap, load_acquire, store_release
from xvcomm.jit.ccall import call_3
from xvcomm.jit.compile import brief, compiling, kernel
from xvcomm.jit.record import address_of, compiled_at, python_type
from xvcomm.memory.ring import MESSAGE, Message
from xvcomm.trace.contract import end, post
from xvcomm.trace.operation import Operation
from xvcomm.trace.recorder import hooks
from xvcomm.types.deadline import NEVER, Deadline
from xvcomm.types.opcode import OpCode

BUSY = 3
"""What `run` gives beside READY, PENDING and STOPPED: it has begun nothing, and Python must run the collective."""

_PAUSE_SECONDS = 0.00002
_CLOSE_SECONDS = 1.0
_FREE, _TAKEN = 0, 1
_python_list_size = types.ExternalFunction("PyList_Size", types.intp(types.voidptr))


_GATE = np.dtype([
    ("state", "i8"),  # free or taken
    ("sequence", "i8"),  # of the next collective, while no Python code runs one
    ("queued", "i8"),  # asynchronous collectives that have not ended
    ("place", "i8"),  # `ContractCheck.place`
    ("hooks", "i8"),  # the list of hooks: while there are any, Python runs everything
])  # fmt: skip
_CALL = np.dtype([
    ("gate", "i8"),
    ("message", MESSAGE),
    ("call_site", "i8"),
    ("function", "i8"),
    ("argument", "i8"),
    ("begun", "i8"),  # number of the collective that `run` could not end
    ("record", "i8"),  # what `post` gave for it
])  # fmt: skip
_Gate, _gate_at = python_type(_GATE), compiled_at(_GATE)
_Call, _call_at = python_type(_CALL), compiled_at(_CALL)


@register_jitable
def run(call: int, src: int, dst: int, call_site: int) -> int:
    """Run a prepared collective on these addresses; `call_site` as in `ContractCheck.post`, 0 for the one it was prepared at.

    Returns:
        READY; BUSY if Python must run it from the beginning, PENDING or STOPPED if Python must `finish` it.
    """
    prepared = _call_at(call)
    gate, message = _gate_at(prepared.gate), prepared.message
    if load_acquire(address_of(gate, "queued")) != 0 or _python_list_size(as_pointer(gate.hooks)) != 0:
        return BUSY
    if not _take(gate):
        return BUSY
    sequence = gate.sequence
    gate.sequence = sequence + 1
    number = post(
        gate.place, sequence, message.op, message.dtype, message.nbytes, message.tag, message.detail,
        call_site if call_site != 0 else prepared.call_site,
    )  # fmt: skip
    code = STOPPED if number < 0 else call_3(prepared.function, prepared.argument, src, dst)
    if code != READY:
        prepared.begun, prepared.record = sequence, number
        return code
    end(gate.place, number)
    store_release(address_of(gate, "state"), _FREE)
    return READY


@register_jitable
def _take(gate):  # type: ignore[no-untyped-def]
    return compare_and_swap(address_of(gate, "state"), _FREE, _TAKEN) == _FREE


def _take_at(gate: int) -> bool:
    return _take(_gate_at(gate))


with compiling():
    _take_gate = brief("boolean(int64)")(_take_at)
    _run_kernel = kernel("int64(int64, int64, int64, int64)")(run)


class Gate:
    """A lock that lets one collective of a communicator run at a time. Compiled code takes it too, once it is open to it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock, self._counting = threading.Lock(), threading.Lock()
        self._record = _Gate()
        self.address = ctypes.addressof(self._record)
        self._open = False
        # While the gate is open, compiled code may be inside at any time: an operation that keeps memory mapped.
        self._standing = Operation(OpCode.INIT, -1, Message(0, 0, 0, 0))

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._open:
            try:
                self._take(NEVER)
            except BaseException:
                self._lock.release()
                raise
            self._context.sequence = self._record.sequence

    def __exit__(self, *error: object) -> None:
        if self._open:
            self.free(self._context.sequence)
        self._lock.release()

    def queue(self, change: int) -> None:
        """Count an asynchronous collective that was queued (1) or has ended (-1), so that compiled code overtakes none."""
        with self._counting:
            self._record.queued += change

    def admit(self, op: OpCode, message: Message, call_site: int, prepared: PreparedCollective) -> PreparedCall:
        """Make a collective for compiled code, and open the gate to it.

        Raises:
            ClosedError: this rank has closed the communicator.
        """
        with self._lock:
            if not self._open:
                self._context.lifecycle.enter(self._standing, op)
                self._record.sequence = self._context.sequence
                self._record.place, self._record.hooks = self._context.place, id(hooks)
                self._context.lifecycle.on_close(self._close)
                self._open = True
        return PreparedCall(self._context, self, op, message, call_site, prepared)

    def free(self, sequence: int) -> None:
        """Release the gate."""
        self._record.sequence = sequence
        self._record.state = _FREE

    def _take(self, deadline: Deadline) -> bool:
        """Wait until compiled code holds the gate no more; False if it still does, or if the gate was closed."""
        while self._open and not _take_gate(self.address):
            if deadline.expired():
                return False
            time.sleep(_PAUSE_SECONDS)
        return self._open

    def _close(self) -> None:
        """Close the gate to compiled code. Memory stays mapped if a compiled call does not return."""
        if self._take(Deadline.after(_CLOSE_SECONDS)):
            self._context.lifecycle.users.discard(self._standing)
        self._open = False


class PreparedCall:
    """A collective that compiled code runs; kept alive as long as compiled code may use it.

    Attributes:
        address: what `run` takes.
    """

    def __init__(
        self, context: Context, gate: Gate, op: OpCode, message: Message, call_site: int, prepared: PreparedCollective
    ) -> None:
        self._context, self._gate, self._op, self._message, self._prepared = context, gate, op, message, prepared
        self._record = _Call(gate.address, tuple(message), call_site, prepared.function, prepared.argument)
        self.address = ctypes.addressof(self._record)
        self._stream = context.device.streams(1)[0]

    def run(self, src: int, dst: int, call_site: int) -> int:
        """`run` for Python."""
        code: int = _run_kernel(self.address, src, dst, call_site)
        return code

    def finish(self, src: int, dst: int, deadline: Deadline) -> None:
        """End the collective that `run` has begun on these addresses and could not end. Blocks.

        Raises:
            MismatchError, PeerLost, DeadlineExceeded, Aborted, ClosedError: as operations of the communicator do.
        """
        sequence, number = self._record.begun, self._record.record
        operation = Operation(self._op, sequence, self._message, record=max(number, ~number))
        self._stream.deadline = deadline
        try:
            if number < 0:
                raise CollectiveStopped(self._context.lifecycle.word())
            self._prepared.resume(src, dst, self._stream)
        except BaseException as error:
            self._context.fail(error, operation)
        else:
            self._context.end(operation)
        finally:
            self._gate.free(sequence + 1)
