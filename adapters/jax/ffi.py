"""XLA's foreign function interface through ctypes: structures, one handler per platform, errors, registration.

The layouts are those of `jaxlib/include/xla/ffi/api/c_api.h`, version 0.1 and newer; additions of later versions are not used.
A handler reads plain words, because fields of a ctypes structure take five times as long. XLA calls it on any of its threads;
ctypes takes the interpreter lock, and the core's compiled code releases it while it waits. On host memory the compiled handler
runs first, and handles most calls itself.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_size_t, c_uint32, c_void_p, sizeof
from functools import cache
from typing import Any

import jax

MAJOR, MINOR = 0, 1
"""The oldest version of the interface that has everything used here."""


EXECUTE = 3
"""XLA_FFI_ExecutionStage_EXECUTE; handlers do nothing in other stages."""


class ErrorCode(enum.IntEnum):
    """Values of XLA_FFI_Error_Code that handlers return."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    FAILED_PRECONDITION = 9
    ABORTED = 10
    INTERNAL = 13
    UNAVAILABLE = 14


METADATA = 1
"""XLA_FFI_Extension_Metadata: XLA asks for the interface version of a handler."""


class _Extensible(Structure):
    """The beginning of most structures."""

    _fields_ = [("struct_size", c_size_t), ("extension", c_void_p)]


class ApiVersion(_Extensible):
    """XLA_FFI_Api_Version."""

    _fields_ = [("major", c_int32), ("minor", c_int32)]


class Buffer(_Extensible):
    """XLA_FFI_Buffer."""

    _fields_ = [("dtype", c_int32), ("data", c_void_p), ("rank", c_int64), ("dims", c_void_p)]


class ByteSpan(Structure):
    """XLA_FFI_ByteSpan: a string attribute."""

    _fields_ = [("ptr", c_void_p), ("len", c_size_t)]


class Scalar(Structure):
    """XLA_FFI_Scalar: a number as an attribute."""

    _fields_ = [("dtype", c_int32), ("value", c_void_p)]


class Buffers(_Extensible):
    """XLA_FFI_Args and XLA_FFI_Rets, which differ in names only."""

    _fields_ = [("size", c_int64), ("types", c_void_p), ("items", c_void_p)]


class Attributes(_Extensible):
    """XLA_FFI_Attrs."""

    _fields_ = [("size", c_int64), ("types", c_void_p), ("names", c_void_p), ("attrs", c_void_p)]


class CallFrame(_Extensible):
    """XLA_FFI_CallFrame, up to its last required field."""

    _fields_ = [
        ("api", c_void_p), ("ctx", c_void_p), ("stage", c_int32), ("args", Buffers), ("rets", Buffers),
        ("attrs", Attributes),
    ]  # fmt: skip


class Metadata(Structure):
    """XLA_FFI_Metadata, up to the fields that handlers fill in."""

    _fields_ = [("struct_size", c_size_t), ("version", ApiVersion), ("traits", c_uint32)]


class MetadataExtension(Structure):
    """XLA_FFI_Metadata_Extension."""

    _fields_ = [("struct_size", c_size_t), ("type", c_int32), ("next", c_void_p), ("metadata", POINTER(Metadata))]


class Api(_Extensible):
    """XLA_FFI_Api, up to the last function that is called."""

    _fields_ = [
        ("version", ApiVersion), ("internal", c_void_p), ("Error_Create", c_void_p),
        ("Error_GetMessage", c_void_p), ("Error_Destroy", c_void_p),
        ("Handler_Register", c_void_p), ("Stream_Get", c_void_p), ("Type_Register", c_void_p),
        ("ExecutionContext_Get", c_void_p), ("State_Set", c_void_p), ("State_Get", c_void_p),
        ("DeviceMemory_Allocate", c_void_p), ("DeviceMemory_Free", c_void_p), ("ThreadPool_Schedule", c_void_p),
        ("ThreadPool_NumThreads", c_void_p), ("Future_Create", c_void_p), ("Future_SetAvailable", c_void_p),
        ("Future_SetError", c_void_p), ("RunId_Get", c_void_p), ("DeviceOrdinal_Get", c_void_p),
    ]  # fmt: skip


class ErrorCreate(_Extensible):
    """XLA_FFI_Error_Create_Args."""

    _fields_ = [("message", c_char_p), ("errc", c_int32)]


class ErrorDestroy(_Extensible):
    """XLA_FFI_Error_Destroy_Args."""

    _fields_ = [("error", c_void_p)]


class StreamGet(_Extensible):
    """XLA_FFI_Stream_Get_Args."""

    _fields_ = [("ctx", c_void_p), ("stream", c_void_p)]


class DeviceOrdinalGet(_Extensible):
    """XLA_FFI_DeviceOrdinal_Get_Args."""

    _fields_ = [("ctx", c_void_p), ("device_ordinal", c_int32)]


_FUNCTION = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_BEHIND = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_int64)
_words = (ctypes.c_ssize_t * (1 << 58)).from_address(0)

# Offsets in words of eight bytes.
EXTENSION, STAGE = CallFrame.extension.offset // 8, CallFrame.stage.offset // 8
API, CTX = CallFrame.api.offset // 8, CallFrame.ctx.offset // 8
ARGS = (CallFrame.args.offset + Buffers.items.offset) // 8
RETS = (CallFrame.rets.offset + Buffers.items.offset) // 8
ATTRS = (CallFrame.attrs.offset + Attributes.attrs.offset) // 8
DATA, VALUE = Buffer.data.offset // 8, Scalar.value.offset // 8


Frame = int
"""Address of a call frame, which is read as words of eight bytes."""


def argument(frame: Frame) -> int:
    """Address of the first operand's data."""
    return _words[(_words[_words[frame + ARGS] >> 3] >> 3) + DATA]


def result(frame: Frame) -> int:
    """Address of the first result's data."""
    return _words[(_words[_words[frame + RETS] >> 3] >> 3) + DATA]


def text(frame: Frame) -> str:
    """The attribute `text`, the second by name."""
    span = ByteSpan.from_address(_words[(_words[frame + ATTRS] >> 3) + 1])
    return ctypes.string_at(span.ptr, span.len).decode(errors="replace")


def stream(frame: Frame) -> int:
    """The vendor's handle of XLA's stream.

    Raises:
        RuntimeError: the platform has none.
    """
    asked = StreamGet(sizeof(StreamGet), None, _words[frame + CTX], None)
    _ask(frame, "Stream_Get", asked)
    return asked.stream or 0


def device(frame: Frame) -> int:
    """Index of the device among those of this process."""
    asked = DeviceOrdinalGet(sizeof(DeviceOrdinalGet), None, _words[frame + CTX], -1)
    _ask(frame, "DeviceOrdinal_Get", asked)
    return int(asked.device_ordinal)


def _ask(frame: Frame, name: str, asked: Structure) -> None:
    api = Api.from_address(_words[frame + API])
    error = _FUNCTION(getattr(api, name))(ctypes.addressof(asked))
    if error:
        destroy = ErrorDestroy(sizeof(ErrorDestroy), None, error)
        _FUNCTION(api.Error_Destroy)(ctypes.addressof(destroy))
        raise RuntimeError(f"XLA_FFI_{name} failed")


Execute = Callable[[Frame, int, bool], None]
Explain = Callable[[BaseException], tuple[ErrorCode, str]]


def handler(execute: Execute, explain: Explain, front: Callable[[Any], int] | None = None) -> Any:
    """A C function for XLA that calls `execute`, and converts its exceptions with `explain`.

    It is never freed, because XLA never unregisters a handler.

    Args:
        execute: called with the frame, the attribute `number`, the first by name, and whether the operation has been started.
        explain: returns code and text of an error.
        front: returns the address of a handler that runs first, given a C function of a frame and whether the operation has
            been started.
    """

    def handle(address: int, begun: int = 0) -> int | None:
        frame = address >> 3
        if _words[frame + EXTENSION] or _words[frame + STAGE] & 0xFFFFFFFF != EXECUTE:
            return _prepare(frame)
        try:
            execute(frame, _words[_words[(_words[_words[frame + ATTRS] >> 3] >> 3) + VALUE] >> 3], bool(begun))
        except BaseException as error:
            return _error(frame, *explain(error))
        return None

    function = _FUNCTION(handle) if front is None else _BEHIND(handle)
    _kept.append(function)
    return jax.ffi.pycapsule(ctypes.cast(function, c_void_p).value if front is None else front(function))


_kept: list[Any] = []


def _prepare(frame: Frame) -> int | None:
    """Handle a call of another stage than execution: return the interface version; nothing else needs preparation."""
    if not _words[frame + EXTENSION]:
        return None
    extension = MetadataExtension.from_address(_words[frame + EXTENSION])
    if extension.type == METADATA:
        metadata = extension.metadata.contents
        metadata.version.major, metadata.version.minor, metadata.traits = MAJOR, MINOR, 0
    return None


def _error(frame: Frame, code: ErrorCode, text: str) -> int:
    asked = ErrorCreate(sizeof(ErrorCreate), None, text.encode(), code)
    create = _FUNCTION(Api.from_address(_words[frame + API]).Error_Create)
    error: int = create(ctypes.addressof(asked))
    return error


@cache
def register(target: str, platform: str, capsule: Any) -> None:
    """Register a handler with XLA as `target` on a platform: `cpu`, `cuda` or `rocm`; once."""
    jax.ffi.register_ffi_target(target, capsule, platform={"cpu": "cpu"}.get(platform, platform.upper()))
