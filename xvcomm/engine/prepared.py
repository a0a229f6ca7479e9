"""Collectives on host memory that compiled code runs from beginning to end, without the interpreter and its lock.

They serve shapes of the native library, other shapes from the second call on, and callers in compiled code, such as JAX's
handlers. `run` numbers the collective, writes the flight recorder, posts and compares the contract check, and runs the native
library's kernel, or moves the messages between islands. What it cannot end, `PreparedCall.finish` ends in Python: it waits,
checks the deadline, and raises.

A gate, one word for each communicator, lets either compiled code or Python run a collective. Python opens it to compiled
code with the first prepared call; before that it costs nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time

import numpy as np
from numba import types

from xvcomm.abc.collective import CollectiveStopped, PreparedCollective
from xvcomm.abc.device import RingStopped
from xvcomm.engine.context import Context
from xvcomm.engine.gate import CLOSE_SECONDS, LaunchGate
from xvcomm.engine.request import CollectiveRequest
from xvcomm.jit.atomics import READY, STOPPED, as_pointer, compare_and_swap, load_acquire, store_release
from xvcomm.jit.ccall import call_5
from xvcomm.jit.compile import brief, compiling, kernel
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at, python_type
from xvcomm.memory.ring import MESSAGE
from xvcomm.trace.contract import end, post
from xvcomm.trace.operation import Operation
from xvcomm.trace.recorder import hooks
from xvcomm.types.deadline import NEVER, Deadline

BUSY = 3
"""What `run` gives beside READY, PENDING and STOPPED: it has begun nothing, and Python must run the collective."""

_PAUSE_SECONDS = 0.00002
_FREE, _TAKEN = 0, 1
_NONE = -1
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
    ("begun", "i8"),  # number of the collective that `run` could not end and `finish` is to end, or _NONE
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
    if not _take(prepared.gate):
        return BUSY
    sequence = gate.sequence
    gate.sequence = sequence + 1
    number = post(
        gate.place, sequence, message.op, message.dtype, message.nbytes, message.tag, message.detail,
        call_site if call_site != 0 else prepared.call_site,
    )  # fmt: skip
    code = STOPPED if number < 0 else call_5(prepared.function, prepared.argument, src, dst, sequence, 0)
    if code != READY:
        prepared.begun, prepared.record = sequence, number
        return code
    end(gate.place, number)
    store_release(address_of(gate, "state"), _FREE)
    return READY


@register_jitable
def _take(gate):  # type: ignore[no-untyped-def]
    return compare_and_swap(address_of(_gate_at(gate), "state"), _FREE, _TAKEN) == _FREE


with compiling():
    _take_gate = brief("boolean(int64)")(_take)
    _run_kernel = kernel("int64(int64, int64, int64, int64)")(run)


class HostGate(LaunchGate):
    """A lock that lets one collective of a communicator run at a time. Compiled code takes it too, once it is open to it."""

    def __init__(self, context: Context) -> None:
        super().__init__(context, threading.Lock())
        self._counting = threading.Lock()
        self._record = _Gate()
        self.stream = context.device.streams(1)[0]
        self.address = ctypes.addressof(self._record)

    def __enter__(self) -> None:
        self.lock.acquire()
        if self.open:
            try:
                self._take(NEVER)
            except BaseException:
                self.lock.release()
                raise
            self._context.sequence = self._record.sequence

    def __exit__(self, *error: object) -> None:
        if self.open:
            self.free(self._context.sequence)
        self.lock.release()

    def queue(self, change: int) -> None:
        """Count an asynchronous collective that was queued (1) or has ended (-1), so that compiled code overtakes none."""
        with self._counting:
            self._record.queued += change

    def free(self, sequence: int) -> None:
        """Release the gate."""
        self._record.sequence = sequence
        self._record.state = _FREE

    def _opened(self) -> None:
        self._record.sequence, self._record.place = self._context.sequence, self._context.place
        self._record.hooks = id(hooks)

    def _take(self, deadline: Deadline) -> bool:
        """Wait until compiled code holds the gate no more; False if it still does, or if the gate was closed."""
        while self.open and not _take_gate(self.address):
            if deadline.expired():
                return False
            time.sleep(_PAUSE_SECONDS)
        return self.open

    def _close(self) -> None:
        if self._take(Deadline.after(CLOSE_SECONDS)):
            self._context.lifecycle.users.discard(self._standing)
        self.open = False


class PreparedCall:
    """A collective that compiled code runs; kept alive as long as compiled code may use it.

    Attributes:
        address: what `run` takes.
    """

    def __init__(self, context: Context, gate: HostGate, call: CollectiveRequest, prepared: PreparedCollective) -> None:
        self._context, self._gate, self._op, self._prepared = context, gate, call.op, prepared
        self._message = call.message()
        self._record = _Call(
            gate.address, tuple(self._message), call.call_site, prepared.function, prepared.argument, _NONE
        )
        self.address = ctypes.addressof(self._record)
        self._stream = gate.stream

    def run(self, src: int, dst: int, call_site: int, until: float) -> bool:
        """Run it on these addresses until `until`, see `Deadline.at`; False if nothing has begun, and Python must run it.

        Raises as `finish` does.
        """
        try:
            code = _run_kernel(self.address, src, dst, call_site)
            if code == READY:
                return True
            if code == BUSY:
                return False
            self.finish(src, dst, Deadline(until))
        except BaseException as error:
            if self._record.begun != _NONE:  # a signal handler has raised it, before `finish` could
                self._give_up(src, dst, error)
            raise
        return True

    def finish(self, src: int, dst: int, deadline: Deadline) -> None:
        """End the collective that `run` has begun on these addresses and could not end. Blocks.

        Raises:
            MismatchError, PeerLost, DeadlineExceeded, Aborted, ClosedError: as operations of the communicator do.
        """
        operation, number = self._operation(), self._record.record
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
            self._free()

    def _give_up(self, src: int, dst: int, error: BaseException) -> None:
        """End the collective that `run` has begun, because of an error."""
        try:
            self._context.fail(error, self._operation())
        finally:
            with contextlib.suppress(CollectiveStopped, RingStopped):
                self._prepared.resume(src, dst, self._stream)  # which is stopped by now, and lets go of the arrays
            self._free()

    def _operation(self) -> Operation:
        number = self._record.record
        return Operation(self._op, self._record.begun, self._message, record=max(number, ~number))

    def _free(self) -> None:
        sequence, self._record.begun = self._record.begun, _NONE
        self._gate.free(sequence + 1)
