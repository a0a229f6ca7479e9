"""NCCL through nccl4py's low-level module: it is compiled, takes plain integers, and releases the interpreter lock.

CuPy's module does not support operations with a factor; ctypes takes longer per call.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from nccl.bindings import nccl
from nccl.bindings._internal.nccl import _inspect_loaded_library_path

from xvcomm.backends.gpu.vendor import SUCCESS, Library, VendorError, unknown_code
from xvcomm.types.dtype import BY_NAME, ReduceOp

_UNIQUE_ID_BYTES = 128
_NO_COMM = nccl.Comm(0)
_FLOAT8_VERSION = 22400
_FLOAT8_ARCHITECTURE = 90

_DTYPES = {
    "int8": int(nccl.DataType.Int8), "uint8": int(nccl.DataType.Uint8), "int32": int(nccl.DataType.Int32),
    "uint32": int(nccl.DataType.Uint32), "int64": int(nccl.DataType.Int64), "uint64": int(nccl.DataType.Uint64),
    "float16": int(nccl.DataType.Float16), "float32": int(nccl.DataType.Float32),
    "float64": int(nccl.DataType.Float64), "bfloat16": int(nccl.DataType.Bfloat16),
}  # fmt: skip
_FLOAT8 = {"float8_e4m3fn": int(nccl.DataType.Float8e4m3), "float8_e5m2": int(nccl.DataType.Float8e5m2)}
_NAMES = {number: name for name, number in (_DTYPES | _FLOAT8).items()}
_OPS = {
    ReduceOp.SUM: int(nccl.RedOp.Sum), ReduceOp.PROD: int(nccl.RedOp.Prod), ReduceOp.MIN: int(nccl.RedOp.Min),
    ReduceOp.MAX: int(nccl.RedOp.Max), ReduceOp.AVG: int(nccl.RedOp.Avg),
}  # fmt: skip


def _checked(call: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of nccl4py and return its result; `call` is its name in NCCL's manual."""
    try:
        return function(*arguments)
    except nccl.NCCLError as error:
        text = nccl.get_last_error(_NO_COMM) or nccl.get_error_string(error.status)
        raise VendorError(call, error.status, nccl.Result(error.status).name, text) from error
    except ValueError as error:
        raise VendorError(call, unknown_code(error), "unknown error", str(error)) from error
    except RuntimeError as error:  # NCCL, or the function, is missing
        raise VendorError(call, -1, "missing", str(error)) from error


def _words(code: int) -> str:
    """Text of a result code, if nccl4py provides it."""
    try:
        name = nccl.Result(code).name
    except ValueError:
        return f"unknown error {code}"
    return f"{name} ({code}): {nccl.get_error_string(code)}"


def _code(function: Callable[..., None], *arguments: Any) -> int:
    """NCCL's result code of a call that returns nothing else."""
    try:
        function(*arguments)
    except nccl.NCCLError as error:
        return int(error.status)
    except ValueError as error:
        return unknown_code(error)
    return SUCCESS


def _coded(function: Callable[..., None]) -> Any:
    """A method that calls nccl4py's function and returns NCCL's result code."""

    def method(*arguments: int) -> int:
        return _code(function, *arguments)

    return staticmethod(method)


def _enqueuing(function: Callable[..., None]) -> Any:
    """Like `_coded`, for functions whose last two arguments are a communicator and a stream."""

    def method(self: NcclLibrary, *arguments: int) -> int:
        return _code(function, *arguments[:-2], self._comms[arguments[-2]], arguments[-1])

    return method


class NcclLibrary(Library):
    """NCCL on a GPU of one architecture, such as `sm_90`."""

    name = "NCCL"

    def __init__(self, architecture: str) -> None:
        self._capability = int("".join(filter(str.isdigit, architecture)))
        self._comms: defaultdict[int, Any] = defaultdict(lambda: _NO_COMM)

    def version(self) -> int:
        return int(_checked("ncclGetVersion", nccl.get_version))

    def dtypes(self) -> Mapping[str, int]:
        float8 = self._capability >= _FLOAT8_ARCHITECTURE and self.version() >= _FLOAT8_VERSION
        return _DTYPES | _FLOAT8 if float8 else _DTYPES

    def ops(self) -> Mapping[ReduceOp, int]:
        return _OPS

    def explain(self, code: int, comm: int) -> str:
        return ": ".join(filter(None, (_words(code), nccl.get_last_error(self._comms[comm]))))

    def path(self) -> str:
        return str(_inspect_loaded_library_path())

    def unique_id(self) -> bytes:
        made = _checked("ncclGetUniqueId", nccl.get_unique_id)  # owns the memory at `ptr`
        return ctypes.string_at(made.ptr, _UNIQUE_ID_BYTES)

    def join(self, unique_id: bytes, members: int, me: int) -> int:
        """See `Library.join`; blocks."""
        comm = _checked("ncclCommInitRank", nccl.comm_init_rank, members, bytearray(unique_id), me)
        self._comms[comm.handle] = comm
        return int(comm.handle)

    def state(self, comm: int) -> int:
        return int(_checked("ncclCommGetAsyncError", nccl.comm_get_async_error, self._comms[comm]))

    def abort(self, comm: int) -> None:
        _checked("ncclCommAbort", nccl.comm_abort, self._comms.pop(comm))

    def destroy(self, comm: int) -> None:
        _checked("ncclCommDestroy", nccl.comm_destroy, self._comms.pop(comm))

    def premul_sum(self, factor: float, dtype: int, comm: int) -> int:
        scalar = np.full(1, factor, BY_NAME[_NAMES[dtype]].numpy)
        residence = int(nccl.ScalarResidence.HostImmediate)
        arguments = scalar.ctypes.data, dtype, residence, self._comms[comm]
        return int(_checked("ncclRedOpCreatePreMulSum", nccl.red_op_create_pre_mul_sum, *arguments))

    def free_op(self, op: int, comm: int) -> None:
        _checked("ncclRedOpDestroy", nccl.red_op_destroy, op, self._comms[comm])

    group_start = _coded(nccl.group_start)
    group_end = _coded(nccl.group_end)
    all_reduce = _enqueuing(nccl.all_reduce)
    reduce = _enqueuing(nccl.reduce)
    reduce_scatter = _enqueuing(nccl.reduce_scatter)
    all_gather = _enqueuing(nccl.all_gather)
    broadcast = _enqueuing(nccl.broadcast)
    send = _enqueuing(nccl.send)
    recv = _enqueuing(nccl.recv)
