"""How a collective runs on a device whose streams go on behind the host: enqueued by the caller, looked after later."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, cast

import numpy as np

from xvcomm import array
from xvcomm.abc.collective import Collective, EnqueuedCollective
from xvcomm.abc.device import Mark, Stream
from xvcomm.board import NativeCall
from xvcomm.calls import Call, Caller
from xvcomm.context import Context
from xvcomm.deadline import Deadline
from xvcomm.executor import Buffers, Executor
from xvcomm.opcode import OpCode
from xvcomm.operation import NO_PEER, Operation
from xvcomm.pending import Ends, Flight, StreamWork
from xvcomm.staging import Staging
from xvcomm.trace import call_site
from xvcomm.work import Work

_Shape = tuple[OpCode, int, int, int, tuple[int, ...], int]
_SHAPES_KEPT = 1000
_INSIDE = 5
"""Functions of xvcomm that are under way at the least when a blocking collective is enqueued."""


class StreamCaller(Caller):
    """Runs a communicator's collectives: blocking ones on the arrays' stream, asynchronous ones on one of their own."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._order, self._starting = threading.Lock(), threading.Lock()
        self._native_only = context.topology.homogeneous and context.topology.size > 1
        self._executor = Executor(context)
        self._own = context.device.streams(1)[0]
        self._token = array.view(Staging(context.device).up(np.zeros(1, np.uint8)))
        self._launches: dict[_Shape, tuple[NativeCall, EnqueuedCollective] | None] = {}

    def run(self, call: Call, deadline: Deadline, stream: int | None = None) -> Any:
        """Enqueue a collective on the arrays' stream, and give the result array.

        The host waits only for a barrier, and where nobody knows the arrays' stream.
        """
        self._admit(call)
        handle = _stream_of(call, stream)
        user = self._user(call, handle)
        operation, mark, ends = self._launch(call, deadline, user)
        pending = self._context.pending
        if handle is None or call.op is OpCode.BARRIER:
            mark = mark or cast(Mark, user.mark())
            pending.wait_for(pending.add(Flight([operation], user, mark, deadline, ends, self._joined())))
        elif user.capturing():
            self._context.end(operation)
        else:
            pending.board(operation, handle, deadline, self._joined(), ends)
        return self._result(call)

    def start(self, call: Call, deadline: Deadline, stream: int | None = None) -> Work:
        """Enqueue a collective behind what the arrays' stream holds now, and behind those that were started before."""
        self._admit(call)
        own = self._own
        with self._starting:
            own.wait(self._user(call, _stream_of(call, stream)).mark())
            operation, mark, ends = self._launch(call, deadline, own)
            mark = mark or cast(Mark, own.mark())
        flight = Flight([operation], own, mark, deadline, ends, self._joined(), blocking=False, keep=call)
        pending = self._context.pending
        pending.add(flight)

        def follow(mark: object) -> None:
            view = call.dst if call.dst is not None else call.src
            handle = stream if view is None else array.stream_now(view, stream)
            self._context.device.adopt(handle).wait(mark)

        staged = call.dst is not None and call.dst.staged
        return StreamWork(pending, None if staged else follow, partial(self._result, call), str(call.op), flight)

    def _user(self, call: Call, handle: int | None) -> Stream:
        """The stream of a call; what holds its arrays is looked at where the framework does not vouch for it."""
        src, dst, adopt = call.src, call.dst, self._context.device.adopt
        if (src is None or src.trusted) and (dst is None or dst.trusted):
            return adopt(handle)
        return adopt(handle, *(v.address for v in (src, dst) if v is not None and v.count and not v.trusted))

    def _launch(self, call: Call, deadline: Deadline, carrier: Stream) -> tuple[Operation, Mark | None, Ends]:
        """Enqueue on a stream, or beside it with the stream behind; gives a mark there too, if one was made."""
        context = self._context
        with self._order:
            ready = self._ready(call) if self._native_only else None
            if ready is not None:
                return self._enqueue(call, *ready, deadline, carrier.handle), None, []
            operation = context.begin(call.op, call.message(), site=call.site)
            try:
                if self._native_only:
                    self._native(call, deadline, carrier)
                    return operation, None, []
                plan, buffers = context.planner.plan(call.request()), Buffers(array.address(call.src), array.address(call.dst))
                mark, ends = self._executor.launch(plan, buffers, call.dtype, call.how(), operation, deadline, carrier)
            except BaseException as error:
                raised = context.fail(error, operation)
                if raised is error:
                    raise
                raise raised from None
        return operation, mark, ends

    def _enqueue(
        self, call: Call, launch: NativeCall, native: EnqueuedCollective, deadline: Deadline, handle: int
    ) -> Operation:
        """Begin a collective that is one call of the native library, and let compiled code make the call."""
        src, dst = array.address(call.src), array.address(call.dst)
        site = call.site or call_site(_INSIDE)
        begin = self._context.begin
        operation = begin(call.op, launch.message, NO_PEER, site, (launch, src, dst, handle, deadline.at))
        if launch.result:
            try:
                native.failed(launch.result)
            except BaseException as error:
                raised = self._context.fail(error, operation)
                if raised is error:
                    raise
                raise raised from None
        return operation

    def _ready(self, call: Call) -> tuple[NativeCall, EnqueuedCollective] | None:
        """How compiled code makes a call of this shape; None before one has run, or if it cannot."""
        how = call.reduction
        shape = call.op, call.dtype.code, 0 if how is None else how.op, call.count, call.counts, call.root
        try:
            return self._launches[shape]
        except KeyError:
            return self._prepare(call, shape)

    def _prepare(self, call: Call, shape: _Shape) -> tuple[NativeCall, EnqueuedCollective] | None:
        native = self._joined()
        if native is None:
            return None
        if len(self._launches) >= _SHAPES_KEPT:
            self._launches.clear()
        counts = call.counts or (call.count,)
        found = None
        if not call.uneven and counts.count(counts[0]) == len(counts):
            found = native.enqueued(call.op, counts[0], call.dtype, call.how(), call.root)
        self._launches[shape] = (NativeCall(call.message(), found.function, found.argument), found) if found else None
        return self._launches[shape]

    def _joined(self) -> Collective | None:
        return self._context.joined_native()

    def _close(self) -> None:
        """Nothing: streams end by themselves."""


def _stream_of(call: Call, given: int | None) -> int | None:
    """The stream that a collective is ordered on; None where neither the user nor the arrays' framework tells."""
    view = call.dst if call.dst is not None else call.src
    return given if given is not None or view is None else view.stream
