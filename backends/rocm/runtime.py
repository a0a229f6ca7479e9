"""HIP's functions, through hip-python."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rocm.bindings import hip, hiprtc
from rocm.bindings.util.paths import get_library_path

from xvcomm.abc.ranges import Ranges
from xvcomm.backends.gpu.vendor import SUCCESS, Addresses, Runtime, VendorError, unknown_code
from xvcomm.backends.rocm.ranges import roctx
from xvcomm.jit.atomics import load, store
from xvcomm.jit.ccall import call_11
from xvcomm.jit.compile import brief, compiling

# Plain numbers: the lookup of hip-python's enumerators takes longer than some calls.
_NOT_READY = int(hip.hipError_t.hipErrorNotReady)
# the last one if a capture begins meanwhile
_NOT_YET = (SUCCESS, _NOT_READY, int(hip.hipError_t.hipErrorCapturedEvent))
_INVALID_VALUE = int(hip.hipError_t.hipErrorInvalidValue)
_PORTABLE_AND_MAPPED = int(hip.hipHostRegisterPortable) | int(hip.hipHostRegisterMapped)
_ON_DEVICE = (int(hip.hipMemoryType.hipMemoryTypeDevice), int(hip.hipMemoryType.hipMemoryTypeManaged))
_ANY_DIRECTION = hip.hipMemcpyKind.hipMemcpyDefault
_HIGHEST = -1000  # HIP clamps it to the highest priority
_UNCACHED = 3  # hipDeviceMallocUncached: otherwise running kernels do not see a peer's writes
_HANDLE_BYTES = 64
_DMA_BUF = hip.hipMemRangeHandleType.hipMemRangeHandleTypeDmaBufFd
_RELAXED = 2  # hipStreamCaptureModeRelaxed


def _queried(capturing: int, status: int, query: int, stream: int, event: int) -> int:
    """Query an event on a stream, by address; returns "not ready" during a capture.

    Otherwise HIP would end the capture, although the event was recorded before it. The default stream cannot be captured.
    """
    store(status, 0)
    if stream != 0:
        call_11(capturing, stream, status, 0, 0, 0, 0, 0, 0, 0, 0, 0)  # an error if the stream was destroyed
        if load(status) != 0:
            return _NOT_READY
    code: int = call_11(query, event, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    return code


with compiling():
    _ask = brief("int64(int64, int64, int64, int64, int64)")(_queried)


def _addresses(*names: str) -> list[int]:
    """Addresses of functions of the library."""
    library = ctypes.CDLL(os.fsdecode(get_library_path("amdhip64")))
    return [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]


def _text(found: Any) -> str:
    """A C string from hip-python."""
    return found if isinstance(found, str) else str(bytes(found or b""), errors="replace")


def _failure(call: str, code: int) -> VendorError:
    # Clear HIP's last error, which the user's next check would otherwise report.
    hip.hipGetLastError()
    try:
        known = hip.hipError_t(code)
    except ValueError:
        return VendorError(call, code, "unknown error", "hip-python does not know this code; update it")
    return VendorError(call, code, known.name, _text(hip.hipGetErrorString(known)[1]))


def _answer(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of hip-python; returns a known code, and results."""
    try:
        return function(*args)
    except ValueError as error:
        raise _failure(function.__name__, unknown_code(error)) from error
    except RuntimeError as error:  # the library lacks the function
        raise VendorError(function.__name__, -1, "missing", str(error)) from error


def _bound(function: Callable[..., Any], *last: Any, give: Callable[[Any], Any] | None = None) -> Any:
    """A method that calls a function of hip-python, and returns the result after the code."""

    def method(*args: Any) -> Any:
        results = _answer(function, *args, *last)
        if results[0]:
            raise _failure(function.__name__, int(results[0]))
        found = results[-1]
        return found if give is None else give(found)

    return staticmethod(method)


class HipRuntime(Runtime):
    """See `Runtime`."""

    kind, visible = "rocm", "HIP_VISIBLE_DEVICES"
    invalid_streams = frozenset((1, 2))
    needs_write = True

    def __init__(self) -> None:
        self._streams: dict[int, int] = {}
        self._status = ctypes.c_int64()
        capturing, query, exchange = _addresses(
            "hipStreamIsCapturing", "hipEventQuery", "hipThreadExchangeStreamCaptureMode"
        )
        self._exchange = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(exchange)  # hip-python's takes no mode
        self._query = capturing, ctypes.addressof(self._status), query

    count = _bound(hip.hipGetDeviceCount)
    current = _bound(hip.hipGetDevice)
    use = _bound(hip.hipSetDevice)
    allocate = _bound(hip.hipMalloc, give=int)
    shareable = _bound(hip.hipExtMallocWithFlags, _UNCACHED, give=int)
    close = _bound(hip.hipIpcCloseMemHandle)
    reaches = _bound(hip.hipDeviceCanAccessPeer, give=bool)
    free = _bound(hip.hipFree)
    unregister = _bound(hip.hipHostUnregister)
    stream = _bound(hip.hipStreamCreateWithPriority, hip.hipStreamNonBlocking, _HIGHEST, give=int)
    _capturing = _bound(hip.hipStreamIsCapturing, give=bool)
    _capture_info = _bound(hip.hipStreamGetCaptureInfo)
    event = _bound(hip.hipEventCreateWithFlags, hip.hipEventDisableTiming, give=int)
    wait = _bound(hip.hipStreamWaitEvent, 0)
    load = _bound(hip.hipModuleLoadData, give=int)
    _export = _bound(hip.hipIpcGetMemHandle)
    _open = _bound(hip.hipIpcOpenMemHandle, hip.hipIpcMemLazyEnablePeerAccess, give=int)
    _range = _bound(hip.hipMemGetHandleForAddressRange)
    _properties = _bound(hip.hipGetDeviceProperties)
    _register = _bound(hip.hipHostRegister, _PORTABLE_AND_MAPPED)
    _mapped = _bound(hip.hipHostGetDevicePointer, 0, give=int)
    _attributes = _bound(hip.hipPointerGetAttributes)
    _record = _bound(hip.hipEventRecord)
    _copy = _bound(hip.hipMemcpyAsync)
    _set = _bound(hip.hipMemsetAsync)
    _function = _bound(hip.hipModuleGetFunction, give=int)
    _launch = _bound(hip.hipModuleLaunchKernel, None)
    _create = _bound(hiprtc.hiprtcCreateProgram)
    _name = _bound(hiprtc.hiprtcAddNameExpression)
    _lowered = _bound(hiprtc.hiprtcGetLoweredName, give=_text)
    _code_size = _bound(hiprtc.hiprtcGetCodeSize)
    _code = _bound(hiprtc.hiprtcGetCode)
    _log_size = _bound(hiprtc.hiprtcGetProgramLogSize)
    _log = _bound(hiprtc.hiprtcGetProgramLog)
    _destroy = _bound(hiprtc.hiprtcDestroyProgram)

    def addresses(self) -> Addresses:
        """See `Runtime.addresses`; the current object is a device."""
        names = "hipStreamIsCapturing", "hipModuleLaunchKernel", "hipEventRecord", "hipStreamWaitEvent", "hipGetDevice"
        return Addresses(*_addresses(*names))

    def failure(self, code: int) -> VendorError:
        return _failure("hipModuleLaunchKernel", code)

    def recorded(self, event: int, stream: int) -> None:
        self._streams[event] = stream

    def ranges(self) -> Ranges:
        return roctx(Path(os.fsdecode(get_library_path("amdhip64"))).parent)

    def architecture(self, index: int) -> str:
        """See `Runtime.architecture`; without `:sramecc+:xnack-`, so that one image serves all settings."""
        return _text(self._properties(index).gcnArchName).partition(":")[0]

    def bus(self, index: int) -> str:
        found = self._properties(index)
        return f"{found.pciDomainID:04x}:{found.pciBusID:02x}:{found.pciDeviceID:02x}"

    def export(self, address: int) -> bytes:
        made = self._export(address)
        return ctypes.string_at(int(made), _HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        made = hip.hipIpcMemHandle_t()
        ctypes.memmove(int(made), handle, _HANDLE_BYTES)
        return int(self._open(made))

    def dma_buf(self, address: int, nbytes: int) -> int:
        """See `Runtime.dma_buf`; before ROCm 7 the function is HSA's."""
        descriptor = ctypes.c_int(-1)
        try:
            self._range(ctypes.addressof(descriptor), address, nbytes, _DMA_BUF, 0)
        except VendorError as error:
            if error.name != "missing":
                raise
            self._export_by_hsa(address, nbytes, descriptor)
        return descriptor.value

    @staticmethod
    def _export_by_hsa(address: int, nbytes: int, descriptor: ctypes.c_int) -> None:
        name, offset = "hsa_amd_portable_export_dmabuf", ctypes.c_uint64()
        try:
            function = getattr(ctypes.CDLL("libhsa-runtime64.so.1"), name)
        except (OSError, AttributeError) as error:
            raise VendorError(name, -1, "missing", str(error)) from error
        code = function(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.byref(descriptor), ctypes.byref(offset)
        )
        if code == SUCCESS and offset.value:
            os.close(descriptor.value)
        if code or offset.value:
            raise VendorError(name, code, "refused", f"at offset {offset.value} of its allocation")

    @contextlib.contextmanager
    def during_captures(self) -> Iterator[None]:
        mode = ctypes.c_int(_RELAXED)
        self._exchange(ctypes.addressof(mode))
        try:
            yield
        finally:
            self._exchange(ctypes.addressof(mode))

    def register(self, address: int, nbytes: int) -> int:
        self._register(address, nbytes)
        return int(self._mapped(address))

    def locate(self, address: int) -> int | None:
        try:
            found = self._attributes(address)
        except VendorError as error:
            if error.code == _INVALID_VALUE:  # memory that HIP has not allocated
                return None
            raise
        return int(found.device) if int(found.type) in _ON_DEVICE else None

    def capture(self, stream: int) -> int:
        """See `Runtime.capture`; asking the default stream fails during a capture elsewhere."""
        return int(self._capture_info(stream)) if stream != 0 and self._capturing(stream) else 0

    def record(self, event: int, stream: int) -> None:
        self._record(event, stream)
        self.recorded(event, stream)

    def reached(self, event: int) -> bool:
        """See `Runtime.reached`; False until a capture of the event's stream has ended."""
        code = _ask(*self._query, self._streams.get(event, 0), event)
        if code not in _NOT_YET:
            raise _failure("hipEventQuery", code)
        return bool(code == SUCCESS)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._copy(dst, src, nbytes, _ANY_DIRECTION, stream)

    def zero(self, address: int, nbytes: int, stream: int) -> None:
        self._set(address, 0, nbytes, stream)

    def compile(self, source: str, names: Sequence[str], architecture: str) -> tuple[bytes, dict[str, str]]:
        """See `Runtime.compile`; without fused multiply-add, so that results are bitwise equal to the host's."""
        program = self._create(source.encode(), b"xvcomm.cu", 0, None, None)
        try:
            for name in names:
                self._name(program, name.encode())
            options = [f"--offload-arch={architecture}".encode(), b"-std=c++17", b"-O3", b"-ffp-contract=off"]
            (code,) = _answer(hiprtc.hiprtcCompileProgram, program, len(options), options)
            if code != SUCCESS:
                log = bytearray(self._log_size(program))
                self._log(program, log)
                raise VendorError("hiprtcCompileProgram", int(code), code.name, _text(log.rstrip(b"\0")))
            image = bytearray(self._code_size(program))
            self._code(program, image)
            return bytes(image), {name: self._lowered(program, name.encode()) for name in names}
        finally:
            self._destroy(program.createRef())

    def function(self, module: int, name: str) -> int:
        return int(self._function(module, name.encode()))

    def launch(self, function: int, blocks: int, threads: int, params: int, stream: int) -> None:
        self._launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, params)
