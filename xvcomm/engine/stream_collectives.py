"""Collectives on a device whose streams run asynchronously to the host: enqueued by the caller, ended by the tracker."""

from __future__ import annotations

import threading
from time import monotonic
from typing import Any, cast

from xvcomm.abc.device import Event, Stream
from xvcomm.abc.launch import SupportsEnqueuedEvents
from xvcomm.engine.branch import Branch, Launched
from xvcomm.engine.collectives import Collectives
from xvcomm.engine.context import Context
from xvcomm.engine.gate import LaunchGate
from xvcomm.engine.inflight.batch import Batch
from xvcomm.engine.inflight.log import Ends
from xvcomm.engine.inflight.tracker import Tracked
from xvcomm.engine.inflight.work import Work
from xvcomm.engine.launch import EnqueuedOperation, EnqueuedStep, Launch, Place
from xvcomm.engine.planner import Plan
from xvcomm.engine.request import CollectiveRequest, Key
from xvcomm.memory import array
from xvcomm.memory.array_view import ArrayView
from xvcomm.schedule.steps import Buf
from xvcomm.trace.callsite import find_call_site
from xvcomm.trace.operation import Operation
from xvcomm.types.opcode import OpCode

_INSIDE, _INSIDE_AGAIN = 3, 2
"""Functions of xvcomm that are under way at the least when a collective asks for the call site."""
_BARRIER = OpCode.BARRIER


class StreamCollectives(Collectives):
    """On a device's streams: blocking collectives on the arrays' stream, asynchronous ones on a stream of xvcomm's."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._kind, self._index, self._find = context.kind, context.index, context.launches.find
        self._order, self._starting = threading.Lock(), threading.Lock()
        self._launch_gate = LaunchGate(context, self._order)
        device = context.device
        self._own = device.streams(1)[0]
        # Without events of compiled code it launches nothing.
        self._branch = Branch(context, device, self._own) if isinstance(device, SupportsEnqueuedEvents) else None
        context.lifecycle.on_close(self._close)  # keeps its memory alive as long as operations are on the streams

    def again(self, key: Key, src: ArrayView, dst: ArrayView, timeout: float, stream: Any) -> bool:
        ready: Launch | None = self._find(key)
        if ready is None:
            return False
        handle = dst.stream if stream is None else array.stream_handle(stream)
        if handle is None:
            return False
        if not (dst.trusted and src.trusted):
            self._context.device.adopt(handle, *array.untrusted(src, dst))
        return ready.run(handle, monotonic() + timeout, find_call_site(_INSIDE_AGAIN), src.address, dst.address)

    def run(self, call: CollectiveRequest) -> Any:
        """Enqueue a collective on the arrays' stream, and give the result array.

        The host waits only for a barrier, for arrays whose stream is unknown, and for a result in memory of xvcomm's.
        """
        handle, user = self._look_at(call)
        context, tracker = self._context, self._context.tracker
        waits = handle is None or call.op is _BARRIER or (call.dst is not None and call.dst.staged)
        if handle is not None and not waits:
            ready: Launch | None = self._launch_of(call)
            if ready is not None and ready.run(
                handle, call.deadline.at, call.call_site or find_call_site(_INSIDE), *call.addresses
            ):
                if call.key is not None:
                    context.launches.alias(call.key, ready)
                return call.result()
        user = user or context.device.adopt(handle)
        tracker.seal_if_deadline_differs(handle or 0, call.deadline)
        operation, event, ends = self._enqueue(call, user)
        if handle is None or waits:
            tracker.wait_for(tracker.add(self._batch(call, [operation], event, ends, user)))
        elif user.capturing():
            context.end(operation)
        else:
            tracker.add_blocking([operation], handle, call.deadline, ends)
        return call.result()

    def start(self, call: CollectiveRequest) -> Work:
        """Enqueue a collective after the present work of the arrays' stream and after earlier asynchronous collectives."""
        handle, user = self._look_at(call)
        own, branch, tracker = self._own, self._branch, self._context.tracker
        ready: Launch | None = self._launch_of(call)
        with self._starting:
            if ready is not None and branch is not None:
                call_site = call.call_site or find_call_site(_INSIDE)
                if ready.run(handle or 0, call.deadline.at, call_site, *call.addresses, branch=branch):
                    return Work(call, Launched(branch, call, branch.ends))
            user = user or self._context.device.adopt(handle)
            tracker.seal_if_deadline_differs(own.queue[0], call.deadline)
            tracker.join(own, cast(Event, user.record_event()))
            operation, event, ends = self._enqueue(call, own)
            batch = self._batch(call, [operation], event, ends, own, keep=call)
        return Work(call, Tracked(tracker, tracker.add(batch)))

    def _look_at(self, call: CollectiveRequest) -> tuple[int | None, Stream | None]:
        """The handle of the stream that a collective is ordered on, and the stream, if the arrays' memory was checked.

        The handle is None if neither the user nor the framework tells it. Raises if the memory is not this rank's.
        """
        src, main, handle = call.src, call.view, call.stream
        if main is None:
            return handle, None
        handle, trusted = main.stream if handle is None else handle, main.trusted
        if main.device != self._kind or main.index != self._index:
            self._context.admit(main)
        if src is not main and src is not None:
            trusted = trusted and src.trusted
            if src.device != self._kind or src.index != self._index:
                self._context.admit(src)
        return handle, None if trusted else self._context.device.adopt(handle, *array.untrusted(src, main))

    def _enqueue(self, call: CollectiveRequest, on: Stream) -> tuple[Operation, Event | None, Ends]:
        """Enqueue on a stream, or on streams that it waits for; gives the event after it, if one was recorded."""
        with self._order:
            return self._perform(call, on)

    def _carry_out(
        self, plan: Plan, call: CollectiveRequest, operation: Operation, on: Stream
    ) -> tuple[Event | None, Ends]:
        return self._executor.launch(plan, call, operation, on)

    def _batch(
        self, call: CollectiveRequest, operations: list[Operation], event: Event | None, ends: Ends, on: Stream,
        keep: CollectiveRequest | None = None,
    ) -> Batch:  # fmt: skip
        """A collective for the tracker; `keep` if it is asynchronous."""
        event, native, blocking = event or cast(Event, on.record_event()), self._context.joined_native(), keep is None
        return Batch(
            operations, call.deadline, ends, stream=on, event=event, native=native, blocking=blocking, keep=keep
        )

    def prepare(self, call: CollectiveRequest) -> Launch | None:
        nbytes, executor = 0, self._executor
        if self._branch is None:
            return None
        if self._native_only:  # if the native library does all of it
            native = self._context.joined_native()
            found = native.enqueued(call.form()) if native is not None else None
            steps = [EnqueuedStep(found, (Place(Buf.IN, 0), Place(Buf.OUT, 0)))] if found is not None else None
        else:  # if compiled code can run all steps of the plan
            plan = self._context.planner.plan(call.request())
            steps, nbytes = executor.enqueued(plan, call), plan.schedule.scratch * call.dtype.itemsize
        if steps is None:
            return None
        self._launch_gate.admit(call.op)
        return Launch(
            self._context, self._launch_gate, [EnqueuedOperation(call.op, call.message())], steps,
            # compiled code launches nothing on a thread's own stream
            (lambda handle, output: executor.serial_scratch(nbytes, (handle, 0), output)) if nbytes else None,
        )  # fmt: skip

    def _close(self) -> None:
        """Does nothing: streams end by themselves."""
