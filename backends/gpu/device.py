"""GPUs as devices: one implementation for CUDA and ROCm, over the table of their common functions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NoReturn, cast

from xvcomm.abc.device import Allocation, Device, DeviceCapabilities, Stream
from xvcomm.abc.launch import (
    EnqueuedCall,
    EnqueuedEvents,
    EnqueuedMessages,
    MessageForm,
    SupportsEnqueuedLocal,
    SupportsEnqueuedMessages,
)
from xvcomm.abc.nic_memory import SupportsNicMemory
from xvcomm.abc.peer_memory import ExportedMemory, PeerMemory, SupportsPeerMemory
from xvcomm.abc.ranges import Ranges, SupportsRanges
from xvcomm.backends.gpu.engine import Engine
from xvcomm.backends.gpu.events import BRANCH, FOLLOW, RECORD, StreamEvents
from xvcomm.backends.gpu.guard import on_device, told
from xvcomm.backends.gpu.kernels import MOST_TERMS, Kernels, Prepared
from xvcomm.backends.gpu.local import LAUNCH_LOCAL, LAUNCH_REDUCE, LocalCall
from xvcomm.backends.gpu.messages import LAUNCH, READY
from xvcomm.backends.gpu.nic_memory import NicPool
from xvcomm.backends.gpu.peer_memory import PeerPool, reached
from xvcomm.backends.gpu.streams import GpuStream
from xvcomm.backends.gpu.vendor import Runtime
from xvcomm.config import Config
from xvcomm.errors import ArgumentError, ArrayError, ConfigError
from xvcomm.jit.cache import kernel_cache
from xvcomm.memory.ring import Message, RingEnd
from xvcomm.types.dtype import UINT8, DType, ReduceOp

_DEFAULT_STREAM = 0
_NO_POINTERS = range(3, 4096)
"""Numbers that are neither the handle of a special stream nor an address."""


class _Adopted(threading.local):
    """A thread's adopted streams, by handle."""

    def __init__(self) -> None:
        self.streams: dict[int, GpuStream] = {}


class GpuDevice(
    Device, SupportsEnqueuedMessages, SupportsEnqueuedLocal, SupportsPeerMemory, SupportsNicMemory, SupportsRanges
):
    """One GPU of this process. Thread-safe; each stream may be used by one thread at a time."""

    def __init__(self, runtime: Runtime, index: int, config: Config) -> None:
        self.runtime, self.index = runtime, index
        self._kernels, self._engine = self._prepare(config)
        self._adopted = _Adopted()
        kind = runtime.kind
        self._able = DeviceCapabilities(kind, runtime.architecture(index), kind, index, asynchronous=True)
        self._peers = reached(runtime, index, bool(config.peer_memory))
        self._shared, self._for_cards = PeerPool(runtime), NicPool(runtime)
        self.needs_write = runtime.needs_write
        before = runtime.current()
        runtime.use(index)  # initializes the device, which takes long
        runtime.use(before)

    @on_device
    def _prepare(self, config: Config) -> tuple[Kernels, Engine]:
        kernels = Kernels(self.runtime, self.index, kernel_cache(config.kernel_cache))
        return kernels, Engine(self.runtime, self.index, kernels, config.spin_us * 1e-6)

    def capabilities(self) -> DeviceCapabilities:
        return self._able

    @on_device
    def empty(self, nbytes: int) -> Allocation:
        """See `Device.empty`; from a pool."""
        return self._engine.memory.take(nbytes)

    @on_device
    def streams(self, count: int) -> tuple[GpuStream, ...]:
        engine = self._engine
        return tuple(GpuStream(engine, engine.own_stream(), owned=True) for _ in range(count))

    def adopt(self, handle: int | None, *addresses: int) -> GpuStream:
        """See `Device.adopt`; each thread has its own GpuStream for a handle."""
        stream = self._adopted.streams.get(handle or _DEFAULT_STREAM) or self._verified(handle or _DEFAULT_STREAM)
        stream.enqueued()
        if addresses:
            self._look_at(addresses)
        return stream

    @on_device
    def _look_at(self, addresses: Sequence[int]) -> None:
        for address in addresses:
            place = self.runtime.locate(address)
            if place != self.index:
                raise self._elsewhere(address, place)

    @on_device
    def _verified(self, handle: int) -> GpuStream:
        runtime, name = self.runtime, f"{self.runtime.kind} device {self.index}"
        if handle < 0 or handle in runtime.invalid_streams or handle in _NO_POINTERS:
            raise ArgumentError(
                f"stream {handle} is not a stream of {name}; pass the result of the framework's current-stream function"
            )
        stream = GpuStream(self._engine, handle, owned=False)
        try:
            stream.record_event()  # an event of this device cannot be recorded on a stream of another one
        except ArgumentError as error:
            raise ArgumentError(
                f"stream {handle:#x} cannot be used on {name}, which this rank has: {error}; make {name} the current device "
                "before the stream is created, or set XVCOMM_DEVICE_INDEX"
            ) from error
        self._adopted.streams[handle] = stream
        return stream

    def _elsewhere(self, address: int, place: int | None) -> ArrayError:
        kind, index = self.runtime.kind, self.index
        if place is None:
            return ArrayError(
                f"the array at {address:#x} is not in the memory of {kind} device {index}: it was freed, or is not on a "
                "GPU; keep arrays alive until the operation is complete"
            )
        return ArrayError(
            f"the array at {address:#x} is on {kind} device {place} but this rank's device is {kind} device {index}; "
            f"move the array, or set XVCOMM_DEVICE_INDEX={place}"
        )

    @on_device
    def copy(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        if nbytes:
            self.runtime.copy(dst, src, nbytes, cast(GpuStream, stream).handle)

    @on_device
    def put(self, end: RingEnd, src: int, message: Message, stream: Stream) -> None:
        cast(GpuStream, stream).transfer(end, src, message, None, False)

    @on_device
    def get(
        self, end: RingEnd, dst: int, message: Message, stream: Stream, op: ReduceOp | None = None,
        *, own: int | None = None, remote_first: bool = False,
    ) -> None:  # fmt: skip
        cast(GpuStream, stream).transfer(end, dst, message, op, remote_first, 0 if own is None else own - dst)

    @on_device
    def enqueued_messages(self, forms: Sequence[MessageForm]) -> EnqueuedMessages | None:
        found = self._engine.messages([(form.end, (form.message, form.op, form.remote_first)) for form in forms])
        return EnqueuedMessages(READY, LAUNCH, found.address, found, self._failed) if found is not None else None

    def enqueued_copy(self, nbytes: int) -> EnqueuedCall:
        return self._local(self._kernels.prepare_reduce(1, nbytes, UINT8, ReduceOp.SUM, 0), nbytes, 1)

    def enqueued_scale(self, count: int, dtype: DType, factor: float, divisor: int) -> EnqueuedCall:
        prepared = self._kernels.prepare_scale(count, dtype, factor, divisor)
        return self._local(prepared, count, dtype.itemsize, scales=True)

    def enqueued_reduce(self, ways: int, count: int, dtype: DType, op: ReduceOp, divisor: int) -> EnqueuedCall | None:
        if ways > MOST_TERMS:
            return None
        call = LocalCall(self._kernels.prepare_reduce(ways, count, dtype, op, divisor), count, dtype.itemsize)
        return EnqueuedCall(LAUNCH_REDUCE, call.address, call, self._failed, reduces=True)

    @on_device
    def enqueued_events(self, stream: Stream) -> EnqueuedEvents:
        stream = cast(GpuStream, stream)
        events = self._engine.events_of(stream.handle, lasting=stream.lasting)
        found = StreamEvents(self.runtime, self.index, self._kernels.place(), events)
        return EnqueuedEvents(BRANCH, RECORD, FOLLOW, found.address, found, found.take, self._failed)

    def _local(self, prepared: Prepared, count: int, itemsize: int, *, scales: bool = False) -> EnqueuedCall:
        call = LocalCall(prepared, count, itemsize, scales=scales)
        return EnqueuedCall(LAUNCH_LOCAL, call.address, call, self._failed)

    def _failed(self, code: int) -> NoReturn:
        raise told(self.runtime.failure(code), self.runtime.kind, self.index)

    def peer_memory(self) -> PeerMemory:
        return self._peers

    @on_device
    def export_memory(self, nbytes: int) -> ExportedMemory:
        return self._shared.export_memory(nbytes)

    def reclaim(self, exported: ExportedMemory, returned: Callable[[], bool]) -> None:
        self._shared.reclaim(exported, returned)

    @on_device
    def import_memory(self, handle: bytes) -> int:
        return self._shared.import_memory(handle)

    @on_device
    def release_import(self, address: int) -> None:
        self._shared.release_import(address)

    def bus(self) -> str:
        return self.runtime.bus(self.index)

    @on_device
    def nic_memory(self, nbytes: int) -> int:
        return self._for_cards.take(nbytes)

    def return_nic_memory(self, address: int, nbytes: int) -> None:
        self._for_cards.give_back(address, nbytes)

    @on_device
    def dma_buf(self, address: int, nbytes: int) -> int:
        return self._for_cards.dma_buf(address, nbytes)

    def ranges(self) -> Ranges | None:
        return self.runtime.ranges()

    @on_device
    def reduce(
        self, dst: int, srcs: Sequence[int], count: int, dtype: DType, op: ReduceOp, stream: Stream, *, divisor: int = 0
    ) -> None:
        self._kernels.reduce(dst, srcs, count, dtype, op, cast(GpuStream, stream).handle, divisor)

    @on_device
    def scale(self, dst: int, src: int, count: int, dtype: DType, factor: float, divisor: int, stream: Stream) -> None:
        self._kernels.scale(dst, src, count, dtype, factor, divisor, cast(GpuStream, stream).handle)


def choose(config: Config, count: int, current: int) -> int:
    """Select one of `count` devices for a rank: the configured one, else the thread's, else by the local rank.

    Args:
        current: the thread's current device. Device 0 does not count as selected, because every thread starts with it.

    Raises:
        ConfigError: the configured device does not exist.
    """
    if config.device_index is not None:
        if config.device_index >= count:
            raise ConfigError(
                f"XVCOMM_DEVICE_INDEX={config.device_index}: this process sees {count} devices, numbered from 0"
            )
        return config.device_index
    return current if current > 0 else (config.local_rank or 0) % count
