"""Host memory as a device: transfers are collected on streams and progress together; other operations run at once."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from concurrent.futures import Future
from typing import cast

import numpy as np

from xvcomm.abc.device import Allocation, Device, DeviceCapabilities, Stream
from xvcomm.abc.message_mover import SupportsMessageMovers
from xvcomm.abc.partial_sums import SupportsConversion
from xvcomm.abc.recording import Recording, SupportsRecording
from xvcomm.backends.host.batch import NO_GATES, Batch
from xvcomm.backends.host.engine import Engine
from xvcomm.backends.host.kernels import scale
from xvcomm.backends.host.message_mover import HostMessageMover
from xvcomm.backends.host.mover import MAX_STREAMS, Kind
from xvcomm.backends.host.recorded_batch import RecordedBatch
from xvcomm.backends.host.reducers import BLOCK, average_many, finisher, kit, reduce_many, scaler, widener
from xvcomm.config import Config
from xvcomm.errors import ArgumentError
from xvcomm.jit.compile import compiling, kernel
from xvcomm.memory.ring import Message, RingEnd
from xvcomm.types.deadline import NEVER
from xvcomm.types.dtype import BY_CODE, DType, ReduceOp

EAGER_BYTES = 64 << 10
"""Up to this total size the caller's thread tries first: copying takes less time than waking the engine's thread."""


def _reduce_local(kit, finisher, dst, sources, ways, count, itemsize, divisor, scratch):  # type: ignore[no-untyped-def]
    if divisor != 0:
        average_many(kit, finisher, dst, sources, ways, count, itemsize, divisor, scratch)
    else:
        reduce_many(kit, dst, sources, ways, count, itemsize, itemsize, scratch)


_PUT, _GET, _GET_REDUCE = (int(kind) for kind in Kind)

with compiling():
    reduce_local = kernel("void(UniTuple(int64, 4), int64, int64, int64[::1], int64, int64, int64, int64, int64)")(
        _reduce_local
    )


class HostStream(Stream):
    """A lane of a batch; streams created together share the batch."""

    def __init__(self, batch: Batch, lane: int, engine: Engine) -> None:
        self.batch = batch
        self.lane = lane
        self.deadline = NEVER
        self._engine = engine
        self._gates = NO_GATES
        self._gated = 0

    @property
    def gates(self) -> tuple[int, ...]:
        """What the next transfer must wait for, as in `Batch.add`; nothing if the batch was emptied since."""
        return self._gates if self._gated == self.batch.generation else NO_GATES

    def record_event(self) -> tuple[int, int, int]:
        """See `Stream.record_event`: the batch's generation, its length, the lane."""
        return self.batch.generation, len(self.batch.ends), self.lane

    def wait(self, event: object) -> None:
        generation, length, lane = cast(tuple[int, int, int], event)
        if generation == self.batch.generation and length:
            gates = list(self.gates)
            gates[lane] = max(gates[lane], length)
            self._gates, self._gated = tuple(gates), generation

    def reached(self, event: object) -> bool:
        """See `Stream.reached`; a batch is emptied as a whole, so its events are complete together."""
        generation, length, _ = cast(tuple[int, int, int], event)
        return generation != self.batch.generation or not length

    def capturing(self) -> bool:
        """See `Stream.capturing`; host memory has no graphs."""
        return False

    def together(self) -> None:
        """See `Stream.together`; transfers always progress together here."""

    def synchronize(self) -> None:
        """See `Stream.synchronize`; also completes the other lanes."""
        if self.batch.ends:
            self.batch.finish(self.deadline)

    def flush(self) -> Future[None]:
        if self.batch.nbytes <= EAGER_BYTES and self.batch.move_ready():
            done: Future[None] = Future()
            done.set_result(None)
            return done
        return self._engine.submit(self.batch, self.deadline)

    def discard(self) -> None:
        self.batch.discard()


class HostDevice(Device, SupportsMessageMovers, SupportsConversion, SupportsRecording):
    """The memory of this process."""

    def __init__(self, config: Config) -> None:
        # A spin of compiled code takes about 2 ns; precision is not needed.
        self._spins = int(config.spin_us * 500)
        self._process_memory = bool(config.process_memory)
        self._engine = Engine(self._spins)
        self._scratch = np.empty(BLOCK * 16, np.uint8)

    def capabilities(self) -> DeviceCapabilities:
        return DeviceCapabilities("host", platform.machine(), "host")

    def empty(self, nbytes: int) -> Allocation:
        memory = np.empty(nbytes + 64, np.uint8)
        return Allocation(-(-memory.ctypes.data // 64) * 64, nbytes, memory)

    def streams(self, count: int) -> tuple[HostStream, ...]:
        assert count <= MAX_STREAMS
        batch = Batch(self._spins, self._process_memory)
        return tuple(HostStream(batch, lane, self._engine) for lane in range(count))

    def adopt(self, handle: int | None, *addresses: int) -> HostStream:
        """See `Device.adopt`; host memory has only the default stream."""
        if handle is not None:
            raise ArgumentError(f"stream {handle:#x}: arrays in host memory have no streams; omit stream=")
        return self.streams(1)[0]

    def copy(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        stream.synchronize()
        ctypes.memmove(dst, src, nbytes)

    def put(self, end: RingEnd, src: int, message: Message, stream: Stream) -> None:
        assert isinstance(stream, HostStream)
        stream.batch.add(_PUT, end, src, message, lane=stream.lane, gates=stream.gates)

    def get(
        self, end: RingEnd, dst: int, message: Message, stream: Stream, op: ReduceOp | None = None,
        *, own: int | None = None, remote_first: bool = False,
    ) -> None:  # fmt: skip
        assert isinstance(stream, HostStream)
        kind, itemsize, combine = _GET, 1, 0
        if op is not None:
            dtype = BY_CODE[message.dtype]
            kind, itemsize, combine = _GET_REDUCE, dtype.itemsize, kit(dtype, op).pair
        reduction = itemsize, combine, remote_first, 0 if own is None else own - dst
        stream.batch.add(kind, end, dst, message, *reduction, lane=stream.lane, gates=stream.gates)

    def message_mover(self, end: RingEnd, op: int, recorder: int, communicator: int, stop: int) -> HostMessageMover:
        return HostMessageMover(end, op, recorder, communicator, stop, self._spins, self._process_memory)

    def recording(self, streams: int) -> Recording:
        batch = RecordedBatch(self._spins, self._process_memory)
        return Recording([HostStream(batch, lane, self._engine) for lane in range(streams)], batch.prepared)

    def reduce(
        self, dst: int, srcs: Sequence[int], count: int, dtype: DType, op: ReduceOp, stream: Stream, *, divisor: int = 0
    ) -> None:
        stream.synchronize()
        k = kit(dtype, op)
        numbers = (k.pair, k.first, k.more, k.last)
        table, scratch = np.array(srcs, np.int64), self._scratch.ctypes.data
        divisor = divisor if len(srcs) > 1 else 0
        finishes = finisher(dtype) if divisor else 0
        reduce_local(numbers, finishes, dst, table, len(srcs), count, dtype.itemsize, divisor, scratch)

    def scale(self, dst: int, src: int, count: int, dtype: DType, factor: float, divisor: int, stream: Stream) -> None:
        stream.synchronize()
        scale(scaler(dtype), dst, src, count, factor, divisor)

    def convert(
        self, dst: int, src: int, count: int, dtype: DType, factor: float, divisor: int, stream: Stream, *, widens: bool
    ) -> None:
        stream.synchronize()
        scale(widener(dtype) if widens else finisher(dtype), dst, src, count, factor, divisor)
