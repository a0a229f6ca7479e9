"""Element types and reduction operations, each in one table that all backends use.

Names follow numpy and ml_dtypes. Codes appear in messages and in ring ledgers, so a code never changes its meaning.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from xvcomm.errors import DTypeError


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """An element type. Each type has exactly one object, so they are compared with `is`.

    Attributes:
        name: name in numpy or ml_dtypes.
        code: stable number for ledgers and messages.
        itemsize: bytes per element.
        kind: `f` float, `i` signed integer, `u` unsigned integer, `b` bool, `c` complex.
        dlpack: DLPack's `(code, bits)`, or None if DLPack does not define the type.
    """

    name: str
    code: int
    itemsize: int
    kind: str
    dlpack: tuple[int, int] | None

    @property
    def low_precision(self) -> bool:
        """Whether sums of three or more terms accumulate in float32."""
        return self.kind == "f" and self.itemsize < 4

    @property
    def numpy(self) -> Any:
        """The `numpy.dtype`; for bfloat16 and the float8 types it comes from ml_dtypes."""
        return _numpy_dtype(self.name)

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_name, (self.name,)


DTYPES: tuple[DType, ...] = (
    DType("float64", 1, 8, "f", (2, 64)),
    DType("float32", 2, 4, "f", (2, 32)),
    DType("float16", 3, 2, "f", (2, 16)),
    DType("bfloat16", 4, 2, "f", (4, 16)),
    DType("float8_e4m3fn", 5, 1, "f", (10, 8)),
    DType("float8_e4m3fnuz", 6, 1, "f", (11, 8)),
    DType("float8_e5m2", 7, 1, "f", (12, 8)),
    DType("float8_e5m2fnuz", 8, 1, "f", (13, 8)),
    DType("int8", 9, 1, "i", (0, 8)),
    DType("int16", 10, 2, "i", (0, 16)),
    DType("int32", 11, 4, "i", (0, 32)),
    DType("int64", 12, 8, "i", (0, 64)),
    DType("uint8", 13, 1, "u", (1, 8)),
    DType("uint16", 14, 2, "u", (1, 16)),
    DType("uint32", 15, 4, "u", (1, 32)),
    DType("uint64", 16, 8, "u", (1, 64)),
    DType("bool", 17, 1, "b", (6, 8)),
    DType("complex64", 18, 8, "c", (5, 64)),
    DType("complex128", 19, 16, "c", (5, 128)),
)

BY_NAME = {d.name: d for d in DTYPES}
BY_CODE = {d.code: d for d in DTYPES}
BY_DLPACK = {d.dlpack: d for d in DTYPES if d.dlpack is not None}
UINT8, INT64, FLOAT32 = BY_NAME["uint8"], BY_NAME["int64"], BY_NAME["float32"]


def _by_name(name: str) -> DType:
    return BY_NAME[name]


@cache
def _numpy_dtype(name: str) -> Any:
    import numpy as np

    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # imported only for types that numpy lacks, because the import takes time

        return np.dtype(getattr(ml_dtypes, name))


@cache
def from_numpy(dtype: Any) -> DType:
    """The DType of a `numpy.dtype`, including those of ml_dtypes.

    Raises:
        DTypeError: xvcomm does not support this type.
    """
    found = BY_NAME.get(dtype.name)
    if found is None or not dtype.isnative:
        raise DTypeError(f"dtype {dtype} is not supported by xvcomm; convert the array to one of {', '.join(BY_NAME)}")
    return found


def from_dlpack(code: int, bits: int, lanes: int) -> DType:
    """The DType of a DLPack type triple.

    Raises:
        DTypeError: xvcomm does not support this type.
    """
    found = BY_DLPACK.get((code, bits)) if lanes == 1 else None
    if found is None:
        raise DTypeError(
            f"DLPack type (code {code}, {bits} bits, {lanes} lanes) is not supported by xvcomm; "
            f"convert the array to one of {', '.join(BY_NAME)}"
        )
    return found


class ReduceOp(enum.IntEnum):
    """Reduction operations. The values are stable: ring ledgers contain them."""

    SUM = 1
    PROD = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    AVG = 8
    PREMUL_SUM = 9

    __hash__ = int.__hash__  # Enum.__hash__ is a Python function, too slow for the keys of plan lookups

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction with its parameters: the operation, and for `premul_sum` this rank's factor."""

    op: ReduceOp
    factor: float = 1.0

    @property
    def base(self) -> ReduceOp:
        """The element-wise operation without the scaling: SUM for AVG and PREMUL_SUM."""
        return ReduceOp.SUM if self.op in (ReduceOp.AVG, ReduceOp.PREMUL_SUM) else self.op


def premul_sum(factor: float) -> Reduction:
    """The sum of every rank's array times that rank's `factor` (NCCL's ncclRedOpCreatePreMulSum)."""
    return Reduction(ReduceOp.PREMUL_SUM, float(factor))


def reduction(op: str | ReduceOp | Reduction) -> Reduction:
    """Convert a name, a `ReduceOp` or a `Reduction` to a Reduction.

    Names are `"sum"`, `"avg"`, `"prod"`, `"min"`, `"max"`, `"band"`, `"bor"`, `"bxor"`.

    Raises:
        DTypeError: no reduction has this name.
    """
    if isinstance(op, Reduction):
        return op
    if isinstance(op, str) and op != "premul_sum":
        found = ReduceOp.__members__.get(op.upper())
        if found is not None:
            return Reduction(found)
    elif isinstance(op, ReduceOp) and op is not ReduceOp.PREMUL_SUM:
        return Reduction(op)
    names = ", ".join(str(o) for o in ReduceOp if o is not ReduceOp.PREMUL_SUM)
    raise DTypeError(f"unknown reduction {op!r}; use one of {names}, or xvcomm.premul_sum(factor)")


_BITWISE = frozenset((ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR))
_ORDERED = frozenset((ReduceOp.MIN, ReduceOp.MAX))


@lru_cache(maxsize=1024)
def reduction_on(op: str | ReduceOp | Reduction, dtype: DType) -> Reduction:
    """Convert `op` to a Reduction, and check that it is defined on `dtype`.

    Raises:
        DTypeError: no reduction has this name, it is not defined on the dtype, or an integer dtype gets a fractional factor.
    """
    found = reduction(op)
    if found.op in _BITWISE and dtype.kind in "fc":
        raise DTypeError(f"{found.op} is defined on integers and bool only, not on {dtype}")
    if found.op in _ORDERED and dtype.kind == "c":
        raise DTypeError(f"{found.op} is not defined on {dtype}: complex numbers have no order; reduce their parts")
    if found.op in (ReduceOp.AVG, ReduceOp.PREMUL_SUM) and dtype.kind == "b":
        raise DTypeError(f"{found.op} is not defined on bool; convert the array to a number first")
    if dtype.kind in "iu" and not found.factor.is_integer():
        raise DTypeError(f"premul_sum({found.factor}) on {dtype}: the factor must be an integer; convert the array")
    return found
