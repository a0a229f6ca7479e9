"""Partitions are fair, aligned, complete, and intersect correctly."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from xvcomm.schedule.layout import runs
from xvcomm.schedule.partition import Cut, fair, grain, weighted

sizes = st.sampled_from((1, 2, 4, 8, 16))


@given(st.integers(0, 1 << 40), st.integers(1, 200), sizes)
def test_fair_shares_differ_by_one_grain(total: int, parts: int, itemsize: int) -> None:
    cut = fair(total, parts, itemsize)
    assert len(cut.counts) == parts
    assert sum(cut.counts) == cut.total == total
    assert all(offset % grain(itemsize) == 0 or offset == total for offset in cut.offsets)
    assert max(cut.counts) - min(cut.counts) <= 2 * grain(itemsize) - 1  # one grain, and what the end lacks of another


@given(st.integers(0, 10**9), st.lists(st.integers(1, 50), min_size=1, max_size=20), sizes)
def test_weighted_shares_are_proportional(total: int, weights: list[int], itemsize: int) -> None:
    cut = weighted(total, tuple(weights), itemsize)
    assert cut.total == total
    for count, weight in zip(cut.counts, weights, strict=True):
        assert abs(count - total * weight / sum(weights)) <= 2 * grain(itemsize)


counts = st.lists(st.sampled_from((0, 0, 1, 2, 5, 17)), min_size=1, max_size=12)


@given(counts, st.data())
def test_overlaps_tile_the_range_and_name_the_holder(parts: list[int], more: st.DataObject) -> None:
    cut = Cut.of(parts)
    start = more.draw(st.integers(0, cut.total))
    stop = more.draw(st.integers(start, cut.total))
    owner = [index for index, count in enumerate(parts) for _ in range(count)]
    found = list(cut.overlaps(start, stop))
    assert [i for index, lower, upper in found for i in [index] * (upper - lower)] == owner[start:stop]
    assert [x for _, lower, upper in found for x in range(lower, upper)] == list(range(start, stop))
    assert all(cut.holder(lower) == index for index, lower, _ in found)


@given(counts, st.data())
def test_runs_cover_the_blocks_of_the_ranks_once(parts: list[int], more: st.DataObject) -> None:
    blocks = Cut.of(parts)
    ranks = sorted(more.draw(st.sets(st.integers(0, len(parts) - 1))))
    found = runs(ranks, blocks)
    wanted = [x for rank in ranks for x in range(*blocks.part(rank))]
    assert [x for run in found for x in range(run.place, run.place + run.count)] == wanted
    assert [x for run in found for x in range(run.packed, run.packed + run.count)] == list(range(len(wanted)))
    assert all(a.place + a.count < b.place for a, b in pairwise(found))
