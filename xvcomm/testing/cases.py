"""Topologies, sizes and dtypes of the suites, and inputs whose results are exact in any order of reduction."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from xvcomm.abc.device import Device
from xvcomm.backends.gpu.vendor import Runtime
from xvcomm.comm.communicator import Communicator
from xvcomm.config import Config
from xvcomm.engine.session import plugins
from xvcomm.errors import DTypeError
from xvcomm.testing.arrays import Array
from xvcomm.types.dtype import BY_NAME, DType, ReduceOp, Reduction, reduction_on
from xvcomm.types.topology import parse_islands

ISLANDS = (
    "a:1", "a:2", "a:3", "a:4", "a:1,b:1", "a:2,b:2", "a:1,b:3", "a,b,a,b", "a,b,c", "a:2,b:1,c:1",
)  # fmt: skip
"""One island of each size, two of equal and unequal sizes, in turns, and three."""

EVERY_WAY = ("a:2", "a:3", "a:1,b:1", "a,b,c")
"""Topologies that cover every way to reduce: native pairs and chains, over one border and over several."""

COUNTS = (0, 1, 3, 7, 1000, 65_537, 1_000_003)
"""Elements of an array; the last ones wrap around every ring and stage several times."""

SMALL_GPU_RINGS = {
    "XVCOMM_GPU_RING_SLOTS": "8", "XVCOMM_GPU_RING_SLOT_BYTES": "8192",
    "XVCOMM_PEER_RING_SLOTS": "8", "XVCOMM_PEER_RING_SLOT_BYTES": "8192",
}  # fmt: skip

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def kinds() -> list[str]:
    """Device types of all registered backends that work here."""
    return [found.name for found in plugins.backends() if found.usable]


def environment(kind: str) -> dict[str, str]:
    """Variables for ranks on one device type; rings between GPUs are small, so that messages wrap around often."""
    return {"XVCOMM_DEVICE": kind, **SMALL_GPU_RINGS}


@cache
def _device(kind: str) -> Device:
    return plugins.backend(kind).device(Config())


def is_asynchronous(kind: str) -> bool:
    """Whether operations of such devices run asynchronously to the host."""
    return _device(kind).capabilities().asynchronous


def too_few_devices(kind: str, islands: str) -> str:
    """Why a topology does not fit this machine, or an empty text: every rank needs its own GPU, host ranks need none."""
    runtime, wanted = getattr(_device(kind), "runtime", None), len(parse_islands(islands))
    if isinstance(runtime, Runtime) and runtime.count() < wanted:
        return f"{wanted} ranks on {kind}, and {runtime.count()} devices of that kind"
    return ""


def reductions(dtype: DType) -> list[ReduceOp]:
    """The reductions that are defined for a dtype."""
    found = []
    for op in ReduceOp:
        with contextlib.suppress(DTypeError):
            found.append(reduction_on(Reduction(op), dtype).op)
    return found


def sample(dtype: DType, shape: int | tuple[int, ...], seed: int, most: int = 2, unit: int = 1) -> Array:
    """Integers from -most to most, times `unit`: small enough that sums and products of a few ranks are exact."""
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    least = 0 if dtype.kind == "u" else -most
    values: Array = rng.integers(least, most + 1, shape, dtype=np.int8) * np.int8(unit)
    if dtype.kind == "c":
        return np.asarray(values + 1j * rng.integers(-1, 2, shape, dtype=np.int8)).astype(dtype.numpy)
    return values.astype(dtype.numpy)


def distinct(dtype: DType, shape: int | tuple[int, ...], seed: int) -> Array:
    """Arbitrary bytes, so that elements are distinguishable; for operations that only move data."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    words = np.random.default_rng(seed).integers(0, 1 << 64, -(-nbytes // 8), dtype=np.uint64)
    raw = words.view(np.uint8)[:nbytes]
    values: Array = (raw & np.uint8(1) if dtype.kind == "b" else raw).view(dtype.numpy)
    return values.reshape(shape)


@dataclass(frozen=True, slots=True)
class Reducing:
    """One reduction: its arguments on this rank, every rank's input, and the result."""

    how: Reduction
    inputs: list[Array]
    result: Array

    @classmethod
    def of(cls, comm: Communicator, dtype: str, op: str, shape: int | tuple[int, ...]) -> Reducing:
        """The same inputs and result on all ranks."""
        kind = BY_NAME[dtype]
        code = ReduceOp[op.upper()]
        factors = [1.0] * comm.size
        most, unit = 2, 1
        if code is ReduceOp.PREMUL_SUM:
            factors, most = [2.0 - rank % 2 for rank in range(comm.size)], 1
        elif code is ReduceOp.AVG and kind.kind not in "iu":
            unit = comm.size
        inputs = [sample(kind, shape, seed=rank, most=most, unit=unit) for rank in range(comm.size)]
        how = Reduction(code, factors[comm.rank])
        return cls(how, inputs, expected(code, kind, inputs, factors))


def expected(op: ReduceOp, dtype: DType, inputs: Sequence[Array], factors: Sequence[float]) -> Array:
    """Result of a reduction with one rounding; averages of integers are truncated."""
    wide = np.float32 if dtype.low_precision else dtype.numpy
    terms = [x.astype(wide) for x in inputs]
    if op is ReduceOp.PREMUL_SUM:
        terms = [x * np.asarray(factor).astype(wide) for x, factor in zip(terms, factors, strict=True)]
    total = terms[0]
    for term in terms[1:]:
        total = _combine(op, total, term)
    if op is ReduceOp.AVG:
        total = np.trunc(total / len(inputs)) if dtype.kind in "iu" else total / len(inputs)
    return np.asarray(total).astype(dtype.numpy)


def _combine(op: ReduceOp, a: Array, b: Array) -> Array:
    match op:
        case ReduceOp.PROD:
            return np.multiply(a, b)
        case ReduceOp.MIN:
            return np.minimum(a, b)
        case ReduceOp.MAX:
            return np.maximum(a, b)
        case ReduceOp.BAND:
            return np.bitwise_and(a, b)
        case ReduceOp.BOR:
            return np.bitwise_or(a, b)
        case ReduceOp.BXOR:
            return np.bitwise_xor(a, b)
    return np.add(a, b)


def uneven(count: int, size: int) -> tuple[int, ...]:
    """Unequal rows per rank; with two or more ranks one has none."""
    if size == 1:
        return (count,)
    return tuple(count * ((rank + count) % size) // (size - 1) for rank in range(size))


def assert_equal(got: Any, want: Array, what: str) -> None:
    """Assert equal dtype, shape and values; reports the first difference."""
    found = np.asarray(got)
    assert found.dtype == want.dtype, f"{what}: dtype {found.dtype}, wanted {want.dtype}"
    assert found.shape == want.shape, f"{what}: shape {found.shape}, wanted {want.shape}"
    if _same_bytes(found, want):
        return
    wide = np.float32 if BY_NAME[want.dtype.name].low_precision else want.dtype
    differs = np.flatnonzero(found.ravel().astype(wide) != want.ravel().astype(wide))
    if differs.size:
        at = int(differs[0])
        raise AssertionError(
            f"{what}: {differs.size} of {want.size} elements differ, first [{at}]: "
            f"{found.ravel()[at]}, wanted {want.ravel()[at]}"
        )


def assert_same_bits(got: Any, want: Array, what: str) -> None:
    """Assert equal dtype, shape and bytes, including NaN and signed zeros; for operations that only move data."""
    found = np.asarray(got)
    assert (found.dtype, found.shape) == (want.dtype, want.shape), f"{what}: {found.dtype} {found.shape}"
    assert _same_bytes(found, want), f"{what}: other bytes came out"


def _same_bytes(a: Array, b: Array) -> bool:
    """Whether two arrays of one dtype and shape have the same contents; without copies, since arrays may be large."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return bool(_memcmp(a.ctypes.data, b.ctypes.data, a.nbytes) == 0)
