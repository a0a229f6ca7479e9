"""Checks of this folder's librccl.so through hip-python, with several ranks: `python rccl_checks.py NAME`."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rocm.bindings import hip, rccl

SUCCESS, INVALID_ARGUMENT, REMOTE_ERROR, IN_PROGRESS = 0, 4, 6, 7
DTYPES = [
    np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.float16, np.float32, np.float64,
    ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
]  # fmt: skip
SUM, PROD, MAX, MIN, AVG, PREMUL_SUM = range(6)
FLOAT32 = rccl.ncclDataType_t.ncclFloat32
PATIENCE = 30.0


def ok(answer: tuple[Any, ...]) -> Any:
    """The values of a hip-python result; AssertionError if its code is not success."""
    code, *values = answer
    assert int(code) == 0, (code, str(rccl.ncclGetLastError(0)[1]))
    return values[0] if len(values) == 1 else values


def until(true: Callable[[], bool]) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def operation(number: int) -> Any:
    """An operation as a member of the enumeration, which hip-python requires also for user-created operations."""
    if number in iter(rccl.ncclRedOp_t):
        return rccl.ncclRedOp_t(number)
    member = int.__new__(rccl.ncclRedOp_t, number)
    member._value_, member._name_ = number, "made"
    return member


class Rank:
    """One member: its communicator and stream."""

    def __init__(self, rank: int, size: int, unique_id: bytes) -> None:
        self.rank, self.size, self.unique_id = rank, size, unique_id
        ok(hip.hipSetDevice(rank % 2))
        self.comm: Any = None
        self.stream = ok(hip.hipStreamCreateWithFlags(hip.hipStreamNonBlocking))

    def join(self, blocking: bool = True) -> int:
        """Create the communicator; returns the result of the call."""
        config = rccl.ncclConfig_t()
        ctypes.memset(int(config), 0x80, config.c_sizeof())
        config.magic, config.blocking = 0xCAFEBEEF, int(blocking)
        code, self.comm = rccl.ncclCommInitRankConfig(self.size, self.unique_id, self.rank, config)
        return int(code)

    def state(self) -> int:
        """The communicator's asynchronous state."""
        found = ctypes.c_int(-1)
        ok(rccl.ncclCommGetAsyncError(self.comm, ctypes.addressof(found)))
        return found.value

    def upload(self, array: Any) -> int:
        """Copy to new device memory."""
        address = int(ok(hip.hipMalloc(max(array.nbytes, 1))))
        ok(hip.hipMemcpy(address, array.ctypes.data, array.nbytes, hip.hipMemcpyKind.hipMemcpyHostToDevice))
        return address

    def download(self, address: int, count: int, dtype: Any) -> Any:
        """Copy from device memory after the stream has finished."""
        ok(hip.hipStreamSynchronize(self.stream))
        found = np.empty(count, dtype)
        ok(hip.hipMemcpy(found.ctypes.data, address, found.nbytes, hip.hipMemcpyKind.hipMemcpyDeviceToHost))
        return found

    def all_reduce(self, value: float, count: int = 1000) -> tuple[int, int]:
        """The result of the call, and the address of the sum."""
        address = self.upload(np.full(count, value, np.float32))
        code = rccl.ncclAllReduce(address, address, count, FLOAT32, operation(SUM), self.comm, self.stream)[0]
        return int(code), address


def inputs(dtype: Any, size: int, count: int) -> list[Any]:
    """Every rank's array: all bit patterns of small types, including NaN and infinities of float8."""
    generator = np.random.default_rng(7)
    if np.dtype(dtype).itemsize == 1:
        return list(generator.integers(0, 256, (size, count), np.uint8).view(dtype))
    if np.dtype(dtype).kind in "iu":
        return list(generator.integers(0, 1 << 63, (size, count), np.int64).astype(dtype))
    return [(generator.standard_normal(count) * 10.0 ** (3 * rank)).astype(dtype) for rank in range(size)]


def expected(op: int, arrays: list[Any], factors: list[Any]) -> Any:
    """The reduction in rank order, rounded once."""
    dtype = arrays[0].dtype
    wide = dtype if dtype.kind in "iu" or dtype.itemsize >= 4 else np.dtype(np.float32)
    terms = [array.astype(wide) for array in arrays]
    if op == PREMUL_SUM:
        terms = [term * factor.astype(wide) for term, factor in zip(terms, factors, strict=True)]
    # As in NCCL, NaN loses against a number.
    combine = {PROD: np.multiply, MAX: np.fmax, MIN: np.fmin}.get(op, np.add)
    total = terms[0]
    for term in terms[1:]:
        total = combine(total, term)
    if op == AVG:
        total = divide(total, wide.type(len(arrays)))
    return total.astype(dtype)


def divide(total: Any, by: Any) -> Any:
    """Integer division that rounds towards zero, as in C."""
    if total.dtype.kind not in "iu":
        return total / by
    quotient = total // by
    return quotient + ((quotient < 0) & (quotient * by != total)).astype(total.dtype)


def same(found: Any, wanted: Any) -> None:
    """Equal values, with NaN where NaN is expected."""
    wide = np.float32 if wanted.dtype.itemsize < 4 else wanted.dtype
    np.testing.assert_array_equal(found.astype(wide), wanted.astype(wide))


def reductions(me: Rank, number: int, op: int) -> None:
    """All combinations of type and operation."""
    dtype, count = DTYPES[number], 300
    arrays = inputs(dtype, me.size, count * me.size)
    factors = [np.array([rank + 2]).astype(dtype) for rank in range(me.size)]
    kind, handle = rccl.ncclDataType_t(number), operation(op)
    if op == PREMUL_SUM:
        made, residence = ctypes.c_int(), rccl.ncclScalarResidence_t.ncclScalarHostImmediate
        where = ctypes.addressof(made), factors[me.rank].ctypes.data
        ok(rccl.ncclRedOpCreatePreMulSum(*where, kind, residence, me.comm))
        handle = operation(made.value)
    source, wanted = me.upload(arrays[me.rank]), expected(op, arrays, factors)
    target = me.upload(np.zeros(count * me.size, dtype))
    ok(rccl.ncclAllReduce(source, target, count * me.size, kind, handle, me.comm, me.stream))
    same(me.download(target, count * me.size, dtype), wanted)
    ok(rccl.ncclReduceScatter(source, target, count, kind, handle, me.comm, me.stream))
    same(me.download(target, count, dtype), wanted[count * me.rank :][:count])
    ok(rccl.ncclReduce(source, source, count * me.size, kind, handle, 1, me.comm, me.stream))
    same(me.download(source, count * me.size, dtype), wanted if me.rank == 1 else arrays[me.rank])
    if op == PREMUL_SUM:
        ok(rccl.ncclRedOpDestroy(handle, me.comm))
    for address in (source, target):
        ok(hip.hipFree(address))


def operations(me: Rank) -> None:
    """Reductions of all types, and operations that only move data, in many sizes."""
    assert me.join() == SUCCESS and me.state() == SUCCESS
    with np.errstate(all="ignore"):
        for number in range(len(DTYPES)):
            for op in range(PREMUL_SUM + 1):
                reductions(me, number, op)
    for count in (0, 1, 1000, 100_000):
        rows = np.arange(me.size * count, dtype=np.float32).reshape(me.size, count)
        target = me.upload(np.zeros_like(rows))
        own = target + me.rank * count * 4
        ok(hip.hipMemcpy(own, rows[me.rank].ctypes.data, count * 4, hip.hipMemcpyKind.hipMemcpyHostToDevice))
        ok(rccl.ncclAllGather(own, target, count, FLOAT32, me.comm, me.stream))
        same(me.download(target, rows.size, np.float32), rows.ravel())
        ok(rccl.ncclBroadcast(own, own, count, FLOAT32, 1, me.comm, me.stream))
        same(me.download(own, count, np.float32), rows[1])
        after, before = (me.rank + 1) % me.size, (me.rank - 1) % me.size
        ok(rccl.ncclGroupStart())
        ok(rccl.ncclSend(target, count, FLOAT32, after, me.comm, me.stream))
        ok(rccl.ncclRecv(own, count, FLOAT32, before, me.comm, me.stream))
        ok(rccl.ncclGroupEnd())
        me.download(own, count, np.float32)
    host = np.zeros(8, np.float32).ctypes.data
    assert int(rccl.ncclAllReduce(host, host, 8, FLOAT32, operation(SUM), me.comm, me.stream)[0]) == INVALID_ARGUMENT
    assert "memfd:hip-on-host-rccl" in Path("/proc/self/maps").read_text()  # nothing that could be left behind
    ok(rccl.ncclCommFinalize(me.comm))
    ok(rccl.ncclCommDestroy(me.comm))


def ordered(me: Rank) -> None:
    """Calls on two streams run in the order of issue, inside and outside of a graph."""
    assert me.join() == SUCCESS
    other = ok(hip.hipStreamCreateWithFlags(hip.hipStreamNonBlocking))
    first, second = (me.upload(np.full(4, value * (me.rank == 0), np.float32)) for value in (1, 2))
    for _ in range(20):
        for address, stream in ((first, me.stream), (second, other)):
            ok(rccl.ncclBroadcast(address, address, 4, FLOAT32, 0, me.comm, stream))
    ok(hip.hipStreamSynchronize(other))
    assert (me.download(first, 4, np.float32) == 1).all() and (me.download(second, 4, np.float32) == 2).all()
    ok(hip.hipStreamBeginCapture(me.stream, hip.hipStreamCaptureMode.hipStreamCaptureModeThreadLocal))
    ok(rccl.ncclAllReduce(first, first, 4, FLOAT32, operation(SUM), me.comm, me.stream))
    graph = ok(hip.hipGraphInstantiate(ok(hip.hipStreamEndCapture(me.stream)), 0))[0]
    for _ in range(3):
        ok(hip.hipGraphLaunch(graph, me.stream))
        ok(rccl.ncclAllReduce(second, second, 4, FLOAT32, operation(MAX), me.comm, me.stream))
    assert (me.download(first, 4, np.float32) == me.size**3).all()
    ok(rccl.ncclCommDestroy(me.comm))


def behind(me: Rank) -> None:
    """In non-blocking mode, long calls continue in the background, and other calls are rejected meanwhile."""
    assert me.join(blocking=False) == IN_PROGRESS and me.state() == IN_PROGRESS
    assert me.all_reduce(1)[0] == INVALID_ARGUMENT
    assert "still in progress" in str(rccl.ncclGetLastError(me.comm)[1])
    until(lambda: me.state() == SUCCESS)
    code, address = me.all_reduce(me.rank)
    assert code == IN_PROGRESS and me.state() == IN_PROGRESS
    until(lambda: me.state() == SUCCESS)
    assert (me.download(address, 1000, np.float32) == sum(range(me.size))).all()
    assert int(rccl.ncclCommFinalize(me.comm)[0]) == IN_PROGRESS
    until(lambda: me.state() == SUCCESS)
    ok(rccl.ncclCommDestroy(me.comm))


def death(me: Rank) -> None:
    """If a rank is killed, the others hang, see it in the asynchronous state, and recover by an abort."""
    assert me.join() == SUCCESS
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert me.all_reduce(1)[0] == SUCCESS
    until(lambda: me.state() == REMOTE_ERROR)
    assert hip.hipStreamQuery(me.stream)[0] == hip.hipError_t.hipErrorNotReady
    assert me.all_reduce(1)[0] == REMOTE_ERROR
    ok(rccl.ncclCommAbort(me.comm))
    ok(hip.hipStreamSynchronize(me.stream))


def death_before_all_came(me: Rank) -> None:
    """A rank that is joining learns that another one that had joined is dead."""
    if me.rank == 2:
        return
    assert me.join(blocking=False) == IN_PROGRESS
    until(lambda: arrived(me.unique_id) == 2)
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    until(lambda: me.state() == REMOTE_ERROR)
    ok(rccl.ncclCommAbort(me.comm))


def abort(me: Rank) -> None:
    """An abort ends calls that wait for a peer, including one that never joins; a peer that is alive is no error."""
    assert me.join() == SUCCESS
    if me.rank == 1:
        assert me.all_reduce(1, 100_000)[0] == SUCCESS
        ok(rccl.ncclCommAbort(me.comm))
        ok(hip.hipStreamSynchronize(me.stream))
        return
    ok(rccl.ncclCommDestroy(me.comm))
    me.unique_id = bytes(ok(rccl.ncclGetUniqueId()).internal)
    assert me.join(blocking=False) == IN_PROGRESS
    until(lambda: arrived(me.unique_id) == 1)
    assert me.state() == IN_PROGRESS
    ok(rccl.ncclCommAbort(me.comm))


def arrived(unique_id: bytes) -> int:
    """How many ranks have joined: the second word of the segment."""
    process, file = struct.unpack_from("ii", unique_id)
    with open(f"/proc/{process}/fd/{file}", "rb") as segment:
        return struct.unpack("ii", segment.read(8))[1]


CHECKS: dict[str, tuple[Callable[[Rank], None], list[int]]] = {
    "operations": (operations, [0, 0, 0]),
    "ordered": (ordered, [0, 0]),
    "behind": (behind, [0, 0]),
    "death": (death, [0, -signal.SIGKILL]),
    "death_before_all_came": (death_before_all_came, [0, -signal.SIGKILL, 0]),
    "abort": (abort, [0, 0]),
}


def start(check: str, rank: int, ids: Any) -> None:
    """Main function of a rank's process."""
    function, codes = CHECKS[check]
    if rank == 0:
        unique_id = bytes(ok(rccl.ncclGetUniqueId()).internal)
        for _ in codes[1:]:
            ids.put(unique_id)
    else:
        unique_id = ids.get()
    function(Rank(rank, len(codes), unique_id))


def main(check: str) -> None:
    """Run a check's ranks and compare their exit codes."""
    context = multiprocessing.get_context("spawn")
    ids, codes = context.SimpleQueue(), CHECKS[check][1]
    ranks = [context.Process(target=start, args=(check, rank, ids)) for rank in range(len(codes))]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(2 * PATIENCE)
    found = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert found == codes, found


if __name__ == "__main__":
    main(sys.argv[1])
