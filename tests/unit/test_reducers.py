"""Reductions of the host backend against numpy and ml_dtypes, for every dtype and operation."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest

from xvcomm.backends.host import reducers
from xvcomm.errors import DTypeError
from xvcomm.types.dtype import BY_NAME, DTYPES, DType, ReduceOp, reduction_on

ELEMENTWISE = [op for op in ReduceOp if op not in (ReduceOp.AVG, ReduceOp.PREMUL_SUM)]


def defined(op: ReduceOp, dtype: DType) -> bool:
    try:
        reduction_on(op, dtype)
    except DTypeError:
        return False
    return True


CASES = [pytest.param(d, op, id=f"{d}-{op}") for d in DTYPES for op in ELEMENTWISE if defined(op, d)]


def sample(dtype: DType, count: int, seed: int) -> np.ndarray:
    """Values of all kinds; for one-byte types all bit patterns, including NaN and infinities."""
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(bool)
    if dtype.itemsize == 1 or dtype.name in ("bfloat16", "float16"):
        bits = rng.integers(0, 1 << (8 * dtype.itemsize), count, dtype=np.uint64)
        return bits.astype(f"u{dtype.itemsize}").view(dtype.numpy)
    if dtype.kind in "iu":
        return rng.integers(0, 1 << 63, count, dtype=np.uint64).astype(dtype.numpy)
    real = rng.standard_normal(count)
    return (
        (real + 1j * rng.standard_normal(count)).astype(dtype.numpy) if dtype.kind == "c" else real.astype(dtype.numpy)
    )


def widen(x: np.ndarray, dtype: DType) -> np.ndarray:
    return x.astype(np.float32) if dtype.low_precision else x


def combine(op: ReduceOp, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        if a.dtype == bool:
            op = {ReduceOp.SUM: ReduceOp.BOR, ReduceOp.PROD: ReduceOp.BAND}.get(op, op)
        return {
            ReduceOp.SUM: np.add, ReduceOp.PROD: np.multiply, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum,
            ReduceOp.BAND: np.bitwise_and, ReduceOp.BOR: np.bitwise_or, ReduceOp.BXOR: np.bitwise_xor,
        }[op](a, b)  # fmt: skip


@functools.cache
def callers() -> tuple[Callable[..., None], Callable[..., None]]:
    """Compiled calls of `reduce_many` and `call_scale`; compiled once, which takes longer than all that they compute here."""
    from numba import njit

    many, one = reducers.reduce_many, reducers.call_scale

    @njit
    def reduce(kit, dst, table, ways, count, itemsize, scratch):  # type: ignore[no-untyped-def]
        many(kit, dst, table, ways, count, itemsize, itemsize, scratch)

    @njit
    def scale(fn, dst, src, count, factor, divisor):  # type: ignore[no-untyped-def]
        one(fn, dst, src, count, factor, divisor)

    return reduce, scale


def run_many(kit: reducers.Kit, dst: np.ndarray, sources: list[np.ndarray]) -> None:
    scratch = np.zeros(reducers.BLOCK * 16, np.uint8)
    table = np.array([s.ctypes.data for s in sources], np.int64)
    numbers = (kit.pair, kit.first, kit.more, kit.last)
    reduce, _ = callers()
    reduce(numbers, dst.ctypes.data, table, len(sources), dst.size, dst.itemsize, scratch.ctypes.data)


def assert_same(got: np.ndarray, want: np.ndarray) -> None:
    if got.dtype.kind in "iub" or got.dtype == bool:
        np.testing.assert_array_equal(got, want)
        return
    if got.dtype.kind == "c":  # numpy divides and multiplies complex numbers by other formulae
        np.testing.assert_allclose(got, want, rtol=8 * np.finfo(got.dtype).eps)
        return
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_pair_matches_numpy(dtype: DType, op: ReduceOp) -> None:
    a, b = sample(dtype, 70_001, 1), sample(dtype, 70_001, 2)
    with np.errstate(all="ignore"):
        want = combine(op, widen(a, dtype), widen(b, dtype)).astype(dtype.numpy)
    kit = reducers.kit(dtype, op)
    for place in ("apart", "first", "second"):
        x, y = a.copy(), b.copy()
        dst = {"apart": np.empty_like(a), "first": x, "second": y}[place]
        run_many(kit, dst, [x, y])
        assert_same(dst, want)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "complex64"])
@pytest.mark.parametrize("ways", [3, 5])
def test_chain_accumulates_wide_and_rounds_once(name: str, ways: int) -> None:
    dtype = next(d for d in DTYPES if d.name == name)
    rng = np.random.default_rng(3)
    sources = [(rng.standard_normal(20_000) * 4).astype(dtype.numpy) for _ in range(ways)]
    total = widen(sources[0], dtype).copy()
    for s in sources[1:]:
        total = total + widen(s, dtype)
    dst = sources[1]
    run_many(reducers.kit(dtype, ReduceOp.SUM), dst, sources)
    assert_same(dst, total.astype(dtype.numpy))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PROD])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("ways", [2, 3, 5])
def test_the_first_nan_wins(name: str, op: ReduceOp, ways: int) -> None:
    """As on GPUs, which get the same bits: also its sign and its further bits."""
    dtype, count = BY_NAME[name], 1000
    nan = int(np.array(np.nan, dtype.numpy).view(np.uint16)) & 0x7FFF
    sources = [np.full(count, nan + way, np.uint16).view(dtype.numpy) for way in range(1, ways + 1)]
    sources[0][::3] = 1
    got = np.empty(count, dtype.numpy)
    run_many(reducers.kit(dtype, op), got, sources)
    want = np.where(np.arange(count) % 3, nan + 1, nan + 2)
    assert (got.view(np.uint16) == want).all()


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.kind != "b"], ids=str)
def test_scale_divides_and_multiplies(dtype: DType) -> None:
    _, scale = callers()
    rng = np.random.default_rng(4)
    low = 0 if dtype.kind == "u" else -40
    x = rng.integers(low, 40, 999).astype(dtype.numpy)
    out = np.empty_like(x)
    scale(reducers.scaler(dtype), out.ctypes.data, x.ctypes.data, x.size, 2.0, 0)
    assert_same(out, (widen(x, dtype) * widen(np.array(2).astype(dtype.numpy), dtype)).astype(dtype.numpy))
    if dtype.kind in "iu":
        x[:2] = np.iinfo(dtype.numpy).min, np.iinfo(dtype.numpy).max
        for ranks in (3, 200):
            scale(reducers.scaler(dtype), out.ctypes.data, x.ctypes.data, x.size, 0.0, ranks)
            assert out.tolist() == [abs(n) // ranks * (-1 if n < 0 else 1) for n in x.tolist()]
    else:
        scale(reducers.scaler(dtype), out.ctypes.data, x.ctypes.data, x.size, 0.0, 3)
        assert_same(out, (widen(x, dtype) / widen(x, dtype).dtype.type(3)).astype(dtype.numpy))
