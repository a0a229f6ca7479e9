"""Collectives of every registered backend, with ranks in all kinds of topologies."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from xvcomm.testing import World, collectives, mixture, refusals
from xvcomm.testing.cases import COUNTS, EVERY_WAY, reductions
from xvcomm.types.dtype import DTYPES, DType

PRELOAD = ("xvcomm.testing.every_reducer",)
ROWS = (0, 1, 3, 1000, 21_851, 250_007)
DTYPE_NAMES = [str(dtype) for dtype in DTYPES]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("check", [collectives.check_all_reduce, collectives.check_reduce])
def test_reducing(world: World, check: Callable[..., None], count: int) -> None:
    """Sizes from nothing to several rounds of every ring."""
    world.run(check, "float32", "sum", count)


@pytest.mark.parametrize("rows", ROWS)
def test_reduce_scatter(world: World, rows: int) -> None:
    """Blocks from nothing to several rounds of every ring."""
    world.run(collectives.check_reduce_scatter, "float32", "sum", rows)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "check",
    [
        collectives.check_broadcast,
        collectives.check_all_gather,
        collectives.check_gather,
        collectives.check_scatter,
        collectives.check_all_to_all,
    ],
)
def test_moving(world: World, check: Callable[..., None], rows: int) -> None:
    """Blocks from nothing to several rounds of every ring."""
    world.run(check, "float32", rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions(world: World, place: tuple[str, str], dtype: DType) -> None:
    """Every dtype with all of its reductions, in topologies that reduce differently; with one reduction in others."""
    ops = [str(op) for op in reductions(dtype)]
    if place[1] not in EVERY_WAY:
        ops = ops[dtype.code % len(ops) :][:1]
    world.run(collectives.check_reductions, dtype.name, ops)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_moving_dtypes(world: World, dtype: str) -> None:
    """Every dtype, bitwise."""
    for check in (collectives.check_all_gather, collectives.check_all_to_all, collectives.check_broadcast):
        world.run(check, dtype, 1001)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [(d, op) for d in ("float32", "bfloat16") for op in ("sum", "avg", "prod")]
    + [(d, "sum") for d in ("float64", "float16", "float8_e4m3fn")],
)
@pytest.mark.parametrize("count", [501, 70_001])
def test_reproducible(world: World, dtype: str, op: str, count: int) -> None:
    """Bitwise equal results on every rank and in every run."""
    world.run(collectives.check_reproducible, dtype, op, count)


@pytest.mark.parametrize(
    "check",
    [
        collectives.check_averages,
        collectives.check_barrier,
        collectives.check_objects,
        collectives.check_premul_factors,
        collectives.check_split,
        collectives.check_subgroup,
        refusals.check_arrays_refused,
        refusals.check_dtypes_refused,
        refusals.check_arguments_refused,
    ],
)
def test_others(world: World, check: Callable[..., None]) -> None:
    """Checks without a size: barrier, objects, groups, invalid input."""
    world.run(check)


def test_asynchronous(world: World) -> None:
    """Many operations in progress."""
    world.run(collectives.check_async, 40)


def test_mixture(world: World) -> None:
    """Operations of all kinds in random order, waited for in a different order on each rank."""
    world.run(mixture.check_mixture, 3, 60)
