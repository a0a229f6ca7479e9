"""How a collective runs: contract check, then the native library alone, or a schedule across islands."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from concurrent.futures import Future
from functools import partial
from time import monotonic
from typing import Any

import numpy as np

from xvcomm.abc.device import Event, Stream
from xvcomm.engine.context import Context
from xvcomm.engine.executor import Executor
from xvcomm.engine.inflight.log import Ends
from xvcomm.engine.inflight.work import OrderedWorker, Work
from xvcomm.engine.planner import Plan
from xvcomm.engine.prepared import HostGate, PreparedCall
from xvcomm.engine.request import CollectiveRequest, Key
from xvcomm.engine.staging import Staging
from xvcomm.memory import array
from xvcomm.memory.array_view import ArrayView
from xvcomm.trace.callsite import find_call_site
from xvcomm.trace.format import Stage
from xvcomm.trace.operation import NO_PEER, Operation

_CLOSE_SECONDS = 2.0
_INSIDE, _INSIDE_AGAIN = 3, 2
"""Functions of xvcomm that are under way at the least when a collective asks for the call site."""


class Collectives(ABC):
    """Runs the collectives of one communicator, in order. The launch of a shape is found, else the collective is planned."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._native_only = context.topology.homogeneous and context.topology.size > 1
        self._alone = context.topology.size == 1
        self._executor = Executor(context)
        self._token = array.view(Staging(context.device).up(np.zeros(1, np.uint8)))

    def token(self) -> ArrayView:
        """One byte for operations that carry no data."""
        return self._token

    @abstractmethod
    def again(self, key: Key, src: ArrayView, dst: ArrayView, timeout: float, stream: Any) -> bool:
        """Run a blocking collective that has run before with arrays of these kinds; False if nothing has begun.

        It makes no request, which would take as long as the rest of the call.
        """

    @abstractmethod
    def run(self, call: CollectiveRequest) -> Any:
        """Run a collective and give the result array."""

    @abstractmethod
    def start(self, call: CollectiveRequest) -> Work:
        """Run a collective behind those that were started before."""

    @abstractmethod
    def prepare(self, call: CollectiveRequest) -> Any:
        """The launch of the same collective, on any addresses; None before one has run, or if compiled code cannot run it."""

    @abstractmethod
    def _carry_out(
        self, plan: Plan, call: CollectiveRequest, operation: Operation, on: Stream
    ) -> tuple[Event | None, Ends]:
        """Run a plan; gives the event after it, if there is one, and the ring ends that it uses."""

    def _launch_of(self, call: CollectiveRequest, *, at_once: bool = False) -> Any:
        """What `prepare` has given for this shape; see `LaunchCache.prepare`."""
        launches, shape = self._context.launches, call.shape()
        return launches.find(shape) or launches.prepare(shape, partial(self.prepare, call), at_once=at_once)

    def _perform(self, call: CollectiveRequest, on: Stream) -> tuple[Operation, Event | None, Ends]:
        """Begin a collective and run it by Python; gives the operation, and what `_carry_out` gives."""
        context = self._context
        operation = context.begin(call.op, call.message(), call_site=call.call_site)
        event, ends = None, list[Any]()
        try:
            if self._native_only:
                native, on.deadline = context.native(call.deadline, operation.sequence), call.deadline
                native.run(call.form(), *call.addresses, on)
            elif not (self._alone and call.idle()):
                event, ends = self._carry_out(context.planner.plan(call.request()), call, operation, on)
        except BaseException as error:
            context.fail(error, operation)
        return operation, event, ends


class HostCollectives(Collectives):
    """On host memory: in the calling thread, or behind asynchronous collectives in a thread of the communicator."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._gate = HostGate(context)
        self._worker = OrderedWorker(f"xvcomm-{context.path}")
        context.stages.append(self._stages)
        context.lifecycle.on_close(self._close)

    def again(self, key: Key, src: ArrayView, dst: ArrayView, timeout: float, stream: Any) -> bool:
        ready: PreparedCall | None = self._context.launches.find(key)
        if ready is None:
            return False
        return ready.run(src.address, dst.address, find_call_site(_INSIDE_AGAIN), monotonic() + timeout)

    def run(self, call: CollectiveRequest) -> Any:
        self._admit(call)
        if self._worker.pending:
            return self._submit(call).result()
        # A launch of the native library alone costs what Python's way does, and keeps little.
        native = self._native_only and self._context.joined_native() is not None
        ready: PreparedCall | None = None if self._alone else self._launch_of(call, at_once=native)
        if ready is not None and ready.run(
            *call.addresses, call.call_site or find_call_site(_INSIDE), call.deadline.at
        ):
            if call.key is not None:
                self._context.launches.alias(call.key, ready)
            return call.result()
        self._context.lifecycle.ensure_open(call.op)  # in a forked child the gate may stay closed for ever
        return self._run(call)

    def start(self, call: CollectiveRequest) -> Work:
        self._admit(call)
        return Work(call, future=self._submit(call))

    def prepare(self, call: CollectiveRequest) -> PreparedCall | None:
        if not self._context.launches.enabled or self._alone:
            return None
        self._context.lifecycle.ensure_open(call.op)  # else it opens rings, or waits in a forked child
        if self._native_only:
            native = self._context.joined_native()
            found = native.prepare(call.form()) if native is not None else None
        else:
            found = self._executor.prepare(self._context.planner.plan(call.request()), call)
        if found is None:
            return None
        if not self._gate.open:
            self._gate.admit(call.op)
        return PreparedCall(self._context, self._gate, call, found)

    def _admit(self, call: CollectiveRequest) -> None:
        kind, src, dst = self._context.kind, call.src, call.dst
        if src is not None and (src.device != kind or kind != "host"):
            self._context.admit(src)
        if dst is not None and dst is not src and (dst.device != kind or kind != "host"):
            self._context.admit(dst)

    def _stages(self) -> dict[int, Stage]:
        """While the worker has collectives, all others wait behind them."""
        if not self._worker.pending:
            return {}
        return {operation.record: Stage.WORKER for operation in self._context.under_way() if operation.peer == NO_PEER}

    def _submit(self, call: CollectiveRequest) -> Future[Any]:
        def run() -> Any:
            try:
                return self._run(call)
            finally:
                self._gate.queue(-1)

        self._context.lifecycle.ensure_open(call.op)
        self._gate.queue(1)
        return self._worker.submit(run, call.call_site or find_call_site(_INSIDE + 1))

    def _run(self, call: CollectiveRequest) -> Any:
        with self._gate:
            operation, _, _ = self._perform(call, self._gate.stream)
            self._context.end(operation)
            return call.result()

    def _carry_out(self, plan: Plan, call: CollectiveRequest, operation: Operation, on: Stream) -> tuple[None, Ends]:
        self._executor.run(plan, call, operation)
        return None, []

    def _close(self) -> None:
        """End the worker; what it still runs was stopped by the context."""
        with contextlib.suppress(RuntimeError):
            self._worker.close(_CLOSE_SECONDS)
