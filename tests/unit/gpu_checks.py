"""Checks of code that the CUDA and ROCm backends share; test_gpu_runtime.py runs each in a process with ROCM_PATH set."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from xvcomm.abc.device import Stream
from xvcomm.backends import rocm
from xvcomm.backends.gpu.device import GpuDevice
from xvcomm.backends.gpu.guard import told
from xvcomm.backends.gpu.vendor import VendorError
from xvcomm.config import Config
from xvcomm.errors import ArgumentError, ArrayError, ResourceError
from xvcomm.memory.ring import Message, Reason, RingEnd, RingLayout
from xvcomm.memory.segment import Segment
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import UINT8
from xvcomm.types.opcode import OpCode

SECONDS = 100.0  # the first use of a kernel compiles it
SMALL, BIG = 1000, 200_000
LAYOUT = RingLayout(2, 4, 4096)
CHECKS: dict[str, Callable[[], None]] = {}
Array = np.ndarray[Any, Any]


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Register a function as a check."""
    CHECKS[function.__name__] = function
    return function


def device(index: int = 0) -> GpuDevice:
    config = Config(device_index=index, kernel_cache=os.path.join(os.environ["ROCM_PATH"], "kernels"))
    made = rocm.RocmBackend().device(config)
    assert isinstance(made, GpuDevice)
    return made


def stream(of: GpuDevice) -> Stream:
    (made,) = of.streams(1)
    made.deadline = Deadline.after(SECONDS)
    return made


def message(nbytes: int, tag: int = 0) -> Message:
    return Message(OpCode.SEND, UINT8.code, nbytes, tag)


def up(of: GpuDevice, x: Array) -> Any:
    memory, on = of.empty(x.nbytes), stream(of)
    of.copy(memory.address, x.ctypes.data, x.nbytes, on)
    on.synchronize()
    return memory


def down(of: GpuDevice, memory: Any) -> Array:
    x, on = np.empty(memory.nbytes, np.uint8), stream(of)
    of.copy(x.ctypes.data, memory.address, x.nbytes, on)
    on.synchronize()
    return x


def bytes_of(seed: int, nbytes: int = SMALL) -> Array:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@contextlib.contextmanager
def ring() -> Iterator[tuple[RingEnd, RingEnd]]:
    """Both ends of a ring, as two ranks map them."""
    made = Segment.create("/dev/shm", "gpu", LAYOUT.size)
    producer = RingEnd.create(made, LAYOUT, peer=1, producer=True)
    consumer = RingEnd.open(Segment.attach("/dev/shm", made.name), peer=0, producer=False)
    made.unlink()
    try:
        yield producer, consumer
    finally:
        producer.close()
        consumer.close()


def counted(runtime: Any, name: str) -> list[Any]:
    """Results of one of the runtime's calls, from now on."""
    results: list[Any] = []
    call = getattr(runtime, name)

    def counting(*args: Any) -> Any:
        results.append(call(*args))
        return results[-1]

    setattr(runtime, name, counting)
    return results


@check
def calls() -> None:
    """The call table: memory, streams and events behave as documented, and errors have names."""
    from rocm.bindings import hip

    from xvcomm.backends.rocm.runtime import HipRuntime

    runtime = HipRuntime()
    assert (runtime.count(), runtime.current()) == (2, 0)
    assert runtime.architecture(0).startswith("gfx") and ":" not in runtime.architecture(0)
    assert runtime.bus(0) != runtime.bus(1)
    address = runtime.allocate(1000)
    assert (runtime.locate(address), runtime.locate(address + 999)) == (0, 0)
    one, event = runtime.stream(), runtime.event()
    source, target = (ctypes.create_string_buffer(16) for _ in range(2))
    source.value = b"hello"
    runtime.zero(address, 16, one)
    runtime.copy(address, ctypes.addressof(source), 5, one)
    runtime.copy(ctypes.addressof(target), address, 16, one)
    runtime.record(event, one)
    runtime.wait(one, event)
    assert hip.hipStreamSynchronize(one)[0] == 0
    assert runtime.reached(event) and not runtime.capture(one) and not runtime.capture(0)
    assert target.raw == b"hello" + bytes(11)
    runtime.free(address)
    assert runtime.locate(address) is None
    for call, name in ((lambda: runtime.allocate(1 << 60), "OutOfMemory"), (lambda: runtime.use(9), "InvalidDevice")):
        with pytest.raises(VendorError, match=f"hip[A-Z][a-zA-Z]+: hipError{name}"):
            call()
    with pytest.raises(VendorError, match=r"(?s)HIPRTC_ERROR_COMPILATION \(6\).*nowhere") as refused:
        runtime.compile("__global__ void f() { nowhere(); }", ["f"], "gfx942")
    assert isinstance(told(refused.value, "rocm", 0), ResourceError)


@check
def codes_that_hip_python_does_not_know() -> None:
    """Its enumerations raise ValueError for unknown codes of newer libraries; the error states the number."""
    from rocm.bindings import hiprtc, rccl

    from xvcomm.backends.rocm.library import RcclLibrary
    from xvcomm.backends.rocm.runtime import HipRuntime

    def answers(module: Any, name: str, codes: Any) -> Any:
        def call(*arguments: object) -> Any:
            return (codes(99),)

        return mock.patch.object(module, name, mock.Mock(call, __name__=name, side_effect=call))

    runtime, library = HipRuntime(), RcclLibrary()
    assert library.explain(99, 0).startswith("unknown error 99")
    assert library.explain(4, 0).startswith("ncclInvalidArgument (4): ")
    with answers(rccl, "ncclAllReduce", rccl.ncclResult_t), answers(rccl, "ncclGroupEnd", rccl.ncclResult_t):
        assert library.all_reduce(0, 0, 1, library.dtypes()["int8"], 0, 0, 0) == library.group_end() == 99
    for module, name, codes, ask in (
        (rccl, "ncclGetVersion", rccl.ncclResult_t, library.version),
        (hiprtc, "hiprtcCompileProgram", hiprtc.hiprtcResult, lambda: runtime.compile("", [], "gfx942")),
    ):
        with answers(module, name, codes), pytest.raises(VendorError, match=rf"{name}: unknown error \(99\)"):
            ask()


@check
def pinned_memory_is_seen_by_the_device() -> None:
    """As reported by the runtime: registering twice is an error, and afterwards the memory is not pinned."""
    from rocm.bindings import hip

    from xvcomm.backends.rocm.runtime import HipRuntime

    runtime, segment = HipRuntime(), Segment.create("/dev/shm", "gpu", 1 << 16)
    segment.unlink()
    seen = runtime.register(segment.address, segment.size)
    assert runtime.locate(segment.address) is None
    with pytest.raises(VendorError, match="AlreadyRegistered"):
        runtime.register(segment.address, segment.size)
    segment.view[:5] = b"there"
    copy, on = runtime.allocate(5), runtime.stream()
    runtime.copy(copy, seen, 5, on)
    back = ctypes.create_string_buffer(5)
    runtime.copy(ctypes.addressof(back), copy, 5, on)
    assert hip.hipStreamSynchronize(on)[0] == 0
    assert back.raw == b"there"
    runtime.unregister(segment.address)
    with pytest.raises(VendorError, match="NotRegistered"):
        runtime.unregister(segment.address)
    segment.close()


@check
def streams_of_other_people() -> None:
    """A handle of this device is accepted in every thread; others are rejected with a remedy."""
    gpu = device()
    runtime = gpu.runtime
    handle = runtime.stream()
    assert gpu.adopt(handle) is gpu.adopt(handle)
    seen: list[Stream] = []
    thread = threading.Thread(target=lambda: seen.append(gpu.adopt(handle)))
    thread.start()
    thread.join()
    assert seen[0] is not gpu.adopt(handle) and seen[0].handle == handle  # type: ignore[attr-defined]
    assert gpu.adopt(None).handle == 0
    for wrong in (1, 2, -1, 100):
        with pytest.raises(ArgumentError, match="is not a stream of rocm device 0; pass the result"):
            gpu.adopt(wrong)
    runtime.use(1)
    foreign = runtime.stream()
    runtime.use(0)
    with pytest.raises(ArgumentError, match=r"cannot be used on rocm device 0.*set XVCOMM_DEVICE_INDEX"):
        gpu.adopt(foreign)


@check
def arrays_of_other_people() -> None:
    """Memory of this device is accepted; freed memory, host memory and another device's memory are not."""
    gpu, other = device(), device(1)
    here, there = gpu.empty(100), other.empty(100)
    gpu.adopt(None, here.address, here.address + 99)
    with pytest.raises(ArrayError, match="is on rocm device 1 but this rank's device is rocm device 0"):
        gpu.adopt(None, here.address, there.address)
    freed = gpu.runtime.allocate(100)
    gpu.runtime.free(freed)
    for address in (freed, np.empty(100).ctypes.data):
        with pytest.raises(ArrayError, match="not in the memory of rocm device 0: it was freed"):
            gpu.adopt(None, address)


@check
def the_threads_device_stays() -> None:
    """A rank on device 1 leaves its threads' current device at 0 after every call, including errors."""
    gpu, data = device(1), bytes_of(1)
    assert gpu.capabilities().index == 1
    with ring() as (producer, consumer):
        source, target, on = up(gpu, data), gpu.empty(SMALL), stream(gpu)
        assert gpu.runtime.locate(source.address) == 1
        gpu.put(producer, source.address, message(SMALL), on)
        gpu.get(consumer, target.address, message(SMALL), stream(gpu))
        done = on.flush()
        done.result(SECONDS)
        assert (down(gpu, target) == data).all()
        with pytest.raises(ResourceError):
            gpu.empty(1 << 60)
        assert gpu.runtime.current() == 0
    assert gpu.runtime.current() == 0


@check
def memory_is_used_again() -> None:
    """But not before all work that was enqueued when it was returned has completed."""
    gpu, data = device(), bytes_of(2)
    allocated = counted(gpu.runtime, "allocate")
    with ring() as (producer, consumer):
        source = up(gpu, data)
        first, waiting = gpu.empty(1 << 20), stream(gpu)
        gpu.get(consumer, first.address, message(SMALL), waiting)
        address = first.address
        del first
        second = gpu.empty(1 << 20)
        assert second.address != address
        gpu.put(producer, source.address, message(SMALL), stream(gpu))
        waiting.synchronize()
        kept = [gpu.empty(1 << 20)]
        assert kept[0].address == address
        used_again = 0
        for _ in range(300):  # streams of a busy host reach their events late, so some rounds may take new memory
            count = len(allocated)
            kept.clear()
            kept.append(gpu.empty((1 << 20) - 5))
            stream(gpu).synchronize()
            used_again = used_again + 1 if len(allocated) == count else 0
            if used_again == 20:
                break
        assert used_again == 20, "memory that comes back is not used again"
    with pytest.raises(ResourceError, match=r"no 1125899906842624 bytes of device memory left"):
        gpu.empty(1 << 50)


@check
def events_and_streams_are_used_again() -> None:
    """Handles of released events and streams are reused."""
    gpu = device()
    events, streams = counted(gpu.runtime, "event"), counted(gpu.runtime, "stream")
    user = gpu.adopt(gpu.runtime.stream())
    for _ in range(300):
        one, other = gpu.streams(2)
        one.wait(user.record_event())
        other.wait(one.record_event())
        user.wait(other.record_event())
        del one, other
    user.deadline = Deadline.after(SECONDS)
    user.synchronize()
    assert len(events) <= 128 and not streams[1:], "to make a stream while kernels run may wait for them"


@check
def nothing_waits_for_another_of_what_starts_together() -> None:
    """Each side first sends two messages that exceed a ring, then receives two, in one group: no deadlock."""
    gpus = device(), device(1)
    data = [[bytes_of(10 * side + n, BIG) for n in range(2)] for side in range(2)]
    with ring() as there, ring() as back:
        ends = ((there[0], back[1]), (back[0], there[1]))
        sent = [[up(gpu, x) for x in data[side]] for side, gpu in enumerate(gpus)]
        got = [[gpu.empty(BIG) for _ in range(2)] for gpu in gpus]
        streams = [stream(gpu) for gpu in gpus]
        for side, gpu in enumerate(gpus):
            streams[side].together()
            for n in range(2):
                gpu.put(ends[side][0], sent[side][n].address, message(BIG, n), streams[side])
            for n in range(2):
                gpu.get(ends[side][1], got[side][n].address, message(BIG, n), streams[side])
            streams[side].record_event()
        for side, gpu in enumerate(gpus):
            streams[side].synchronize()
            for n in range(2):
                assert (down(gpu, got[side][n]) == data[1 - side][n]).all()


@check
def one_ring_on_two_streams() -> None:
    """Messages keep their order even if the first one's stream is blocked and the second one's is free."""
    gpu, first, second = device(), bytes_of(3), bytes_of(4)
    with ring() as (producer, consumer), ring() as (gate, gated):
        sent, got = [up(gpu, x) for x in (first, second)], [gpu.empty(SMALL) for _ in range(3)]
        held, free, receiving = (stream(gpu) for _ in range(3))
        gpu.get(gated, got[2].address, message(SMALL), held)
        gpu.put(producer, sent[0].address, message(SMALL, 1), held)
        gpu.put(producer, sent[1].address, message(SMALL, 2), free)
        for n in range(2):
            gpu.get(consumer, got[n].address, message(SMALL, n + 1), receiving)
        event = receiving.record_event()
        time.sleep(0.1)  # let what does not wait begin
        assert not receiving.reached(event)
        gpu.put(gate, sent[0].address, message(SMALL), stream(gpu))
        receiving.synchronize()
        assert receiving.reached(event)
        assert (down(gpu, got[0]) == first).all() and (down(gpu, got[1]) == second).all()


@contextlib.contextmanager
def captured(handle: int) -> Iterator[list[Any]]:
    """Capture a graph from a stream; what is appended to the list at the end launches it there."""
    from rocm.bindings import hip

    launches: list[Any] = []
    assert hip.hipStreamBeginCapture(handle, hip.hipStreamCaptureMode.hipStreamCaptureModeGlobal)[0] == 0
    yield launches
    code, graph = hip.hipStreamEndCapture(handle)
    assert code == 0
    executable = hip.hipGraphInstantiate(graph, 0)
    assert executable[0] == 0, executable
    launches.append(lambda: hip.hipGraphLaunch(executable[1], handle)[0])


@check
def graphs() -> None:
    """A transfer is captured, including internal streams, and each replay sends one message."""
    gpu, data = device(), bytes_of(5)
    with ring() as (producer, consumer):
        source, handle, receiving = up(gpu, data), gpu.runtime.stream(), stream(gpu)
        user, own = gpu.adopt(handle), stream(gpu)
        user.deadline = Deadline.after(SECONDS)
        with captured(handle):
            assert user.capturing() and not own.capturing()
            with pytest.raises(
                ArgumentError, match="rank 1 pins memory, which a graph cannot capture; run the operation once"
            ):
                gpu.put(producer, source.address, message(SMALL), user)
            with pytest.raises(ArgumentError, match="while a graph is captured"):
                user.enqueued()
                user.synchronize()
            assert user.flush().done()
        gpu.put(producer, source.address, message(SMALL), own)
        own.synchronize()
        with captured(handle) as launches:
            own.wait(user.record_event())
            gpu.put(producer, source.address, message(SMALL), own)
            event = own.record_event()
            assert own.reached(event)
            user.wait(event)
            gpu.put(producer, source.address, message(SMALL), user)
        assert producer.sequence == 1
        for _ in range(3):
            assert launches[0]() == 0
        gpu.put(producer, source.address, message(SMALL), user)
        targets = [gpu.empty(SMALL) for _ in range(8)]
        for target in targets:
            gpu.get(consumer, target.address, message(SMALL), receiving)
        receiving.synchronize()
        user.synchronize()
        assert all((down(gpu, target) == data).all() for target in targets)
        gpu.put(producer, source.address, message(SMALL), own)
        assert (producer.sequence, consumer.sequence) == (9, 8)
        own.synchronize()


@check
def closing_unpins() -> None:
    """Also while a kernel waits in the ring: it exits, and the device stays usable."""
    gpu, data = device(), bytes_of(6)
    pinned, unpinned = counted(gpu.runtime, "register"), counted(gpu.runtime, "unregister")
    waiting, target = stream(gpu), gpu.empty(SMALL)
    begin = time.monotonic()
    with ring() as (_, consumer):
        gpu.get(consumer, target.address, message(SMALL), waiting)
    assert time.monotonic() - begin < SECONDS / 2
    assert (len(pinned), len(unpinned)) == (1, 1)
    waiting.discard()
    with ring() as (producer, consumer):
        source = up(gpu, data)
        gpu.get(consumer, target.address, message(SMALL), waiting)
        gpu.put(producer, source.address, message(SMALL), stream(gpu))
        waiting.synchronize()
        assert (down(gpu, target) == data).all()
    assert (len(pinned), len(unpinned)) == (3, 3)


@check
def what_was_given_up_stops_its_ring() -> None:
    """After a short time, so that a caller that knows the reason can report it first."""
    gpu = device()
    for first, word in ((0, Reason.ABORTED.word(0)), (Reason.DEADLINE.word(7), Reason.DEADLINE.word(7))):
        with ring() as (_, consumer):
            on, target = stream(gpu), gpu.empty(SMALL)
            gpu.get(consumer, target.address, message(SMALL), on)
            event = on.record_event()
            on.discard()
            assert not consumer.abort_word()
            if first:
                consumer.abort(first)
            deadline = Deadline.after(SECONDS)
            while not on.reached(event) and not deadline.expired():
                time.sleep(0.01)
            assert on.reached(event) and consumer.abort_word() == word
            assert consumer.finished() == (0, False)


@check
def no_device() -> None:
    """The reason and the remedy if there are no devices; the parent process hides them."""
    reason, remedy = rocm.RocmBackend().refusal() or ("", "")
    assert reason == "no AMD GPU is visible" and "HIP_VISIBLE_DEVICES" in remedy


if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
