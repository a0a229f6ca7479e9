"""How a collective runs on a device whose streams go on behind the host: enqueued by the caller, looked after later."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, cast

import numpy as np

from xvcomm import array
from xvcomm.abc.device import Mark, Stream
from xvcomm.array import ArrayView
from xvcomm.calls import Call, Caller
from xvcomm.context import Context
from xvcomm.deadline import Deadline
from xvcomm.executor import Buffers, Executor
from xvcomm.opcode import OpCode
from xvcomm.operation import Operation
from xvcomm.pending import Flight, StreamWork
from xvcomm.staging import Staging
from xvcomm.work import Work


class StreamCaller(Caller):
    """Runs a communicator's collectives: blocking ones on the arrays' stream, asynchronous ones on one of their own."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._order = threading.Lock()
        self._native_only = context.topology.homogeneous and context.topology.size > 1
        self._executor = Executor(context)
        self._own = context.device.streams(1)[0]
        self._token = array.view(Staging(context.device).up(np.zeros(1, np.uint8)))

    def run(self, call: Call, deadline: Deadline, stream: int | None = None) -> Any:
        """Enqueue a collective on the arrays' stream, and give the result array.

        The host waits only for a barrier, and where nobody knows the arrays' stream.
        """
        self._admit(call)
        handle = _stream_of(call, stream)
        user = self._user(call, handle)
        if handle is None or call.op is OpCode.BARRIER or not self._native_only:
            flight = self._launch(call, deadline, user, user)
            if handle is None or call.op is OpCode.BARRIER:
                self._context.pending.wait_for(flight)
        else:
            self._launch_native(call, deadline, user, handle)
        return self._result(call)

    def _launch_native(self, call: Call, deadline: Deadline, user: Stream, handle: int) -> None:
        """`_launch` for the usual case, in which little but the library's own call may take time."""
        context = self._context
        with self._order:
            operation = context.begin(call.op, call.message())
            try:
                self._native(call, deadline, user)
            except BaseException as error:
                raised = context.fail(error, operation)
                if raised is error:
                    raise
                raise raised from None
        if user.capturing():
            context.end(operation)
        else:
            context.pending.board(operation, handle, deadline, context.joined_native(), None)

    def start(self, call: Call, deadline: Deadline, stream: int | None = None) -> Work:
        """Enqueue a collective behind what the arrays' stream holds now, and behind those that were started before."""
        self._admit(call)
        flight = self._launch(call, deadline, self._user(call, _stream_of(call, stream)), self._own)
        context = self._context

        def follow(mark: object) -> None:
            self._user(call, _stream_of(call, stream)).wait(mark)

        return StreamWork(context.pending, follow, partial(self._result, call), str(call.op), flight)

    def _user(self, call: Call, handle: int | None) -> Stream:
        """The stream of a call; what holds its arrays is looked at where the framework does not vouch for it."""
        src, dst, adopt = call.src, call.dst, self._context.device.adopt
        if (src is None or src.trusted) and (dst is None or dst.trusted):
            return adopt(handle)
        return adopt(handle, *(v.address for v in (src, dst) if v is not None and v.count and not v.trusted))

    def _launch(self, call: Call, deadline: Deadline, user: Stream, carrier: Stream) -> Flight:
        """Enqueue behind what `user` holds: on `carrier`, or on the schedule's lanes with `carrier` behind them."""
        context = self._context
        with self._order:
            operation = context.begin(call.op, call.message())
            try:
                if carrier is not user:
                    carrier.wait(user.mark())
                flight = self._enqueue(call, operation, deadline, carrier)
            except BaseException as error:
                raised = context.fail(error, operation)
                if raised is error:
                    raise
                raise raised from None
            if carrier is not user:
                flight.blocking, flight.keep = False, call
            return context.pending.add(flight)

    def _enqueue(self, call: Call, operation: Operation, deadline: Deadline, carrier: Stream) -> Flight:
        context = self._context
        if self._native_only:
            native = context.native(deadline)
            self._native(call, deadline, carrier)
            return Flight([operation], carrier, cast(Mark, carrier.mark()), deadline, native=native)
        plan = context.planner.plan(call.request())
        buffers = Buffers(_address(call.src), _address(call.dst))
        launched = self._executor.launch(
            plan.schedule, buffers, call.dtype, call.how(), operation, deadline, carrier
        )
        carrier.wait(launched.mark)
        joined = context.joined_native()
        return Flight([operation], launched.stream, launched.mark, deadline, launched.ends, joined)

    def _close(self) -> None:
        """Nothing: streams end by themselves."""


def _address(view: ArrayView | None) -> int:
    return view.address if view is not None else 0


def _stream_of(call: Call, given: int | None) -> int | None:
    """The stream that a collective is ordered on; None where neither the user nor the arrays' framework tells."""
    view = call.dst if call.dst is not None else call.src
    return given if given is not None or view is None else view.stream
