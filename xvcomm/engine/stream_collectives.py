"""Collectives on a device whose streams run asynchronously to the host: enqueued by the caller, ended by the tracker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, cast

import numpy as np

from xvcomm.abc.collective import Collective
from xvcomm.abc.device import Event, Stream
from xvcomm.abc.launch import SupportsEnqueuedEvents
from xvcomm.engine.collectives import Caller
from xvcomm.engine.context import Context
from xvcomm.engine.executor import Buffers, Executor
from xvcomm.engine.gate import LaunchGate
from xvcomm.engine.inflight.batch import Batch
from xvcomm.engine.inflight.log import Ends
from xvcomm.engine.inflight.stream_work import StreamWork
from xvcomm.engine.inflight.work import Work
from xvcomm.engine.launch import EnqueuedOperation, EnqueuedStep, Launch, Place
from xvcomm.engine.request import CollectiveRequest, Key
from xvcomm.engine.staging import Staging
from xvcomm.engine.started import Beside
from xvcomm.memory import array
from xvcomm.memory.array_view import ArrayView
from xvcomm.schedule.steps import Buf
from xvcomm.trace.callsite import find_call_site
from xvcomm.trace.operation import Operation
from xvcomm.types.deadline import NEVER, Deadline
from xvcomm.types.opcode import OpCode

_INSIDE, _INSIDE_AGAIN = 3, 2
"""Functions of xvcomm that are under way at the least when a collective asks for the call site."""
_BARRIER = OpCode.BARRIER


class StreamCaller(Caller):
    """Runs a communicator's collectives: blocking ones on the arrays' stream, asynchronous ones on a stream of xvcomm's."""

    def __init__(self, context: Context) -> None:
        self._context, self._kind, self._index = context, context.kind, context.index
        self._order = threading.Lock()
        self._launch_gate = LaunchGate(context, self._order)
        self._places = self._launch_gate.places
        self._native_only = context.topology.homogeneous and context.topology.size > 1
        self._executor = Executor(context)
        device = context.device
        self._own, self._starting = device.streams(1)[0], threading.Lock()
        self._beside = (
            Beside(context, device, self._launch_gate, self._own)
            if isinstance(device, SupportsEnqueuedEvents)
            else None  # then compiled code launches nothing
        )
        self._token = array.view(Staging(device).up(np.zeros(1, np.uint8)))
        context.lifecycle.on_close(self._close)  # keeps its memory alive as long as operations are on the streams

    def again(self, key: Key, src: ArrayView, dst: ArrayView, timeout: float, stream: Any) -> bool:
        """See `Caller.again`: what compiled code starts, before a request is made, which takes as long."""
        ready: Launch | None = self._context.launches.find(key)
        if ready is None:
            return False
        handle = dst.stream if stream is None else array.stream_handle(stream)
        if handle is None:
            return False
        if not (dst.trusted and src.trusted):
            self._context.device.adopt(handle, *_untrusted(src, dst))
        place, call_site = self._places.get(handle) or self._launch_gate.place(handle), find_call_site(_INSIDE_AGAIN)
        return place != 0 and ready.run(place, handle, monotonic() + timeout, call_site, src.address, dst.address)

    def run(self, call: CollectiveRequest, deadline: Deadline, stream: int | None = None) -> Any:
        """Enqueue a collective on the arrays' stream, and give the result array.

        The host waits only for a barrier, for arrays whose stream is unknown, and for a result in memory of xvcomm's.
        """
        handle, trusted = self._look_at(call, stream)
        waits = handle is None or call.op is _BARRIER or (call.dst is not None and call.dst.staged)
        if handle is not None and not waits:
            ready = self._ready(call)
            if ready is not None:
                if not trusted:
                    self._user(call, handle, trusted)
                place, call_site = (
                    self._places.get(handle) or self._launch_gate.place(handle),
                    call.call_site or find_call_site(_INSIDE),
                )
                addresses = array.address(call.src), array.address(call.dst)
                if place and ready.run(place, handle, deadline.at, call_site, *addresses):
                    if call.key is not None:
                        self._context.launches.alias(call.key, ready)
                    return call.result()
        user = self._user(call, handle, trusted)
        self._context.tracker.seal_if_deadline_differs(handle or 0, deadline)
        operation, event, ends = self._launch(call, deadline, user)
        tracker = self._context.tracker
        if handle is None or waits:
            event = event or cast(Event, user.record_event())
            batch = Batch([operation], deadline, ends, stream=user, event=event, native=self._joined())
            tracker.wait_for(tracker.add(batch))
        elif user.capturing():
            self._context.end(operation)
        else:
            tracker.add_blocking([operation], handle, deadline, ends)
        return call.result()

    def start(self, call: CollectiveRequest, deadline: Deadline, stream: int | None = None) -> Work:
        """Enqueue a collective after the present work of the arrays' stream and after earlier asynchronous collectives."""
        handle, trusted = self._look_at(call, stream)
        own, beside, ready = self._own, self._beside, self._ready(call)
        if beside is not None and ready is not None:
            if not trusted:
                self._user(call, handle, trusted)
            with self._starting:
                started = beside.start(ready, call, handle, stream, call.call_site or find_call_site(_INSIDE), deadline)
            if started is not None:
                return started
        with self._starting:
            self._context.tracker.seal_if_deadline_differs(own.queue[0], deadline)
            self._context.tracker.join(own, cast(Event, self._user(call, handle, trusted).record_event()))
            operation, event, ends = self._launch(call, deadline, own)
            event = event or cast(Event, own.record_event())
            native = self._joined()
            batch = Batch(
                [operation], deadline, ends, stream=own, event=event, native=native, blocking=False, keep=call
            )
        tracker = self._context.tracker
        tracker.add(batch)

        view = call.src if call.dst is None else call.dst
        now = None if view is not None and view.staged else partial(array.stream_now, view, stream)
        return StreamWork(tracker, now, call.result, str(call.op), batch)

    def _look_at(self, call: CollectiveRequest, given: int | None) -> tuple[int | None, bool]:
        """The stream that a collective is ordered on, and whether the frameworks guarantee their arrays' memory.

        The stream is None if neither the user nor the framework tells it. Raises if the memory is not this rank's.
        """
        src, dst = call.src, call.dst
        main = src if dst is None else dst
        if main is None:
            return given, True
        handle, trusted = main.stream if given is None else given, main.trusted
        if main.device != self._kind or main.index != self._index:
            self._context.admit(main)
        if src is not main and src is not None:
            trusted = trusted and src.trusted
            if src.device != self._kind or src.index != self._index:
                self._context.admit(src)
        return handle, trusted

    def _user(self, call: CollectiveRequest, handle: int | None, trusted: bool) -> Stream:
        """The stream of a call; checks the arrays' memory where the framework does not guarantee it."""
        adopt = self._context.device.adopt
        if trusted:
            return adopt(handle)
        return adopt(handle, *_untrusted(call.src, call.dst))

    def _launch(
        self, call: CollectiveRequest, deadline: Deadline, carrier: Stream
    ) -> tuple[Operation, Event | None, Ends]:
        """Enqueue on a stream, or on streams that it waits for; gives the event after it, if one was recorded."""
        context = self._context
        with self._order:
            operation = context.begin(call.op, call.message(), call_site=call.call_site)
            try:
                if self._native_only:
                    self._native(call, deadline, carrier)
                    return operation, None, []
                plan = context.planner.plan(call.request())
                buffers = Buffers(array.address(call.src), array.address(call.dst))
                event, ends = self._executor.launch(plan, buffers, call.dtype, call.how(), operation, deadline, carrier)
            except BaseException as error:
                context.fail(error, operation)
        return operation, event, ends

    def _ready(self, call: CollectiveRequest) -> Launch | None:
        """The compiled launch of this shape; None before the shape has run once, or if compiled code cannot run it."""
        launches, shape = self._context.launches, call.shape()
        found: Launch | None = launches.find(shape) or launches.prepare(shape, partial(self._compile, call))
        return found

    def _compile(self, call: CollectiveRequest) -> Launch | None:
        if self._beside is None:
            return None
        return self._compiled_native(call) if self._native_only else self._compiled_plan(call)

    def _compiled_plan(self, call: CollectiveRequest) -> Launch | None:
        """The compiled call of a collective across a border, if compiled code can run all its steps."""
        plan, executor = self._context.planner.plan(call.request()), self._executor
        steps = executor.enqueued(plan, call.dtype, call.how(), call.message(), call.src is call.dst, NEVER)
        nbytes = plan.schedule.scratch * call.dtype.itemsize

        def scratch(handle: int) -> int:
            return executor.serial_scratch(
                nbytes, (handle, 0)
            )  # compiled code launches nothing on a thread's own stream

        return self._compiled(call, steps, scratch if nbytes else None)

    def _compiled_native(self, call: CollectiveRequest) -> Launch | None:
        """The compiled call of a collective inside an island, if the native library does all of it."""
        native = self._joined()
        found = native.enqueued(call.form()) if native is not None else None
        places = Place(Buf.IN, 0), Place(Buf.OUT, 0)
        return self._compiled(call, [EnqueuedStep(found, places)] if found is not None else None)

    def _compiled(
        self, call: CollectiveRequest, steps: list[EnqueuedStep] | None, scratch: Callable[[int], int] | None = None
    ) -> Launch | None:
        if steps is None:
            return None
        with self._order:
            self._launch_gate.admit(call.op)
        return Launch(self._context, self._launch_gate, [EnqueuedOperation(call.op, call.message())], steps, scratch)

    def _joined(self) -> Collective | None:
        return self._context.joined_native()

    def _close(self) -> None:
        """Does nothing: streams end by themselves."""


def _untrusted(*views: ArrayView | None) -> list[int]:
    """Addresses of arrays whose memory the device must check."""
    return [v.address for v in views if v is not None and v.count and not v.trusted]
