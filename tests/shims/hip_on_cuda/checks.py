"""Checks of hip-python over the forwarding libraries, one check per process: `python checks.py NAME`."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
from typing import Any

import numpy as np
from rocm.bindings import hip, hiprtc, rccl

MIB = 1 << 20
KINDS = hip.hipMemcpyKind
SOURCE = b"""
#include <hip/hip_runtime.h>
template <typename T> __global__ void add(T* x, int n, T what) {
    extern __shared__ char pool[];
    T* kept = (T*)pool;
    kept[threadIdx.x + SKIP] = what;
    __syncthreads();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += kept[threadIdx.x + SKIP];
}
"""


def ok(answer: tuple[Any, ...]) -> Any:
    """The values of a hip-python result; AssertionError if its code is not success."""
    code, *values = answer
    assert int(code) == 0, code
    return values[0] if len(values) == 1 else values


def devices() -> None:
    """Number, properties, attributes and error codes."""
    count = ok(hip.hipGetDeviceCount())
    assert count > 0
    found = ok(hip.hipGetDeviceProperties(0))
    assert found.gcnArchName == f"sm_{found.major}{found.minor}", found.gcnArchName
    assert found.name and found.totalGlobalMem > MIB and found.warpSize == 32
    attributes = hip.hipDeviceAttribute_t
    processors = ok(hip.hipDeviceGetAttribute(attributes.hipDeviceAttributeMultiprocessorCount, 0))
    assert processors == found.multiProcessorCount > 0
    least, most = ok(hip.hipDeviceGetStreamPriorityRange())
    assert most <= least
    assert hip.hipSetDevice(count)[0] == hip.hipError_t.hipErrorInvalidDevice
    assert hip.hipMalloc(1 << 60)[0] == hip.hipError_t.hipErrorOutOfMemory
    hip.hipGetLastError()


def memory_and_streams() -> None:
    """Allocations, pinned host memory, attributes of pointers, copies in order, events."""
    ok(hip.hipSetDevice(0))
    device, host = int(ok(hip.hipMalloc(MIB))), np.arange(MIB // 4, dtype=np.int32)
    assert ok(hip.hipPointerGetAttributes(device + 64)).type == hip.hipMemoryType.hipMemoryTypeDevice
    assert ok(hip.hipPointerGetAttributes(host.ctypes.data)).type == hip.hipMemoryType.hipMemoryTypeUnregistered
    ok(hip.hipHostRegister(host.ctypes.data, host.nbytes, hip.hipHostRegisterPortable | hip.hipHostRegisterMapped))
    assert ok(hip.hipPointerGetAttributes(host.ctypes.data)).type == hip.hipMemoryType.hipMemoryTypeHost
    seen = int(ok(hip.hipHostGetDevicePointer(host.ctypes.data, 0)))
    _, most = ok(hip.hipDeviceGetStreamPriorityRange())
    stream, other = (ok(hip.hipStreamCreateWithPriority(hip.hipStreamNonBlocking, most)) for _ in range(2))
    event = ok(hip.hipEventCreateWithFlags(hip.hipEventDisableTiming))
    back = np.zeros_like(host)
    ok(hip.hipMemcpyAsync(device, seen, MIB, KINDS.hipMemcpyDefault, stream))
    ok(hip.hipEventRecord(event, stream))
    ok(hip.hipStreamWaitEvent(other, event, 0))
    ok(hip.hipMemcpyAsync(back.ctypes.data, device, MIB, KINDS.hipMemcpyDefault, other))
    ok(hip.hipStreamSynchronize(other))
    assert hip.hipEventQuery(event)[0] == hip.hipError_t.hipSuccess
    assert np.array_equal(back, host)
    ok(hip.hipMemsetAsync(device, 0, MIB, stream))
    ok(hip.hipMemcpyAsync(back.ctypes.data, device, MIB, KINDS.hipMemcpyDeviceToHost, stream))
    ok(hip.hipStreamSynchronize(stream))
    assert not back.any()
    ok(hip.hipHostUnregister(host.ctypes.data))
    ok(hip.hipFree(device))
    assert ok(hip.hipPointerGetAttributes(device)).type == hip.hipMemoryType.hipMemoryTypeUnregistered
    for each in (stream, other):
        ok(hip.hipStreamDestroy(each))


def compiled(architecture: str, skip: int) -> tuple[bytes, bytes]:
    """The image of `SOURCE` and the kernel's lowered name."""
    program = ok(hiprtc.hiprtcCreateProgram(SOURCE, b"add.cu", 0, None, None))
    ok(hiprtc.hiprtcAddNameExpression(program, b"add<float>"))
    options = [
        f"--offload-arch={architecture}".encode(),
        b"-O3",
        b"-std=c++17",
        b"-DSKIP=%d" % skip,
        b"-ffp-contract=off",
    ]
    result = hiprtc.hiprtcCompileProgram(program, len(options), options)
    log = bytearray(ok(hiprtc.hiprtcGetProgramLogSize(program)))
    ok(hiprtc.hiprtcGetProgramLog(program, log))
    assert int(result[0]) == 0, log.decode()
    code = bytearray(ok(hiprtc.hiprtcGetCodeSize(program)))
    ok(hiprtc.hiprtcGetCode(program, code))
    return bytes(code), bytes(ok(hiprtc.hiprtcGetLoweredName(program, b"add<float>")))


def kernels_and_graphs() -> None:
    """A template compiled for the device, launched with much shared memory, and replayed by a graph."""
    ok(hip.hipSetDevice(0))
    for architecture in (ok(hip.hipGetDeviceProperties(0)).gcnArchName, "gfx90a"):
        image, name = compiled(architecture, 16000)
    function = ok(hip.hipModuleGetFunction(ok(hip.hipModuleLoadData(image)), name))
    stream = ok(hip.hipStreamCreateWithFlags(hip.hipStreamNonBlocking))
    n, device = 1000, int(ok(hip.hipMalloc(4000)))
    values = (ctypes.c_void_p(device), ctypes.c_int(n), ctypes.c_float(2.5))
    arguments = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))

    def launch() -> None:
        ok(hip.hipModuleLaunchKernel(function, 8, 1, 1, 128, 1, 1, 65536, stream, ctypes.addressof(arguments), None))

    ok(hip.hipMemsetAsync(device, 0, 4 * n, stream))
    launch()
    assert ok(hip.hipStreamIsCapturing(stream)) == hip.hipStreamCaptureStatus.hipStreamCaptureStatusNone
    ok(hip.hipStreamBeginCapture(stream, hip.hipStreamCaptureMode.hipStreamCaptureModeThreadLocal))
    assert ok(hip.hipStreamIsCapturing(stream)) == hip.hipStreamCaptureStatus.hipStreamCaptureStatusActive
    launch()
    graph = ok(hip.hipStreamEndCapture(stream))
    runnable, _, _ = ok(hip.hipGraphInstantiate(graph, 0))
    for _ in range(2):
        ok(hip.hipGraphLaunch(runnable, stream))
    back = np.zeros(n, np.float32)
    ok(hip.hipMemcpyAsync(back.ctypes.data, device, 4 * n, KINDS.hipMemcpyDeviceToHost, stream))
    ok(hip.hipStreamSynchronize(stream))
    assert (back == 7.5).all(), back


def collectives() -> None:
    """RCCL's calls over two devices, or over one if there is only one."""
    size = min(2, ok(hip.hipGetDeviceCount()))
    context = multiprocessing.get_context("spawn")
    identities = [context.Queue() for _ in range(size)]
    ranks = [context.Process(target=_collective_rank, args=(rank, identities)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * size


def _collective_rank(rank: int, identities: list[Any]) -> None:
    size, n = len(identities), MIB // 4
    ok(hip.hipSetDevice(rank))
    if rank == 0:
        made = ok(rccl.ncclGetUniqueId()).internal
        for each in identities:
            each.put(bytes(made))
    comm = ok(rccl.ncclCommInitRank(size, identities[rank].get(), rank))
    stream = ok(hip.hipStreamCreateWithFlags(hip.hipStreamNonBlocking))
    src, dst = (int(ok(hip.hipMalloc(MIB))) for _ in range(2))
    mine, got = np.full(n, rank + 1, np.float32), np.zeros(n, np.float32)
    ok(hip.hipMemcpyAsync(src, mine.ctypes.data, MIB, KINDS.hipMemcpyHostToDevice, stream))
    kind, add = rccl.ncclDataType_t.ncclFloat32, rccl.ncclRedOp_t.ncclSum

    def result() -> float:
        ok(hip.hipMemcpyAsync(got.ctypes.data, dst, MIB, KINDS.hipMemcpyDeviceToHost, stream))
        ok(hip.hipStreamSynchronize(stream))
        assert (got == got[0]).all()
        return float(got[0])

    ok(rccl.ncclAllReduce(src, dst, n, kind, add, comm, stream))
    assert result() == size * (size + 1) / 2
    ok(rccl.ncclGroupStart())
    ok(rccl.ncclSend(src, n, kind, (rank + 1) % size, comm, stream))
    ok(rccl.ncclRecv(dst, n, kind, (rank - 1) % size, comm, stream))
    ok(rccl.ncclGroupEnd())
    assert result() == (rank - 1) % size + 1
    ok(rccl.ncclCommDestroy(comm))


def torch_says_rocm() -> None:
    """A tensor of CUDA's torch presents itself as a ROCm tensor, with its current stream."""
    import torch

    from xvcomm.engine.session import plugins
    from xvcomm.memory import array

    plugins.backends()  # which say whose memory it is
    x = torch.arange(5, dtype=torch.float32, device="cuda")
    seen = array.view(x)
    assert (seen.device, seen.index, seen.address, seen.shape) == ("rocm", 0, x.data_ptr(), (5,))
    assert array.view(torch.arange(5)).device == "host"


if __name__ == "__main__":
    globals()[sys.argv[1]]()
