"""Checks of this folder's libamdhip64.so and libhiprtc.so through hip-python: `python hip_checks.py NAME`."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
from rocm.bindings import hip, hiprtc

DEFAULT, TO_DEVICE, TO_HOST = (hip.hipMemcpyKind(kind) for kind in (4, 1, 2))
SOURCE = """
#include <sched.h>

struct Fill { unsigned *to; int count, value; };

__global__ void hold(const unsigned *flag) {
    while (!__atomic_load_n(flag, __ATOMIC_ACQUIRE)) sched_yield();
}
__global__ void raise(unsigned *flag) { __atomic_store_n(flag, 1, __ATOMIC_RELEASE); }
template <int factor> __global__ void fill(Fill f, int more) {
    for (int i = blockIdx.x; i < f.count; i += gridDim.x) f.to[i] = f.value * factor + more;
}
__global__ void meet(unsigned *arrived, unsigned *seen) {
    __shared__ unsigned own;
    own = blockIdx.x;
    __atomic_add_fetch(arrived, 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(arrived, __ATOMIC_ACQUIRE) < gridDim.x) sched_yield();
    seen[blockIdx.x] = own + threadIdx.x * blockDim.x;
}
"""
NAMES = ("hold", "raise", "fill<3>", "meet")


class Fill(ctypes.Structure):
    """Argument struct of the kernel in SOURCE."""

    _fields_ = (("to", ctypes.c_void_p), ("count", ctypes.c_int), ("value", ctypes.c_int))


def ok(answer: tuple[Any, ...]) -> Any:
    """The values of a hip-python result; AssertionError if its code is not success."""
    code, *values = answer
    assert int(code) == 0, code
    return values[0] if len(values) == 1 else values


def code(answer: tuple[Any, ...]) -> str:
    """The name of a result's code without its prefix."""
    return str(answer[0].name).removeprefix("hipError").removeprefix("HIPRTC_ERROR_")


def compile_source(source: str, names: tuple[str, ...], *options: bytes) -> tuple[str, str, Any]:
    """The result's name, the log and the program."""
    program = ok(hiprtc.hiprtcCreateProgram(source.encode(), b"test.cu", 0, None, None))
    for name in names:
        ok(hiprtc.hiprtcAddNameExpression(program, name.encode()))
    result = code(hiprtc.hiprtcCompileProgram(program, len(options), list(options)))
    log = bytearray(ok(hiprtc.hiprtcGetProgramLogSize(program)))
    ok(hiprtc.hiprtcGetProgramLog(program, log))
    return result, log.rstrip(b"\0").decode(), program


class Kernels:
    """The kernels of SOURCE on the current device."""

    def __init__(self) -> None:
        result, log, program = compile_source(SOURCE, NAMES, b"--offload-arch=gfx90a", b"-std=c++17", b"-O3")
        assert result == "HIPRTC_SUCCESS", log
        image = bytearray(ok(hiprtc.hiprtcGetCodeSize(program)))
        ok(hiprtc.hiprtcGetCode(program, image))
        module = ok(hip.hipModuleLoadData(bytes(image)))
        self.functions = {}
        for name in NAMES:
            lowered = ok(hiprtc.hiprtcGetLoweredName(program, name.encode()))
            self.functions[name] = ok(hip.hipModuleGetFunction(module, bytes(lowered)))
        ok(hiprtc.hiprtcDestroyProgram(program.createRef()))

    def launch(
        self, name: str, stream: Any, *args: Any, blocks: int = 1, threads: int = 64, shared: int = 0
    ) -> tuple[Any, ...]:
        """Launch a kernel; the arguments may be freed before it runs."""
        held = [ctypes.c_void_p(int(arg)) if not isinstance(arg, ctypes._SimpleCData | Fill) else arg for arg in args]
        params = (ctypes.c_void_p * len(held))(*(ctypes.addressof(arg) for arg in held))
        where = ctypes.addressof(params)
        done = hip.hipModuleLaunchKernel(self.functions[name], blocks, 1, 1, threads, 1, 1, shared, stream, where, None)
        for arg in held:
            ctypes.memset(ctypes.addressof(arg), 0xFF, ctypes.sizeof(arg))
        return tuple(done)


class Pinned:
    """Registered shared memory; `host` and `device` are its addresses, `words` the host's view."""

    def __init__(self, nbytes: int = 8192, offset: int = 64) -> None:
        self._memory = mmap.mmap(-1, nbytes + offset)
        self.host = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + offset
        ok(hip.hipHostRegister(self.host, nbytes, 0))
        self.device = int(ok(hip.hipHostGetDevicePointer(self.host, 0)))
        self.words = np.frombuffer(self._memory, np.uint32, nbytes // 4, offset)


def stream() -> Any:
    """A stream that does not synchronise with the default stream."""
    return ok(hip.hipStreamCreateWithPriority(hip.hipStreamNonBlocking, -1000))


def download(address: Any, count: int) -> Any:
    """Read words from device memory."""
    found = np.empty(count, np.uint32)
    ok(hip.hipMemcpy(found.ctypes.data, address, found.nbytes, TO_HOST))
    return found


def devices() -> None:
    """Properties, one current device a thread, error codes."""
    assert ok(hip.hipGetDeviceCount()) == 2
    found = ok(hip.hipGetDeviceProperties(1))
    assert found.gcnArchName == "gfx942:sramecc+:xnack-", found.gcnArchName
    attribute = hip.hipDeviceAttribute_t.hipDeviceAttributeMultiprocessorCount
    assert ok(hip.hipDeviceGetAttribute(attribute, 1)) == found.multiProcessorCount > 0
    assert found.pciBusID == 2 and found.warpSize == 64 and found.sharedMemPerBlock == 65536
    ok(hip.hipSetDevice(1))
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(ok(hip.hipGetDevice())))
    thread.start()
    thread.join()
    assert (seen, ok(hip.hipGetDevice())) == ([0], 1)
    assert ok(hip.hipPointerGetAttributes(ok(hip.hipMalloc(8)))).device == 1
    least, most = ok(hip.hipDeviceGetStreamPriorityRange())
    assert ok(hip.hipStreamGetPriority(stream())) == most < least
    assert code(hip.hipSetDevice(2)) == "InvalidDevice"
    assert code(hip.hipGetLastError()) == "InvalidDevice"
    ok(hip.hipGetLastError())


def no_devices() -> None:
    """Results on a machine without a GPU."""
    for answer in (hip.hipGetDeviceCount(), hip.hipMalloc(8), hip.hipSetDevice(0), hip.hipStreamCreate()):
        assert code(answer) == "NoDevice", answer
    assert bytes(hip.hipGetErrorString(hip.hipError_t.hipErrorNoDevice)[1]) == b"no ROCm-capable device is detected"


def memory() -> None:
    """Pointer queries find allocations until they are freed; copies work in every direction."""
    device, host = int(ok(hip.hipMalloc(1000))), np.arange(250, dtype=np.uint32)
    assert device % 256 == 0
    assert (download(device, 250) == 0xA5A5A5A5).all()
    for source in (host, host * 2):
        ok(hip.hipMemcpy(device, source.ctypes.data, 1000, TO_DEVICE if source is host else DEFAULT))
        assert np.array_equal(download(device, 250), source)
    kind = hip.hipMemoryType
    assert ok(hip.hipPointerGetAttributes(device + 999)).type == kind.hipMemoryTypeDevice
    assert ok(hip.hipPointerGetAttributes(device + 1000)).type == kind.hipMemoryTypeUnregistered
    assert ok(hip.hipPointerGetAttributes(host.ctypes.data)).type == kind.hipMemoryTypeUnregistered
    assert code(hip.hipMemcpy(host.ctypes.data, device, 1000, TO_DEVICE)) == "InvalidMemcpyDirection"
    assert code(hip.hipMemset(device + 8, 0, 1000)) == "InvalidValue"
    assert code(hip.hipMemset(host.ctypes.data, 0, 8)) == "InvalidValue"
    assert code(hip.hipFree(device + 256)) == "InvalidValue"
    ok(hip.hipFree(device))
    assert ok(hip.hipPointerGetAttributes(device)).type == kind.hipMemoryTypeUnregistered
    assert code(hip.hipFree(device)) == "InvalidValue"
    assert code(hip.hipMalloc(1 << 50)) == "OutOfMemory"


def pinned() -> None:
    """Registered memory is one memory with two addresses."""
    memory, kernels = Pinned(), Kernels()
    assert memory.device != memory.host
    assert int(ok(hip.hipHostGetDevicePointer(memory.host + 100, 0))) == memory.device + 100
    for address in (memory.host + 8, memory.device + 8):
        found = ok(hip.hipPointerGetAttributes(address))
        assert found.type == hip.hipMemoryType.hipMemoryTypeHost
        assert (int(found.hostPointer), int(found.devicePointer)) == (memory.host + 8, memory.device + 8)
    ok(kernels.launch("fill<3>", None, Fill(memory.device, 100, 5), ctypes.c_int(1)))
    ok(hip.hipDeviceSynchronize())
    assert (memory.words[:100] == 16).all() and not memory.words[100:].any()
    assert code(kernels.launch("fill<3>", None, Fill(memory.host, 100, 5), ctypes.c_int(1))) == "IllegalAddress"
    assert code(hip.hipHostRegister(memory.host + 64, 64, 0)) == "HostMemoryAlreadyRegistered"
    ok(hip.hipHostUnregister(memory.host))
    assert code(hip.hipHostUnregister(memory.host)) == "HostMemoryNotRegistered"
    assert code(hip.hipHostGetDevicePointer(memory.host, 0)) == "InvalidValue"


def touch_device_memory() -> None:
    """Crashes: only a kernel may access device memory, not the host before or after it."""
    kernels, device = Kernels(), int(ok(hip.hipMalloc(4)))
    ok(kernels.launch("fill<3>", None, Fill(device, 1, 5), ctypes.c_int(0)))
    assert download(device, 1) == 15
    print("alive", flush=True)
    ctypes.string_at(device, 4)


def touch_pinned_memory() -> None:
    """Crashes: the device address of pinned memory differs from the host address."""
    memory = Pinned()
    ctypes.string_at(memory.host, 4)
    print("alive", flush=True)
    ctypes.string_at(memory.device, 4)


def run_past_the_end() -> None:
    """Crashes: a kernel writes beyond an allocation."""
    kernels, device = Kernels(), int(ok(hip.hipMalloc(1024)))
    ok(kernels.launch("fill<3>", None, Fill(device, 256, 5), ctypes.c_int(0)))
    assert (download(device, 256) == 15).all()
    print("alive", flush=True)
    ok(kernels.launch("fill<3>", None, Fill(device, 257, 5), ctypes.c_int(0)))
    ok(hip.hipDeviceSynchronize())


def order() -> None:
    """A stream runs in order; other streams only wait for it on request; arguments are copied at launch."""
    kernels, flag, device = Kernels(), Pinned(), int(ok(hip.hipMalloc(400)))
    first, after, free = stream(), stream(), stream()
    before, event = (ok(hip.hipEventCreateWithFlags(hip.hipEventDisableTiming)) for _ in range(2))
    ok(hip.hipEventRecord(before, first))
    ok(kernels.launch("hold", first, flag.device))
    ok(kernels.launch("fill<3>", first, Fill(device, 100, 5), ctypes.c_int(2)))
    ok(hip.hipEventRecord(event, first))
    ok(hip.hipStreamWaitEvent(after, event, 0))
    found = Pinned()
    ok(hip.hipMemcpyAsync(found.host, device, 400, TO_HOST, after))
    ok(hip.hipMemsetAsync(device, 0, 400, free))
    ok(hip.hipStreamSynchronize(free))
    ok(hip.hipEventSynchronize(before))
    for answer in (hip.hipEventQuery(event), hip.hipStreamQuery(first), hip.hipStreamQuery(after)):
        assert code(answer) == "NotReady", answer
    flag.words[0] = 1
    ok(hip.hipStreamSynchronize(after))
    ok(hip.hipEventQuery(event))
    ok(hip.hipStreamQuery(first))
    assert (found.words[:100] == 17).all()
    ok(hip.hipStreamDestroy(first))
    assert code(hip.hipStreamQuery(first)) == "InvalidHandle"
    ok(hip.hipSetDevice(1))
    assert code(hip.hipEventRecord(ok(hip.hipEventCreate()), after)) == "InvalidHandle"


def default_stream() -> None:
    """Blocking streams synchronise with the default stream, non-blocking ones do not."""
    kernels, flag = Kernels(), Pinned()
    blocking, free = ok(hip.hipStreamCreateWithFlags(hip.hipStreamDefault)), stream()
    ok(kernels.launch("hold", None, flag.device))
    ok(hip.hipMemsetAsync(flag.device + 8, 1, 4, blocking))
    ok(hip.hipMemsetAsync(flag.device + 12, 1, 4, free))
    ok(hip.hipStreamSynchronize(free))
    assert code(hip.hipStreamQuery(blocking)) == "NotReady"
    assert list(flag.words[:4]) == [0, 0, 0, 0x01010101]
    flag.words[0] = 1
    ok(hip.hipStreamSynchronize(blocking))
    assert flag.words[2] == 0x01010101


def delay() -> None:
    """With HIPHOST_DELAY_US, a stream runs one second late."""
    device, behind = ok(hip.hipMalloc(4)), stream()
    ok(hip.hipMemsetAsync(device, 7, 4, behind))
    assert code(hip.hipStreamQuery(behind)) == "NotReady"
    ok(hip.hipStreamSynchronize(behind))
    ok(hip.hipStreamQuery(behind))


def one_queue() -> None:
    """With GPU_MAX_HW_QUEUES=1, an operation that waits in one stream blocks all streams."""
    kernels, flags = Kernels(), [Pinned(), Pinned()]
    busy, after, free = stream(), stream(), stream()
    event = ok(hip.hipEventCreate())

    def behind() -> None:
        ok(hip.hipMemsetAsync(flags[0].device + 8, 1, 4, busy))

    def waits() -> None:
        ok(hip.hipEventRecord(event, busy))
        ok(hip.hipStreamWaitEvent(after, event, 0))

    for flag, holds_up in zip(flags, (behind, waits), strict=True):
        ok(kernels.launch("hold", busy, flag.device))
        ok(hip.hipMemsetAsync(flag.device + 12, 1, 4, free))
        ok(hip.hipStreamSynchronize(free))
        holds_up()
        ok(hip.hipMemsetAsync(flag.device + 16, 1, 4, free))
        time.sleep(0.1)
        assert code(hip.hipStreamQuery(free)) == "NotReady"
        flag.words[0] = 1
        ok(hip.hipStreamSynchronize(free))
    ok(hip.hipStreamSynchronize(after))


def blocks() -> None:
    """Blocks of a launch run concurrently; those that do not fit run afterwards; limits are enforced."""
    kernels, device = Kernels(), int(ok(hip.hipMalloc(4 * 500)))
    on = stream()
    for _ in range(3):
        ok(hip.hipMemsetAsync(device, 0, 400, on))
        ok(kernels.launch("meet", on, device, device + 4, blocks=60, threads=256))
    ok(hip.hipStreamSynchronize(on))
    assert np.array_equal(download(device, 61), [60, *range(60)])
    ok(kernels.launch("fill<3>", on, Fill(device, 500, 1), ctypes.c_int(0), blocks=500))
    ok(hip.hipStreamSynchronize(on))
    assert (download(device, 500) == 3).all()
    assert code(kernels.launch("meet", on, device, device, threads=1025)) == "InvalidValue"
    assert code(kernels.launch("meet", on, device, device, shared=65537)) == "InvalidValue"
    shared = hip.hipFuncAttribute.hipFuncAttributeMaxDynamicSharedMemorySize
    ok(hip.hipFuncSetAttribute(kernels.functions["meet"], shared, 1024))
    assert code(kernels.launch("meet", on, device, device, shared=1025)) == "InvalidValue"
    ok(hip.hipSetDevice(1))
    assert code(kernels.launch("meet", stream(), device, device)) == "InvalidHandle"


def compiler() -> None:
    """Compile errors contain the compiler's message and the line numbers of the source."""
    result, log, program = compile_source("\n__global__ void f() { return 1; }\n", ("f",))
    assert (result, "test.cu:2:" in log, "return-statement with a value" in log) == ("COMPILATION", True, True), log
    assert code(hiprtc.hiprtcGetCodeSize(program)) == "INVALID_PROGRAM"
    assert code(hiprtc.hiprtcGetLoweredName(program, b"f")) == "NO_LOWERED_NAMES_BEFORE_COMPILATION"
    result, log, _ = compile_source("__global__ void f() {}", ("g",))
    assert (result, "name expressions:1:" in log, "g" in log) == ("COMPILATION", True, True), log
    assert compile_source("", (), b"unknown")[0] == "INVALID_OPTION"
    result, log, program = compile_source("__global__ void f() {}\n#ifndef MARK\n#error\n#endif", ("f",), b"-DMARK")
    assert (result, log) == ("HIPRTC_SUCCESS", "")
    assert code(hiprtc.hiprtcGetLoweredName(program, b"g")) == "NAME_EXPRESSION_NOT_VALID"
    assert code(hip.hipModuleLoadData(b"no image" * 10)) == "InvalidImage"


def graph() -> None:
    """A capture executes nothing; a graph runs its branches concurrently, each time that it is launched."""
    kernels, flag = Kernels(), Pinned()
    origin, branch = stream(), stream()
    forked, joined = (ok(hip.hipEventCreateWithFlags(hip.hipEventDisableTiming)) for _ in range(2))
    ok(hip.hipStreamBeginCapture(origin, hip.hipStreamCaptureMode.hipStreamCaptureModeGlobal))
    ok(hip.hipEventRecord(forked, origin))
    ok(hip.hipStreamWaitEvent(branch, forked, 0))
    ok(kernels.launch("hold", origin, flag.device))
    ok(hip.hipMemsetAsync(flag.device + 4, 1, 4, origin))
    ok(kernels.launch("raise", branch, flag.device))
    assert [int(ok(hip.hipStreamIsCapturing(each))) for each in (origin, branch, None)] == [1, 1, 0]
    ok(hip.hipEventRecord(joined, branch))
    ok(hip.hipStreamWaitEvent(origin, joined, 0))
    captured = ok(hip.hipStreamEndCapture(origin))
    assert not flag.words.any()
    assert int(ok(hip.hipStreamIsCapturing(branch))) == 0
    run = ok(hip.hipGraphInstantiate(captured, 0))[0]
    ok(hip.hipGraphDestroy(captured))
    for _ in range(3):
        flag.words[:] = 0
        ok(hip.hipGraphLaunch(run, origin))
        ok(hip.hipStreamSynchronize(origin))
        assert list(flag.words[:3]) == [1, 0x01010101, 0]
    ok(hip.hipGraphExecDestroy(run))


def bad_captures() -> None:
    """Operations that a capture rejects, and operations that invalidate it."""
    origin, other = stream(), stream()
    event = ok(hip.hipEventCreateWithFlags(hip.hipEventDisableTiming))
    modes = hip.hipStreamCaptureMode

    # hip-python hands over a mode of its own making.
    exchange = ctypes.CDLL(os.environ["ROCM_PATH"] + "/lib/libamdhip64.so").hipThreadExchangeStreamCaptureMode

    def query(mode: int) -> str:
        answers: list[str] = []

        def ask() -> None:
            assert exchange(ctypes.byref(ctypes.c_int(mode))) == 0
            answers.append(code(hip.hipStreamQuery(other)))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return answers[0]

    ok(hip.hipEventRecord(event, origin))
    for answer in (
        lambda: hip.hipStreamSynchronize(origin),
        lambda: hip.hipMalloc(8),
        lambda: hip.hipEventQuery(event),
    ):
        ok(hip.hipStreamBeginCapture(origin, modes.hipStreamCaptureModeThreadLocal))
        assert code(answer()) in ("StreamCaptureUnsupported", "CapturedEvent")
        assert ok(hip.hipStreamIsCapturing(origin)) == hip.hipStreamCaptureStatus.hipStreamCaptureStatusInvalidated
        assert code(hip.hipStreamEndCapture(origin)) == "StreamCaptureInvalidated"
    ok(hip.hipStreamBeginCapture(origin, modes.hipStreamCaptureModeGlobal))
    assert query(modes.hipStreamCaptureModeRelaxed) == "hipSuccess"
    ok(hip.hipStreamEndCapture(origin))
    ok(hip.hipStreamBeginCapture(origin, modes.hipStreamCaptureModeGlobal))
    assert query(modes.hipStreamCaptureModeGlobal) == "StreamCaptureUnsupported"
    assert code(hip.hipStreamEndCapture(origin)) == "StreamCaptureInvalidated"
    ok(hip.hipStreamBeginCapture(origin, modes.hipStreamCaptureModeThreadLocal))
    assert query(modes.hipStreamCaptureModeGlobal) == "hipSuccess"
    ok(hip.hipEventRecord(event, origin))
    ok(hip.hipStreamWaitEvent(other, event, 0))
    assert code(hip.hipStreamEndCapture(other)) == "StreamCaptureUnmatched"
    assert code(hip.hipStreamEndCapture(origin)) == "StreamCaptureUnjoined"
    for answer in (hip.hipStreamWaitEvent(other, event, 0), hip.hipEventQuery(event)):
        assert code(answer) == "CapturedEvent"
    ok(hip.hipEventRecord(event, other))
    ok(hip.hipStreamBeginCapture(origin, modes.hipStreamCaptureModeRelaxed))
    assert code(hip.hipStreamWaitEvent(origin, event, 0)) == "StreamCaptureIsolation"
    ok(hip.hipStreamEndCapture(origin))


def peers() -> None:
    """Another process accesses memory through its IPC handle, which ends with the memory; a device is not its own peer."""
    assert [ok(hip.hipDeviceCanAccessPeer(0, other)) for other in (0, 1)] == [0, 1]
    assert code(hip.hipDeviceCanAccessPeer(0, 2)) == "InvalidDevice"
    assert code(hip.hipExtMallocWithFlags(8, 4)) == "InvalidValue"
    address = int(ok(hip.hipExtMallocWithFlags(10_000, 3)))
    ok(hip.hipMemset(address, 7, 10_000))
    handle = ok(hip.hipIpcGetMemHandle(address))
    assert code(hip.hipIpcGetMemHandle(address + 256)) == "InvalidValue"
    assert code(hip.hipIpcOpenMemHandle(handle, 1)) == "InvalidValue"
    assert code(hip.hipIpcCloseMemHandle(address)) == "InvalidHandle"
    command, raw = [sys.executable, __file__, "map_memory"], ctypes.string_at(int(handle), 64)
    assert subprocess.run(command, input=raw, check=True, capture_output=True).stdout == b"\x07" * 10_000
    seen = np.zeros(10_000, np.uint8)
    ok(hip.hipMemcpy(seen, address, 10_000, TO_HOST))
    assert (seen == 9).all()
    ok(hip.hipFree(address))
    assert subprocess.run(command, input=raw, check=True, capture_output=True).stdout == b"InvalidHandle"


def map_memory() -> None:
    """Read and overwrite the memory of the given handle; the second process of `peers`."""
    handle = hip.hipIpcMemHandle_t()
    ctypes.memmove(int(handle), sys.stdin.buffer.read(64), 64)
    found = hip.hipIpcOpenMemHandle(handle, 1)
    if code(found) == "InvalidHandle":
        sys.stdout.write(code(found))
        return
    address, seen = int(ok(found)), np.zeros(10_000, np.uint8)
    ok(hip.hipMemcpy(seen, address, 10_000, TO_HOST))
    ok(hip.hipMemset(address, 9, 10_000))
    sys.stdout.buffer.write(seen.tobytes())
    assert code(hip.hipFree(address)) == "InvalidValue"
    ok(hip.hipIpcCloseMemHandle(address))
    assert code(hip.hipMemset(address, 9, 1)) == "InvalidValue"


if __name__ == "__main__":
    globals()[sys.argv[1]]()
