"""The operations of compiled programs, as run by XLA's handlers on the addresses that XLA passes."""

from __future__ import annotations

import ctypes
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from xvcomm.adapters.jax import compiled, ffi
from xvcomm.adapters.jax.failures import explain
from xvcomm.adapters.jax.specs import ANY, TAGS, CollectiveSpec, MessageSpec, Shape, Spec
from xvcomm.engine.prepared import PreparedCall
from xvcomm.engine.request import CollectiveRequest, MessageRequest
from xvcomm.errors import ArgumentError, ArrayError
from xvcomm.memory.array_view import ArrayView
from xvcomm.trace.callsite import called_at, make_call_site
from xvcomm.trace.operation import ANY_PEER, NO_PEER
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import UINT8, ReduceOp, Reduction, from_numpy
from xvcomm.types.opcode import OpCode

_BARRIER = Reduction(ReduceOp.MAX)


class CustomCall(ABC):
    """One operation of a compiled program. Several threads may run it concurrently.

    Attributes:
        reads, writes: whether it has an input, and an output, in memory.
        device: index of the only device that takes part, if it is `lone`.
        text, number: identify it in compiled programs.
    """

    def __init__(self, spec: Spec, arrays: Sequence[Any], device: int | None, text: str, number: int) -> None:
        self.spec, self.device, self.text, self.number = spec, device, text, number
        self.reads, self.writes = bool(arrays), bool(arrays) and bool(spec.results(arrays[-1].shape))
        self.call_site = make_call_site(spec.call_site)

    @abstractmethod
    def run(self, src: int, dst: int, stream: int | None) -> None:
        """Run the operation.

        Args:
            src, dst: addresses of input and output; 0 if there is none.
            stream: the vendor's handle of the stream that it is enqueued on; None on host memory, where this blocks.
        """

    def prepare(self) -> None:  # noqa: B027
        """Let compiled code run it on host memory from now on, if possible. Called after it has run there."""

    def finish(self, src: int, dst: int) -> None:
        """Complete an operation that compiled code has started. Arguments as in `run`."""
        raise NotImplementedError

    def _view(self, shape: Shape, dtype: Any, address: int = 0) -> ArrayView:
        """A view of memory on this rank's device, which XLA owns."""
        kind, count = from_numpy(np.dtype(dtype)), math.prod(shape)
        comm = self.spec.comm
        return ArrayView(
            address, shape, kind, count, count * kind.itemsize, None, comm.device, comm.device_index, trusted=True
        )


class CollectiveCall(CustomCall):
    """A collective. Keeps the core's description of it, with views that lack only addresses."""

    spec: CollectiveSpec

    def __init__(self, spec: CollectiveSpec, arrays: Sequence[Any], device: int | None, text: str, number: int) -> None:
        super().__init__(spec, arrays, device, text, number)
        self._arrays = [(tuple(x.shape), x.dtype) for x in arrays]
        self._collectives, self._timeout = spec.comm.collectives, spec.comm.timeout
        self._spare: list[CollectiveRequest] = []
        self._asked = False
        self._prepared: PreparedCall | None = None

    def run(self, src: int, dst: int, stream: int | None) -> None:
        call = self._aimed(src, dst)
        call.deadline, call.stream = Deadline.after(self._timeout), stream
        self._collectives.run(call)
        self._spare.append(call)

    def prepare(self) -> None:
        """See `CustomCall.prepare`; for one device and one island."""
        with _preparing:
            if self._asked or self.device is not None:
                return
            self._asked = True
            call = self._aimed(compiled.ARGUMENT, compiled.RESULT)
            self._prepared = self._collectives.prepare(call)
            if self._prepared is not None:
                compiled.add(self.number, self._prepared.address, *call.addresses)

    def finish(self, src: int, dst: int) -> None:
        assert self._prepared is not None
        self._prepared.finish(*self._aimed(src, dst).addresses, Deadline.after(self._timeout))

    def _aimed(self, src: int, dst: int) -> CollectiveRequest:
        """The core's description with the addresses of input and output."""
        try:
            call = self._spare.pop()
        except IndexError:
            call = self._make()
        if self.reads and call.src is not None:
            call.src.address = src
        if self.writes and call.dst is not None:
            call.dst.address = dst
        return call

    def _make(self) -> CollectiveRequest:
        spec, call_site = self.spec, ctypes.addressof(self.call_site)
        if not self._arrays:
            token = self._collectives.token()
            return CollectiveRequest(spec.op, token, token, UINT8, _BARRIER, count=1, call_site=call_site)
        (shape, dtype), *_ = self._arrays
        rank, root = spec.comm.rank, spec.root
        view, results = self._view(shape, dtype), spec.results(shape)
        src: ArrayView | None = view
        dst = self._view(results[0], dtype) if results else None
        counts: dict[str, Any] = {}
        match spec.op:
            case OpCode.BROADCAST:
                counts["count"] = view.count
                src = dst = view if rank == root else dst
            case OpCode.ALL_REDUCE | OpCode.REDUCE:
                counts["count"] = view.count
            case OpCode.SCATTER if rank != root:
                src = None
        if spec.rows:
            row = math.prod(shape[1:])
            counts["counts"] = tuple(n * row for n in spec.rows)
            counts["recv_counts"] = tuple(n * row for n in spec.back)
        return CollectiveRequest(
            spec.op, src, dst, view.dtype, spec.reduction, root=root, uneven=spec.uneven, call_site=call_site, **counts
        )


class MessageCall(CustomCall):
    """A message, or one in each direction."""

    spec: MessageSpec

    def __init__(self, spec: MessageSpec, arrays: Sequence[Any], device: int | None, text: str, number: int) -> None:
        super().__init__(spec, arrays, device, text, number)
        self._out = (tuple(arrays[0].shape), arrays[0].dtype)
        self._back = (tuple(arrays[-1].shape), arrays[-1].dtype)

    def run(self, src: int, dst: int, stream: int | None) -> None:
        spec, transfers = self.spec, []
        comm, channel = spec.comm, spec.channel
        if spec.dst != NO_PEER:
            view = self._view(*self._out, src)
            transfers.append(comm.message_request(OpCode.SEND, view, spec.dst, spec.send_tag, channel, None, stream))
        if spec.src != NO_PEER:
            view = self._view(*self._back, dst)
            transfers.append(self._found(view, stream) if spec.wild else comm.message_request(
                OpCode.RECV, view, spec.src, spec.recv_tag, channel, None, stream
            ))  # fmt: skip
        for transfer in transfers:
            transfer.call_site = ctypes.addressof(self.call_site)
        # Not through `send` and the like, which would look up this thread's call site and group.
        if len(transfers) > 1:
            comm.messages.run(transfers)
        else:
            comm.messages.run_alone(transfers[0])
        if spec.status is not None:
            spec.status.fill(transfers[-1].peer, transfers[-1].tag)

    def _found(self, view: ArrayView, stream: int | None) -> MessageRequest:
        """The receive of the first available message; the host waits for it."""
        spec, comm = self.spec, self.spec.comm
        deadline = Deadline.after(comm.timeout)
        src, channel = None if spec.src == ANY_PEER else spec.src, spec.channel
        found = called_at(ctypes.addressof(self.call_site), partial(comm.probe, src, channel=channel))
        # A derivative's tag does not match ANY_TAG: receiving it as a value must be a mismatch.
        tag = spec.recv_tag if spec.recv_tag != ANY else found.tag if found.tag < TAGS else 0
        transfer = comm.message_request(OpCode.RECV, view, found.src, tag, channel, None, stream)
        transfer.deadline = deadline
        return transfer


class Kind(NamedTuple):
    """Shape and dtype of an array."""

    shape: Shape
    dtype: Any


_calls: dict[int, CustomCall] = {}
_preparing = threading.Lock()


def prepared(spec: Spec, arrays: Sequence[Any], device: int | None = None) -> CustomCall:
    """The call for a spec and its operands; the same object for the same text.

    Args:
        arrays: operands, or objects that define shape and dtype of each.
        device: index of the device that takes part, for a `lone` operation.
    """
    return _prepared(spec, tuple(Kind(tuple(x.shape), x.dtype) for x in arrays), device)


def passing(spec: Spec, arrays: Sequence[Any]) -> CustomCall:
    """A call of a message that is not cached, because there are many statuses."""
    assert isinstance(spec, MessageSpec)
    return MessageCall(spec, arrays, None, "", 0)


@lru_cache(maxsize=4096)
def _prepared(spec: Spec, arrays: tuple[Kind, ...], device: int | None) -> CustomCall:
    text = spec.text(arrays, device)
    number = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), signed=True)
    found = _calls.get(number)
    if found is None:
        kind: Any = CollectiveCall if isinstance(spec, CollectiveSpec) else MessageCall
        found = _calls.setdefault(number, kind(spec, arrays, device, text, number))
    return found


def _lost(frame: ffi.Frame) -> ArgumentError:
    return ArgumentError(
        f"this program was compiled in another process (for {ffi.text(frame)}): programs with xvcomm's operations "
        "cannot be exported or pickled, because communicators are bound to a process; compile the function in this one"
    )


def _on_host(frame: ffi.Frame, number: int, begun: bool) -> None:
    call = _calls.get(number)
    if call is None:
        raise _lost(frame)
    if call.device is not None and call.device != ffi.device(frame):
        return
    source, result = ffi.argument(frame) if call.reads else 0, ffi.result(frame) if call.writes else 0
    if begun:
        call.finish(source, result)
    else:
        call.run(source, result, None)
        call.prepare()


def _on_gpu(frame: ffi.Frame, number: int, begun: bool) -> None:
    """Enqueue the call on XLA's stream. The host waits only for the first calls of a communicator, and for barriers."""
    call, mine = _calls.get(number), ffi.device(frame)
    if call is None:
        raise _lost(frame)
    if call.device is not None and call.device != mine:
        return
    comm = call.spec.comm
    if mine != comm.device_index:
        raise ArrayError(
            f"the program runs on {comm.device}:{mine} but this rank's device is {comm.device}:{comm.device_index}; "
            f"move its arrays, or join with xvcomm.init(device='{comm.device}:{mine}')"
        )
    source, result = ffi.argument(frame) if call.reads else 0, ffi.result(frame) if call.writes else 0
    call.run(source, result, ffi.stream(frame))


@cache
def _handler(kind: str) -> Any:
    return ffi.handler(_on_host, explain, compiled.handler) if kind == "host" else ffi.handler(_on_gpu, explain)


def target(name: str, platform: str) -> str:
    """Name of the custom call of an operation; registers its handler for the platform on first use."""
    symbol = f"xvcomm_{name}"
    ffi.register(symbol, platform, _handler("host" if platform == "cpu" else "gpu"))
    return symbol
