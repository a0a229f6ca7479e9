"""RCCL through hip-python, whose functions take enumeration members and pointer objects, and return tuples."""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from rocm.bindings import rccl as _rccl
from rocm.bindings.util.paths import get_library_path

from xvcomm.backends.gpu.vendor import Library, VendorError, unknown_code
from xvcomm.types.dtype import BY_NAME, ReduceOp

rccl: Any = _rccl  # its stubs have no types
_T, _O = rccl.ncclDataType_t, rccl.ncclRedOp_t

# No float8: the format that RCCL means by its numbers depends on the GPU.
_DTYPES = {
    "int8": int(_T.ncclInt8), "uint8": int(_T.ncclUint8), "int32": int(_T.ncclInt32), "uint32": int(_T.ncclUint32),
    "int64": int(_T.ncclInt64), "uint64": int(_T.ncclUint64), "float16": int(_T.ncclFloat16),
    "float32": int(_T.ncclFloat32), "float64": int(_T.ncclFloat64), "bfloat16": int(_T.ncclBfloat16),
}  # fmt: skip
_NAMES = {number: name for name, number in _DTYPES.items()}
_MEMBERS = {int(member): member for member in _T}
_OPS = {
    ReduceOp.SUM: int(_O.ncclSum), ReduceOp.PROD: int(_O.ncclProd), ReduceOp.MIN: int(_O.ncclMin),
    ReduceOp.MAX: int(_O.ncclMax), ReduceOp.AVG: int(_O.ncclAvg),
}  # fmt: skip


class RcclLibrary(Library):
    """RCCL."""

    name = "RCCL"

    def __init__(self) -> None:
        self._comms: defaultdict[int, Any] = defaultdict(lambda: rccl.ncclComm(None))
        self._ops: dict[int, Any] = {int(member): member for member in _O}

    def version(self) -> int:
        return int(_checked(rccl.ncclGetVersion))

    def dtypes(self) -> Mapping[str, int]:
        return _DTYPES

    def ops(self) -> Mapping[ReduceOp, int]:
        return _OPS

    def explain(self, code: int, comm: int) -> str:
        last = str(rccl.ncclGetLastError(self._comms[comm])[1] or "")
        return ": ".join(filter(None, (_words(code), last)))

    def path(self) -> str:
        return os.fsdecode(get_library_path("rccl"))

    def unique_id(self) -> bytes:
        return bytes(_checked(rccl.ncclGetUniqueId).internal)

    def join(self, unique_id: bytes, members: int, me: int) -> int:
        """See `Library.join`; blocks."""
        comm = _checked(rccl.ncclCommInitRank, members, unique_id, me)
        self._comms[int(comm)] = comm
        return int(comm)

    def state(self, comm: int) -> int:
        code = ctypes.c_int()
        _checked(rccl.ncclCommGetAsyncError, self._comms[comm], ctypes.addressof(code))
        return code.value

    def abort(self, comm: int) -> None:
        _checked(rccl.ncclCommAbort, self._comms.pop(comm))

    def destroy(self, comm: int) -> None:
        _checked(rccl.ncclCommDestroy, self._comms.pop(comm))

    def premul_sum(self, factor: float, dtype: int, comm: int) -> int:
        scalar, op = np.full(1, factor, BY_NAME[_NAMES[dtype]].numpy), ctypes.c_int()
        residence = rccl.ncclScalarResidence_t.ncclScalarHostImmediate
        where = ctypes.addressof(op), scalar.ctypes.data
        _checked(rccl.ncclRedOpCreatePreMulSum, *where, _MEMBERS[dtype], residence, self._comms[comm])
        self._ops.setdefault(op.value, _op(op.value))
        return op.value

    def free_op(self, op: int, comm: int) -> None:
        _checked(rccl.ncclRedOpDestroy, self._ops[op], self._comms[comm])

    def group_start(self) -> int:
        return _coded(rccl.ncclGroupStart)

    def group_end(self) -> int:
        return _coded(rccl.ncclGroupEnd)

    def all_reduce(self, src: int, dst: int, count: int, dtype: int, op: int, comm: int, stream: int) -> int:
        return _coded(rccl.ncclAllReduce, src, dst, count, _MEMBERS[dtype], self._ops[op], self._comms[comm], stream)

    def reduce(self, src: int, dst: int, count: int, dtype: int, op: int, root: int, comm: int, stream: int) -> int:
        return _coded(rccl.ncclReduce, src, dst, count, _MEMBERS[dtype], self._ops[op], root, self._comms[comm], stream)

    def reduce_scatter(self, src: int, dst: int, count: int, dtype: int, op: int, comm: int, stream: int) -> int:
        kind, what, whose = _MEMBERS[dtype], self._ops[op], self._comms[comm]
        return _coded(rccl.ncclReduceScatter, src, dst, count, kind, what, whose, stream)

    def all_gather(self, src: int, dst: int, count: int, dtype: int, comm: int, stream: int) -> int:
        return _coded(rccl.ncclAllGather, src, dst, count, _MEMBERS[dtype], self._comms[comm], stream)

    def broadcast(self, src: int, dst: int, count: int, dtype: int, root: int, comm: int, stream: int) -> int:
        return _coded(rccl.ncclBroadcast, src, dst, count, _MEMBERS[dtype], root, self._comms[comm], stream)

    def send(self, src: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> int:
        return _coded(rccl.ncclSend, src, count, _MEMBERS[dtype], peer, self._comms[comm], stream)

    def recv(self, dst: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> int:
        return _coded(rccl.ncclRecv, dst, count, _MEMBERS[dtype], peer, self._comms[comm], stream)


def _op(number: int) -> Any:
    """Convert an op number to hip-python's argument: its functions require members of the enumeration."""
    member = int.__new__(_O, number)
    member._value_, member._name_ = number, f"made_{number}"
    return member


def _words(code: int) -> str:
    """Text of a result code, if hip-python provides it."""
    try:
        result = rccl.ncclResult_t(code)
    except ValueError:
        return f"unknown error {code}"
    return f"{result.name} ({code}): {rccl.ncclGetErrorString(result)[1]}"


def _coded(function: Any, *arguments: Any) -> int:
    """The result code of a function that returns nothing else."""
    try:
        return int(function(*arguments)[0])
    except ValueError as error:
        return unknown_code(error)


def _checked(function: Any, *arguments: Any) -> Any:
    """Call a function of hip-python and return its result without the code."""
    try:
        code, *values = function(*arguments)
    except ValueError as error:
        raise VendorError(function.__name__, unknown_code(error), "unknown error", str(error)) from error
    except RuntimeError as error:  # the library lacks the function
        raise VendorError(function.__name__, -1, "missing", str(error)) from error
    if code:
        text = rccl.ncclGetLastError(0)[1] or rccl.ncclGetErrorString(code)[1]
        raise VendorError(function.__name__, int(code), code.name, str(text))
    return values[0] if values else None
