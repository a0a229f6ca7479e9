"""Element types and reductions: the table against numpy, and rejected types."""

from __future__ import annotations

import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import xvcomm
from xvcomm.errors import DTypeError
from xvcomm.types.dtype import (
    BY_CODE,
    BY_DLPACK,
    BY_NAME,
    DTYPES,
    DType,
    ReduceOp,
    Reduction,
    from_dlpack,
    from_numpy,
    premul_sum,
    reduction,
    reduction_on,
)

DEFINED = {
    "f": {"sum", "avg", "prod", "min", "max", "premul_sum"},
    "i": {"sum", "avg", "prod", "min", "max", "premul_sum", "band", "bor", "bxor"},
    "u": {"sum", "avg", "prod", "min", "max", "premul_sum", "band", "bor", "bxor"},
    "b": {"sum", "prod", "min", "max", "band", "bor", "bxor"},
    "c": {"sum", "avg", "prod", "premul_sum"},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_table_agrees_with_numpy(dtype: DType) -> None:
    assert dtype.numpy.itemsize == dtype.itemsize
    assert dtype.numpy.name == dtype.name == str(dtype)
    if hasattr(ml_dtypes, dtype.name):
        assert dtype.kind == "f" and dtype.low_precision
    else:
        assert dtype.numpy.kind == dtype.kind
    assert from_numpy(dtype.numpy) is dtype
    assert BY_NAME[dtype.name] is BY_CODE[dtype.code] is dtype
    assert pickle.loads(pickle.dumps(dtype)) is dtype


def test_codes_are_fixed() -> None:
    assert [(d.code, d.name) for d in DTYPES] == list(enumerate([
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
        "float8_e5m2fnuz", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
        "complex64", "complex128",
    ], start=1))  # fmt: skip
    names = ["sum", "prod", "min", "max", "band", "bor", "bxor", "avg", "premul_sum"]
    assert [(int(op), str(op)) for op in ReduceOp] == list(enumerate(names, start=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dlpack_names(dtype: DType) -> None:
    assert dtype.dlpack is not None
    assert dtype.dlpack[1] == 8 * dtype.itemsize
    assert BY_DLPACK[dtype.dlpack] is from_dlpack(*dtype.dlpack, 1) is dtype


@pytest.mark.parametrize("triple", [(2, 32, 4), (2, 128, 1), (0, 4, 1), (99, 8, 1)])
def test_unknown_dlpack_types_are_refused(triple: tuple[int, int, int]) -> None:
    with pytest.raises(DTypeError, match="convert"):
        from_dlpack(*triple)


@pytest.mark.parametrize(
    "name", ["datetime64[s]", "timedelta64[ms]", ">f4", "longdouble", "clongdouble", "S4", "U2", "O", "V8", "f4,i4"]
)
def test_other_numpy_types_are_refused(name: str) -> None:
    with pytest.raises(DTypeError, match="not supported"):
        from_numpy(np.dtype(name))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions_of_each_type(dtype: DType) -> None:
    found = set()
    for op in ReduceOp:
        try:
            assert reduction_on(Reduction(op), dtype).op is op
            found.add(str(op))
        except DTypeError as refused:
            assert str(op) in str(refused)
    assert found == DEFINED[dtype.kind]


@pytest.mark.parametrize("op", [o for o in ReduceOp if o is not ReduceOp.PREMUL_SUM], ids=str)
def test_names_of_reductions(op: ReduceOp) -> None:
    assert reduction(str(op)) == reduction(op.name) == reduction(op) == reduction(Reduction(op)) == Reduction(op)
    assert getattr(xvcomm.ReduceOp, op.name) is op


@pytest.mark.parametrize("name", ["median", "", "premul_sum", ReduceOp.PREMUL_SUM, None, 1.5, b"sum"])
def test_other_reductions_are_refused(name: object) -> None:
    for _ in range(2):
        with pytest.raises(DTypeError, match="premul_sum"):
            reduction_on(name, BY_NAME["float32"])  # type: ignore[arg-type]


def test_base_operation() -> None:
    assert premul_sum(2).base is ReduceOp.SUM
    assert reduction("avg").base is ReduceOp.SUM
    assert reduction("max").base is ReduceOp.MAX


@pytest.mark.parametrize("factor", [0.5, float("inf"), float("-inf"), float("nan")])
def test_factors_that_integers_cannot_hold(factor: float) -> None:
    for name in ("int32", "uint8"):
        with pytest.raises(DTypeError, match="integer"):
            reduction_on(premul_sum(factor), BY_NAME[name])
    for name in ("float32", "float8_e5m2", "complex64"):
        assert reduction_on(premul_sum(factor), BY_NAME[name]).op is ReduceOp.PREMUL_SUM


def test_precision() -> None:
    low = {d.name for d in DTYPES if d.low_precision}
    assert low == {"float16", "bfloat16", *(n for n in BY_NAME if n.startswith("float8"))}


def test_types_of_numpy_need_no_other_module():
    program = "import sys; from xvcomm.types.dtype import FLOAT32; FLOAT32.numpy; assert 'ml_dtypes' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
