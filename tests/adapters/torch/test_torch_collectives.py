"""Every collective of `torch.distributed` in every dtype, against results computed in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torchchecks import DTYPES, FLOATS, FLOATS8, GLOO_REDUCES, combined, me, noise, reduction, same, size, small
from torchjobs import BACKEND, Job

ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX")
BITWISE = ("BAND", "BOR", "BXOR")
REDUCED = GLOO_REDUCES if BACKEND == "gloo" else DTYPES
MOVED = (*GLOO_REDUCES, "bool") if BACKEND == "gloo" else DTYPES


def operations(dtype: str) -> tuple[str, ...]:
    """The reductions that are defined for a dtype."""
    if dtype.startswith("complex"):
        return ("SUM",)
    integers = dtype == "bool" or "int" in dtype
    average = () if dtype == "bool" or BACKEND == "gloo" else ("AVG",)
    return (*ARITHMETIC, *average, *(BITWISE if integers else ()))


def every(op: str, dtype: str, shape: tuple[int, ...], factor: float = 1.0) -> torch.Tensor:
    """The reduction over all ranks."""
    return combined(op, [small(dtype, shape, rank) for rank in range(size())], factor)


def all_reduces(dtype: str) -> None:
    for op in operations(dtype):
        for shape in ((4,), (3, 5), (), (1000,)):
            x = small(dtype, shape, me())
            assert dist.all_reduce(x, reduction(op)) is None
            same(x, every(op, dtype, shape))


@pytest.mark.parametrize("dtype", REDUCED)
def test_all_reduce(pair: Job, dtype: str) -> None:
    pair.run(all_reduces, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_all_reduce_on_four_ranks(four: Job, dtype: str) -> None:
    four.run(all_reduces, dtype)


def test_all_reduce_in_one_island(island: Job) -> None:
    island.run(all_reduces, "float32")


def rounded_sums(dtype: str) -> None:
    kind = getattr(torch, dtype)
    x = noise(me(), 999).to(kind)
    dist.all_reduce(x)
    same(x, sum(noise(rank, 999).to(kind).to(torch.float64) for rank in range(size())).to(kind))


@pytest.mark.parametrize("dtype", [d for d in (*FLOATS, *FLOATS8) if d in REDUCED])
def test_sums_are_rounded_once(pair: Job, dtype: str) -> None:
    pair.run(rounded_sums, dtype)


def premultiplied(factor: float, dtype: str) -> None:
    x = small(dtype, (10,), me())
    dist.all_reduce(x, reduction("PREMUL_SUM", factor))
    same(x, every("PREMUL_SUM", dtype, (10,), factor))
    parts, out = small(dtype, (size() * 3,), me()), torch.zeros(3, dtype=getattr(torch, dtype))
    dist.reduce_scatter_tensor(out, parts, reduction("PREMUL_SUM", factor))
    same(out, every("PREMUL_SUM", dtype, (size() * 3,), factor)[me() * 3 : me() * 3 + 3])


@pytest.mark.not_gloo("PREMUL_SUM")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("factor", [2.0, 0.25])
def test_premultiplied_sum(pair: Job, factor: float, dtype: str) -> None:
    pair.run(premultiplied, factor, dtype)


def premultiplied_by_tensors() -> None:
    dist.all_reduce(x := small("float32", (10,), me()), dist._make_nccl_premul_sum(torch.tensor(0.5)))
    same(x, every("PREMUL_SUM", "float32", (10,), 0.5))


@pytest.mark.not_gloo("PREMUL_SUM")
def test_premultiplied_sum_by_a_tensor(pair: Job) -> None:
    pair.run(premultiplied_by_tensors)


def reduces(dtype: str) -> None:
    for op in operations(dtype):
        for root in range(size()):
            x = small(dtype, (3, 4), me())
            dist.reduce(x, root, reduction(op))
            if me() == root:
                same(x, every(op, dtype, (3, 4)))


@pytest.mark.parametrize("dtype", REDUCED)
def test_reduce(pair: Job, dtype: str) -> None:
    pair.run(reduces, dtype)


def reduce_scatters(dtype: str) -> None:
    n, kind = size(), getattr(torch, dtype)
    for op in operations(dtype):
        x, expected = small(dtype, (n * 2, 3), me()), every(op, dtype, (n * 2, 3)).chunk(n)[me()]
        dist.reduce_scatter_tensor(out := torch.zeros(2, 3, dtype=kind), x, reduction(op))
        same(out, expected)
        same(x, small(dtype, (n * 2, 3), me()))
        dist.reduce_scatter(out := torch.zeros(2, 3, dtype=kind), list(x.chunk(n)), reduction(op))
        same(out, expected)
        dist.reduce_scatter_tensor(x.chunk(n)[me()], x, reduction(op))
        same(x.chunk(n)[me()], expected)


@pytest.mark.parametrize("dtype", REDUCED)
def test_reduce_scatter(pair: Job, dtype: str) -> None:
    pair.run(reduce_scatters, dtype)


def test_reduce_scatter_on_four_ranks(four: Job) -> None:
    four.run(reduce_scatters, "float32")


def gathers(dtype: str) -> None:
    n, kind = size(), getattr(torch, dtype)
    x, all_of = small(dtype, (2, 3), me()), [small(dtype, (2, 3), rank) for rank in range(n)]
    dist.all_gather(out := [torch.zeros(2, 3, dtype=kind) for _ in range(n)], x)
    for found, expected in zip(out, all_of, strict=True):
        same(found, expected)
    dist.all_gather_into_tensor(flat := torch.zeros(2 * n, 3, dtype=kind), x)
    same(flat, torch.cat(all_of))
    place = torch.zeros(2 * n, 3, dtype=kind)
    place.chunk(n)[me()].copy_(x)
    dist.all_gather_into_tensor(place, place.chunk(n)[me()])
    same(place, torch.cat(all_of))
    for root in range(n):
        into = [torch.zeros(2, 3, dtype=kind) for _ in range(n)] if me() == root else None
        dist.gather(x, into, root)
        for found, expected in zip(into or [], all_of, strict=me() == root):
            same(found, expected)


@pytest.mark.parametrize("dtype", MOVED)
def test_gather_and_all_gather(pair: Job, dtype: str) -> None:
    pair.run(gathers, dtype)


def test_gather_and_all_gather_on_four_ranks(four: Job) -> None:
    four.run(gathers, "int32")


def stacked(dtype: str) -> None:
    n, kind = size(), getattr(torch, dtype)
    x, all_of = small(dtype, (2, 3), me()), [small(dtype, (2, 3), rank) for rank in range(n)]
    dist.all_gather_into_tensor(out := torch.zeros(n, 2, 3, dtype=kind), x)
    same(out, torch.stack(all_of))
    dist.reduce_scatter_tensor(found := torch.zeros(2, 3, dtype=kind), small(dtype, (n, 2, 3), me()))
    same(found, every("SUM", dtype, (n, 2, 3))[me()])
    dist.all_to_all_single(out, small(dtype, (n, 2, 3), me()))
    same(out, torch.stack([small(dtype, (n, 2, 3), rank)[me()] for rank in range(n)]))


@pytest.mark.not_gloo("a dimension of ranks")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_tensors_with_a_dimension_of_ranks(pair: Job, dtype: str) -> None:
    pair.run(stacked, dtype)


def spreads(dtype: str) -> None:
    n, kind = size(), getattr(torch, dtype)
    for root in range(n):
        x = small(dtype, (2, 3), me())
        dist.broadcast(x, root)
        same(x, small(dtype, (2, 3), root))
        parts = [small(dtype, (2, 3), rank + 1) for rank in range(n)] if me() == root else None
        dist.scatter(out := torch.zeros(2, 3, dtype=kind), parts, root)
        same(out, small(dtype, (2, 3), me() + 1))


@pytest.mark.parametrize("dtype", MOVED)
def test_broadcast_and_scatter(pair: Job, dtype: str) -> None:
    pair.run(spreads, dtype)


def test_broadcast_and_scatter_on_four_ranks(four: Job) -> None:
    four.run(spreads, "float32")


def exchanges(dtype: str) -> None:
    n, kind, mine = size(), getattr(torch, dtype), me()
    x = small(dtype, (n * 2, 3), mine)
    dist.all_to_all_single(out := torch.zeros(n * 2, 3, dtype=kind), x)
    same(out, torch.cat([small(dtype, (n * 2, 3), rank).chunk(n)[mine] for rank in range(n)]))
    # Rank a gives rank b (a + 2b) % 3 rows: uneven, none at times.
    give = [(mine + 2 * rank) % 3 for rank in range(n)]
    take = [(rank + 2 * mine) % 3 for rank in range(n)]
    x, out = small(dtype, (sum(give), 3), mine), torch.zeros(sum(take), 3, dtype=kind)
    expected = []
    for rank in range(n):
        rows = [(rank + 2 * other) % 3 for other in range(n)]
        expected.append(small(dtype, (sum(rows), 3), rank).split(rows)[mine])
    dist.all_to_all_single(out, x, take, give)
    same(out, torch.cat(expected))


@pytest.mark.parametrize("dtype", MOVED)
def test_all_to_all_single(pair: Job, dtype: str) -> None:
    pair.run(exchanges, dtype)


def test_all_to_all_single_on_four_ranks(four: Job) -> None:
    four.run(exchanges, "float32")


def exchanges_lists(dtype: str) -> None:
    n, kind, mine = size(), getattr(torch, dtype), me()
    x = [small(dtype, (2, 3), mine * n + rank) for rank in range(n)]
    dist.all_to_all(out := [torch.zeros(2, 3, dtype=kind) for _ in range(n)], x)
    for rank in range(n):
        same(out[rank], small(dtype, (2, 3), rank * n + mine))
    x = [small(dtype, (mine + rank,), mine * n + rank) for rank in range(n)]
    dist.all_to_all(out := [torch.zeros(mine + rank, dtype=kind) for rank in range(n)], x)
    for rank in range(n):
        same(out[rank], small(dtype, (mine + rank,), rank * n + mine))


@pytest.mark.not_gloo("all_to_all of lists")
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_to_all_of_lists(pair: Job, dtype: str) -> None:
    pair.run(exchanges_lists, dtype)


@pytest.mark.not_gloo("all_to_all of lists")
def test_all_to_all_of_lists_on_four_ranks(four: Job) -> None:
    four.run(exchanges_lists, "float32")


def uneven_gather_and_scatter() -> None:
    n, mine = size(), me()
    out = [torch.zeros(rank + 1, 2) for rank in range(n)]
    dist.all_gather(out, noise(mine, mine + 1, 2))
    for rank in range(n):
        same(out[rank], noise(rank, rank + 1, 2))
    parts = [small("float32", (rank + 1, 2), mine + rank) for rank in range(n)]
    dist.reduce_scatter(found := torch.zeros(mine + 1, 2), parts)
    same(found, combined("SUM", [small("float32", (mine + 1, 2), rank + mine) for rank in range(n)]))
    dist.reduce_scatter(found := torch.zeros(mine + 1, 2), parts, dist.ReduceOp.MAX)
    same(found, combined("MAX", [small("float32", (mine + 1, 2), rank + mine) for rank in range(n)]))


@pytest.mark.not_gloo("uneven all_gather and reduce_scatter")
def test_lists_of_unequal_sizes(pair: Job, four: Job) -> None:
    pair.run(uneven_gather_and_scatter)
    four.run(uneven_gather_and_scatter)


def waits_for_all() -> None:
    for _ in range(20):
        dist.barrier()
    assert dist.barrier(async_op=True).wait()


def test_barrier(pair: Job, four: Job) -> None:
    pair.run(waits_for_all)
    four.run(waits_for_all)
