"""Low-precision reductions on host memory: the sum, product or average of all ranks is rounded once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from xvcomm.testing.world import World
from xvcomm.types.dtype import BY_NAME, DTYPES, FLOAT32, ReduceOp, Reduction

LOW = [dtype.name for dtype in DTYPES if dtype.low_precision]
OPS = ("sum", "avg", "prod", "premul_sum")
FACTORS = (0.75, 3.0, 1.25, 0.5)
PERIOD = 9973
"""After so many elements inputs repeat: a prime, so that no segment begins like another."""
ONE_ISLAND, BORDER = ("a:2", "a:3", "a:4"), ("a:2,b:1", "a:2,b:2", "a,b", "a,b,c", "a:2,b:1,c:1")


def exact(dtype, op, count, seed):
    """Numbers of a dtype that float32 adds and multiplies exactly while their sums do not fit the dtype."""
    random = np.random.default_rng(seed)
    if op == "prod":
        values = random.integers(1, 16, count) / 8.0 * random.choice((-1.0, 1.0), count)
        return values.astype(dtype.numpy)
    digits, span = (11, 4) if dtype.name == "float16" else (4 if "e4m3" in dtype.name else 3, 8)
    if dtype.name == "bfloat16":
        digits, span = 8, 10
    values = random.integers(-(2**digits) + 1, 2**digits, count) * 2.0 ** random.integers(-span, 1, count)
    return values.astype(dtype.numpy)


@dataclass
class Case:
    """Inputs of all ranks, and the float64 result rounded once."""

    how: Reduction
    inputs: list
    result: np.ndarray

    @classmethod
    def of(cls, comm, name, op, count, seed=0):
        dtype, code = BY_NAME[name], ReduceOp[op.upper()]
        inputs = [exact(dtype, op, min(count, PERIOD), 100 * seed + rank) for rank in range(comm.size)]
        terms = [x.astype(np.float64) for x in inputs]
        if op == "premul_sum":
            terms = [x * factor for x, factor in zip(terms, FACTORS, strict=False)]
        total = np.prod(terms, axis=0) if op == "prod" else np.sum(terms, axis=0)
        if op == "avg":
            total = total / comm.size
        with np.errstate(over="ignore"):
            result = total.astype(np.float32).astype(dtype.numpy)
        how = Reduction(code, FACTORS[comm.rank] if op == "premul_sum" else 1.0)
        return cls(how, [np.resize(x, count) for x in inputs], np.resize(result, count))


def same(got, want, what):
    if got.tobytes() == want.tobytes():
        return
    differ = np.flatnonzero(got.astype(np.float32) != want.astype(np.float32))
    differ = [i for i in differ if not (np.isnan(got[i].astype(np.float32)) and np.isnan(want[i].astype(np.float32)))]
    assert not len(differ), (
        f"{what}: {len(differ)} of {want.size}, [{differ[0]}] {got[differ[0]]} for {want[differ[0]]}"
    )


def check(comm, name, ops, counts):
    for op in ops:
        for count in counts:
            count *= comm.size
            case, what = Case.of(comm, name, op, count), f"{op} of {count} {name}"
            mine, how = case.inputs[comm.rank], case.how
            for turn in range(3):  # from the second on prepared, where there is such a way
                out = np.empty_like(mine)
                kept = mine.copy()
                same(comm.all_reduce(mine, how, out=out), case.result, f"all_reduce {what} {turn}")
                assert mine.tobytes() == kept.tobytes(), "the input changed"
            same(comm.all_reduce(mine.copy(), how), case.result, f"all_reduce {what} in place")
            same(
                comm.all_reduce(mine.copy(), how, async_op=True).wait(), case.result, f"all_reduce {what} asynchronous"
            )
            for root in {0, comm.size - 1}:
                found = comm.reduce(mine.copy(), root, how)
                if comm.rank == root:
                    same(found, case.result, f"reduce {what} to {root}")
            own = np.split(case.result, comm.size)[comm.rank]
            same(comm.reduce_scatter(mine.copy(), how), own, f"reduce_scatter {what}")
            counts_ = [count // comm.size] * comm.size
            counts_[0], counts_[-1] = 0, counts_[-1] + counts_[0]
            own = np.split(case.result, np.cumsum(counts_)[:-1])[comm.rank]
            same(comm.reduce_scatter(mine.copy(), how, counts=counts_), own, f"reduce_scatter {what}, uneven")


@pytest.fixture(scope="module", params=ONE_ISLAND + BORDER)
def world(request):
    with World(islands=request.param, timeout=100, preload=["xvcomm.testing.every_reducer"]) as world:
        yield world


@pytest.mark.parametrize("name", LOW)
def test_reductions_round_once(world, name):
    """Small arrays, and large ones in segments and directly between processes."""
    sizes = (1, 37, 300_001) if name in ("float16", "bfloat16") else (1, 1003)
    world.run(check, name, OPS, sizes)


def sums(comm, name, values):
    x = np.full(5, values[comm.rank], BY_NAME[name].numpy)
    return [float(np.asarray(comm.all_reduce(x.copy(), op)).astype(np.float32)[3]) for op in ("sum", "avg")]


def test_small_terms_are_not_lost_inside_an_island():
    """2048 + 1 is 2048 in float16, 256 + 1 is 256 in bfloat16."""
    with World(islands="a:2,b:1") as world:
        assert {tuple(found) for found in world.run(sums, "float16", (2048, 1, 1))} == {(2050.0, 683.5)}
        assert {tuple(found) for found in world.run(sums, "bfloat16", (256, 1, 1))} == {(258.0, 86.0)}
        assert world.run(sums, "float16", (5, 0, 0))[0][1] == float(np.float16(5 / 3))


@pytest.mark.parametrize("islands", ["a:3", "a:2,b:1", "a,b,c"])
def test_an_average_does_not_overflow(islands):
    """The sum leaves the range, the average does not."""
    with World(islands=islands) as world:
        for name, most in (("float16", 65504.0), ("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)):
            for total, average in world.run(sums, name, (most, most, most)):
                assert not np.isfinite(total)
                assert average == most


def near(comm, name, op, count):
    """Numbers of any magnitude: float32 arithmetic, with no further rounding than the last."""
    dtype, terms = BY_NAME[name], []
    for rank in range(comm.size):
        random = np.random.default_rng(rank)
        values = random.standard_normal(count) * 10.0 ** random.integers(-3, 3, count)
        terms.append(values.astype(np.float32).astype(dtype.numpy))
    wide = [x.astype(np.float64) for x in terms]
    sizes = np.abs(wide)
    total, size = (np.prod(wide, axis=0), np.prod(sizes, axis=0)) if op == "prod" else (sum(wide), sizes.sum(axis=0))
    divisor = comm.size if op == "avg" else 1
    error = size * comm.size * np.finfo(np.float32).eps
    low, high = ((total + e) / divisor for e in (-error, error))
    got = comm.all_reduce(terms[comm.rank], op).astype(np.float64)
    least, most = (x.astype(FLOAT32.numpy).astype(dtype.numpy).astype(np.float64) for x in (low, high))
    wrong = np.flatnonzero(~((least <= got) & (got <= most)) & np.isfinite(least) & np.isfinite(most))
    assert not wrong.size, (name, op, wrong.size, got[wrong[0]], least[wrong[0]], most[wrong[0]])


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e5m2"])
def test_numbers_of_any_size(world, name):
    for op in ("sum", "avg", "prod"):
        world.run(near, name, op, 20_011)
