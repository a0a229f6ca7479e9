"""CUDA's functions, through CuPy's low-level modules."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cupy.cuda import driver, nvrtc, runtime

from xvcomm.abc.ranges import Ranges
from xvcomm.backends.cuda.ranges import nvtx
from xvcomm.backends.gpu.vendor import SUCCESS, Addresses, Runtime, VendorError
from xvcomm.jit.atomics import store
from xvcomm.jit.ccall import call_11
from xvcomm.jit.compile import brief, compiling

_NOT_READY = 600
_PORTABLE_AND_MAPPED = 1 | 2
_MAP_FOR_PEERS = 1  # cudaIpcMemLazyEnablePeerAccess
_HIGHEST = -1000  # the driver clamps it to the highest priority
_DEFAULT_STREAMS = (0, runtime.streamLegacy)
_MAJOR, _MINOR = 75, 76  # cudaDevAttrComputeCapabilityMajor, -Minor
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_DMA_BUF = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD


def _relaxed(exchange: int, mode: int, function: int, argument: int) -> int:
    """Call a function while the thread's capture mode is relaxed; all arguments are addresses."""
    store(mode, _RELAXED)
    call_11(exchange, mode, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    code: int = call_11(function, argument, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    call_11(exchange, mode, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    return code


with compiling():
    _ask = brief("int64(int64, int64, int64, int64)")(_relaxed)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _failure(call: str, error: Exception) -> VendorError:
    name, _, text = str(error).partition(": ")
    return VendorError(call, getattr(error, "status", -1), name, text)


def _bound(call: str, function: Callable[..., Any], *last: Any) -> Any:
    """A method that calls CuPy's function, named as in CUDA's manual; `last` are constant arguments."""

    def method(*args: Any) -> Any:
        try:
            return function(*args, *last)
        except (RuntimeError, AssertionError) as error:  # AssertionError: CuPy did not find a library
            raise _failure(call, error) from error

    return staticmethod(method)


class CudaRuntime(Runtime):
    """See `Runtime`. The current device of a thread that has used none is -1: device 0 would create a context there."""

    kind, visible = "cuda", "CUDA_VISIBLE_DEVICES"
    invalid_streams = frozenset()

    def __init__(self) -> None:
        self._contexts: dict[int, int] = {}
        self._devices = {0: -1}
        driver = ctypes.PyDLL("libcuda.so.1")  # the calls are too short to release the interpreter lock
        # CuPy's function holds the interpreter lock while it waits
        self._close = ctypes.CDLL("libcuda.so.1").cuIpcCloseMemHandle
        self._mode = ctypes.c_int64()
        self._exchange = driver.cuThreadExchangeStreamCaptureMode
        self._handle = getattr(driver, "cuMemGetHandleForAddressRange", None)
        self._query = _address(self._exchange), ctypes.addressof(self._mode), _address(driver.cuEventQuery)
        self._capture_info = driver.cuStreamGetCaptureInfo_v2
        self._finish_loading = getattr(driver, "cuFuncLoad", None)  # CUDA 12.4

    count = _bound("cudaGetDeviceCount", runtime.getDeviceCount)
    allocate = _bound("cudaMalloc", runtime.malloc)
    shareable = allocate
    export = _bound("cudaIpcGetMemHandle", runtime.ipcGetMemHandle)
    open = _bound("cudaIpcOpenMemHandle", runtime.ipcOpenMemHandle, _MAP_FOR_PEERS)
    free = _bound("cudaFree", runtime.free)
    unregister = _bound("cudaHostUnregister", runtime.hostUnregister)
    stream = _bound(
        "cudaStreamCreateWithPriority", runtime.streamCreateWithPriority, runtime.streamNonBlocking, _HIGHEST
    )
    event = _bound("cudaEventCreateWithFlags", runtime.eventCreateWithFlags, runtime.eventDisableTiming)
    record = _bound("cudaEventRecord", runtime.eventRecord)
    wait = _bound("cudaStreamWaitEvent", runtime.streamWaitEvent)
    load = _bound("cuModuleLoadData", driver.moduleLoadData)
    _capturing = _bound("cudaStreamIsCapturing", runtime.streamIsCapturing)
    _context = _bound("cuCtxGetCurrent", driver.ctxGetCurrent)
    _enter = _bound("cuCtxSetCurrent", driver.ctxSetCurrent)
    _device = _bound("cudaGetDevice", runtime.getDevice)
    _reaches = _bound("cudaDeviceCanAccessPeer", runtime.deviceCanAccessPeer)
    _bus = _bound("cudaDeviceGetPCIBusId", runtime.deviceGetPCIBusId)
    _attribute = _bound("cudaDeviceGetAttribute", runtime.deviceGetAttribute)
    _register = _bound("cudaHostRegister", runtime.hostRegister)
    _attributes = _bound("cudaPointerGetAttributes", runtime.pointerGetAttributes)
    _copy = _bound("cudaMemcpyAsync", runtime.memcpyAsync)
    _set = _bound("cudaMemsetAsync", runtime.memsetAsync)
    _function = _bound("cuModuleGetFunction", driver.moduleGetFunction)
    _launch = _bound("cuLaunchKernel", driver.launchKernel)

    def current(self) -> int:
        index = self._devices.get(self._context())
        return self._device() if index is None else index

    def use(self, index: int) -> None:
        """See `Runtime.use`; uses the driver's contexts, so that no additional one is created."""
        self._enter(0 if index < 0 else self._contexts.get(index) or self._primary(index))

    def _primary(self, index: int) -> int:
        """A device's primary context, found on another thread: the runtime remembers which device a thread has used."""

        def find() -> int:
            runtime.setDevice(index)
            runtime.free(0)
            return int(driver.ctxGetCurrent())

        try:
            with ThreadPoolExecutor(1) as thread:
                context = thread.submit(find).result()
        except RuntimeError as error:
            raise _failure("cudaSetDevice", error) from error
        self._contexts[index], self._devices[context] = context, index
        return context

    def addresses(self) -> Addresses:
        """See `Runtime.addresses`; the current object is a context."""
        names = "cuStreamIsCapturing", "cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent", "cuCtxGetCurrent"
        library = ctypes.CDLL("libcuda.so.1")
        return Addresses(*(_address(getattr(library, name)) for name in names))

    def recorded(self, event: int, stream: int) -> None:
        """See `Runtime.recorded`; CUDA does not need it."""

    def failure(self, code: int) -> VendorError:
        return _failure("cuLaunchKernel", driver.CUDADriverError(code))

    def architecture(self, index: int) -> str:
        return f"sm_{self._attribute(_MAJOR, index)}{self._attribute(_MINOR, index)}"

    def ranges(self) -> Ranges:
        return nvtx()

    def bus(self, index: int) -> str:
        return str(self._bus(index))

    def reaches(self, index: int, other: int) -> bool:
        return bool(self._reaches(index, other))

    def dma_buf(self, address: int, nbytes: int) -> int:
        descriptor = ctypes.c_int(-1)
        where = ctypes.byref(descriptor), ctypes.c_uint64(address), ctypes.c_size_t(nbytes)
        if self._handle is None:
            raise VendorError("cuMemGetHandleForAddressRange", -1, "missing", "a driver of CUDA 11.7 or newer has it")
        code = self._handle(*where, _DMA_BUF, ctypes.c_ulonglong(0))
        if code != SUCCESS:
            raise _failure("cuMemGetHandleForAddressRange", driver.CUDADriverError(code))
        return descriptor.value

    @contextlib.contextmanager
    def during_captures(self) -> Iterator[None]:
        mode = ctypes.c_int(_RELAXED)
        self._exchange(ctypes.byref(mode))
        try:
            yield
        finally:
            self._exchange(ctypes.byref(mode))

    def close(self, address: int) -> None:
        status = self._close(ctypes.c_uint64(address))
        if status != SUCCESS:
            raise _failure("cuIpcCloseMemHandle", runtime.CUDARuntimeError(status))

    def register(self, address: int, nbytes: int) -> int:
        self._register(address, nbytes, _PORTABLE_AND_MAPPED)
        return int(self._attributes(address).devicePointer)

    def locate(self, address: int) -> int | None:
        found = self._attributes(address)
        on_device = found.type in (runtime.memoryTypeDevice, runtime.memoryTypeManaged)
        return int(found.device) if on_device else None

    def capture(self, stream: int) -> int:
        """See `Runtime.capture`; the legacy default stream is not asked, because that would end a capture elsewhere."""
        return self._capture_number(stream) if stream not in _DEFAULT_STREAMS and self._capturing(stream) else 0

    def _capture_number(self, stream: int) -> int:
        status, number = ctypes.c_int(), ctypes.c_uint64()
        self._capture_info(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
        return number.value

    def reached(self, event: int) -> bool:
        """See `Runtime.reached`; while another thread captures a graph, only a thread in relaxed mode may query events."""
        code = _ask(*self._query, event)
        if code not in (SUCCESS, _NOT_READY):
            raise _failure("cuEventQuery", driver.CUDADriverError(code))
        return bool(code == SUCCESS)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._copy(dst, src, nbytes, runtime.memcpyDefault, stream)

    def zero(self, address: int, nbytes: int, stream: int) -> None:
        self._set(address, 0, nbytes, stream)

    def compile(self, source: str, names: Sequence[str], architecture: str) -> tuple[bytes, dict[str, str]]:
        """See `Runtime.compile`; for a GPU newer than the compiler, PTX that the driver compiles.

        Multiplications and additions are not fused, so that results are bitwise equal to the host's.
        """
        program = 0
        try:
            program = nvrtc.createProgram(source, "xvcomm.cu", [], [])
            for name in names:
                nvrtc.addNameExpression(program, name)
            known = nvrtc.getSupportedArchs()
            exact = int(architecture.removeprefix("sm_")) in known
            target = architecture if exact else f"compute_{max(known)}"
            nvrtc.compileProgram(program, (f"-arch={target}", "-std=c++17", "-fmad=false"))
            image = nvrtc.getCUBIN(program) if exact else nvrtc.getPTX(program)
            return image, {name: nvrtc.getLoweredName(program, name) for name in names}
        except (RuntimeError, AssertionError) as error:
            log = nvrtc.getProgramLog(program) if program else ""
            raise VendorError(
                "nvrtcCompileProgram", getattr(error, "status", -1), str(error).partition(" ")[0], log
            ) from error
        finally:
            if program:
                nvrtc.destroyProgram(program)

    def function(self, module: int, name: str) -> int:
        found = self._function(module, name)
        # otherwise CUDA loads the kernel at its first launch, and waits for running kernels
        if self._finish_loading is not None:
            self._finish_loading(ctypes.c_void_p(found))
        return int(found)

    def launch(self, function: int, blocks: int, threads: int, params: int, stream: int) -> None:
        self._launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, params, 0)
