"""How a collective runs: contract check, then the native library alone, or a schedule across islands."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from xvcomm.abc.device import Stream
from xvcomm.engine.context import Context
from xvcomm.engine.executor import Buffers, Executor
from xvcomm.engine.inflight.work import OrderedWorker, Work
from xvcomm.engine.prepared import BUSY, Gate, PreparedCall
from xvcomm.engine.request import CollectiveRequest, Key
from xvcomm.jit.atomics import READY
from xvcomm.memory import array
from xvcomm.memory.array_view import ArrayView
from xvcomm.trace.callsite import find_call_site
from xvcomm.trace.operation import Operation
from xvcomm.types.deadline import Deadline

_CLOSE_SECONDS = 2.0
_INSIDE_RUN, _INSIDE_START = 3, 4
"""Functions of xvcomm that are under way at the least when a collective asks for the call site: blocking, asynchronous."""


class Caller:
    """Runs a communicator's collectives in order: in the calling thread, or behind asynchronous ones on its worker."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._gate = Gate(context)
        self._find: Callable[[Hashable], PreparedCall | None] = context.launches.find
        self._worker = OrderedWorker(f"xvcomm-{context.path}")
        self._native_only = context.topology.homogeneous and context.topology.size > 1
        self._alone = context.topology.size == 1
        self._executor = Executor(context)
        self._stream = context.device.streams(1)[0]
        self._token = array.view(np.zeros(1, np.uint8))
        context.lifecycle.on_close(self._close)

    def token(self) -> ArrayView:
        """One byte for operations that carry no data."""
        return self._token

    def again(self, key: Key, src: ArrayView, dst: ArrayView, timeout: float, stream: Any) -> bool:
        """Run a blocking collective that has run before with arrays of these kinds; False if nothing has begun."""
        return False

    def run(self, call: CollectiveRequest, deadline: Deadline, stream: int | None = None) -> Any:
        """Run a collective and give the result array.

        Args:
            stream: handle of the stream that it is ordered on, where the user gave one.
        """
        self._admit(call)
        if not self._worker.idle:
            return Work(self._submit(call, deadline), str(call.op)).wait()
        prepared = None
        if self._native_only:
            shape = call.shape()
            prepared = self._find(shape) or self._context.launches.prepare(shape, partial(self.prepare, call))
        if prepared is not None:
            src, dst = array.address(call.src), array.address(call.dst)
            code = prepared.run(src, dst, call.call_site or find_call_site(_INSIDE_RUN))
            if code != BUSY:
                if code != READY:
                    prepared.finish(src, dst, deadline)
                return call.result()
        self._context.lifecycle.ensure_open(call.op)  # in a forked child the gate may stay closed for ever
        with self._gate:
            return self._run(call, deadline)

    def start(self, call: CollectiveRequest, deadline: Deadline, stream: int | None = None) -> Work:
        """Run a collective behind those that were started before."""
        self._admit(call)
        return Work(self._submit(call, deadline), str(call.op))

    def _admit(self, call: CollectiveRequest) -> None:
        kind, src, dst = self._context.kind, call.src, call.dst
        if src is not None and (src.device != kind or kind != "host"):
            self._context.admit(src)
        if dst is not None and dst is not src and (dst.device != kind or kind != "host"):
            self._context.admit(dst)

    def _submit(self, call: CollectiveRequest, deadline: Deadline) -> Future[Any]:
        def locked() -> Any:
            try:
                with self._gate:
                    return self._run(call, deadline)
            finally:
                self._gate.queue(-1)

        self._context.lifecycle.ensure_open(call.op)
        self._gate.queue(1)
        return self._worker.submit(locked, call.call_site or find_call_site(_INSIDE_START))

    def prepare(self, call: CollectiveRequest) -> PreparedCall | None:
        """The same collective for compiled code, on any addresses; None before one has run, or if compiled code cannot."""
        native = self._context.joined_native()
        if native is None or not self._native_only or not self._context.launches.enabled:
            return None
        found = native.prepare(call.form())
        return self._gate.admit(call.op, call.message(), call.call_site, found) if found is not None else None

    def _run(self, call: CollectiveRequest, deadline: Deadline) -> Any:
        context = self._context
        operation = context.begin(call.op, call.message(), call_site=call.call_site)
        try:
            if self._native_only:
                self._native(call, deadline, self._stream)
            elif not (self._alone and call.idle()):
                self._scheduled(call, operation, deadline)
        except BaseException as error:
            context.fail(error, operation)
        context.end(operation)
        return call.result()

    def _native(self, call: CollectiveRequest, deadline: Deadline, stream: Stream) -> None:
        native = self._context.native(deadline)
        stream.deadline = deadline
        native.run(call.form(), array.address(call.src), array.address(call.dst), stream)

    def _scheduled(self, call: CollectiveRequest, operation: Operation, deadline: Deadline) -> None:
        plan = self._context.planner.plan(call.request())
        src, dst = array.address(call.src), array.address(call.dst)
        self._executor.run(plan.schedule, Buffers(src, dst), call.dtype, call.how(), operation, deadline)

    def _close(self) -> None:
        """End the worker; what it still runs was stopped by the context."""
        with contextlib.suppress(RuntimeError):
            self._worker.close(_CLOSE_SECONDS)
