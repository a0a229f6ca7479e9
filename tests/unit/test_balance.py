"""Uneven splits are optimal, respect memory limits, and keep the gradient exact."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xvcomm.errors import ArgumentError
from xvcomm.pipeline.balance import split_layers, split_samples, weights

SPEEDS = st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.3, 7.0]), min_size=1, max_size=4)


def every_cut(layers, stages):
    for inner in combinations(range(1, layers), stages - 1):
        yield tuple(stop - start for start, stop in pairwise((0, *inner, layers)))


def times(counts, costs, speeds):
    ends = np.concatenate(([0.0], np.cumsum(costs)))
    cuts = np.concatenate(([0], np.cumsum(counts)))
    return (ends[cuts[1:]] - ends[cuts[:-1]]) / speeds


@given(
    costs=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 5.0]), min_size=4, max_size=9), speeds=SPEEDS, data=st.data()
)
def test_layers_are_optimal(costs, speeds, data):
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(costs), max_size=len(costs)))
    memory = data.draw(st.lists(st.integers(5, 30), min_size=len(speeds), max_size=len(speeds)))
    fitting = [
        counts
        for counts in every_cut(len(costs), len(speeds))
        if all(times(counts, sizes, np.ones(len(speeds))) <= memory)
    ]
    if not fitting:
        with pytest.raises(ArgumentError, match="do not fit into the memory"):
            split_layers(costs, speeds, memory, sizes)
        return
    counts = split_layers(costs, speeds, memory, sizes)
    assert counts in fitting
    found = times(counts, costs, speeds)
    slowest = min(times(c, costs, speeds).max() for c in fitting)
    assert found.max() == pytest.approx(slowest)
    evenest = min(
        (taken**2).sum() for taken in (times(c, costs, speeds) for c in fitting) if taken.max() <= slowest * (1 + 1e-12)
    )
    assert (found**2).sum() == pytest.approx(evenest)


def test_layers_of_two_vendors():
    assert split_layers(32, (15.2, 16.9)) == (15, 17)
    assert split_layers(32, (1, 1, 1, 1)) == (8, 8, 8, 8)
    assert split_layers(np.int64(32), np.array([1.0, 3.0])) == (8, 24)


def test_memory_moves_layers_from_the_fast_stage():
    assert split_layers(32, (1, 3)) == (8, 24)
    assert split_layers(32, (1, 3), memory=(80e9, 20e9), layer_bytes=1e9) == (12, 20)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((3, (1, 1, 1, 1)), "3 layers cannot fill 4 stages"),
        ((4, (1, 0)), "positive and finite"),
        ((4, (1, float("nan"))), "positive and finite"),
        ((4, ()), "at least one"),
        (([1, -1, 1], (1, 1)), "not negative"),
        ((4, (1, 1), (5, 5)), "go together"),
        ((4, (1, 1), (5, 5, 5), 1), "memory 2 numbers"),
        ((4, (1, 1), (5, 5), (1, 2)), "one number or 4"),
        ((4, (1, 1), (5, -5), 1), "must not be negative"),
        ((4, (1, 1), (1, 2), 1), "do not fit into the memory"),
    ],
)
def test_layers_refused(arguments, complaint):
    with pytest.raises(ArgumentError, match=complaint):
        split_layers(*arguments)


@given(shares=st.integers(1, 12), multiple=st.integers(1, 3), speeds=SPEEDS, data=st.data())
def test_samples_are_optimal(shares, multiple, speeds, data):
    limits = data.draw(st.lists(st.integers(1, 30), min_size=len(speeds), max_size=len(speeds)))
    rooms = [range(multiple, limit + 1, multiple) for limit in limits]
    fitting = [counts for counts in product(*rooms) if sum(counts) == shares * multiple]
    if not fitting:
        with pytest.raises(ArgumentError):
            split_samples(shares * multiple, speeds, multiple, limits)
        return
    counts = split_samples(shares * multiple, speeds, multiple, limits)
    assert counts in fitting
    slowest = min(max(n / s for n, s in zip(c, speeds, strict=True)) for c in fitting)
    assert max(n / s for n, s in zip(counts, speeds, strict=True)) == slowest


def test_samples_of_two_vendors():
    assert split_samples(96, (1, 1, 2, 2)) == (16, 16, 32, 32)
    assert split_samples(96, (1, 1, 2, 2), multiple=8) == (16, 16, 32, 32)
    assert split_samples(10, (1, 1, 1)) == (4, 3, 3)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((10, (1, 1), 4), "multiples of 4"),
        ((10, (1, 1), 0), "multiples of 0"),
        ((2, (1, 1, 1)), "leaves some of 3 ranks without samples"),
        ((8, (1, 1), 1, (3, 4)), "do not hold a batch of 8"),
        ((8, (1, 1), 4, (3, 9)), "do not hold a batch of 8"),
        ((8, (1, 1), 1, (8,)), "1 limits for 2 ranks"),
    ],
)
def test_samples_refused(arguments, complaint):
    with pytest.raises(ArgumentError, match=complaint):
        split_samples(*arguments)


@given(samples=st.lists(st.integers(1, 40), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_weighted_means_are_the_mean_of_the_whole_batch(samples, seed):
    per_sample = np.random.default_rng(seed).normal(size=(sum(samples), 5))
    parts = np.split(per_sample, np.cumsum(samples)[:-1])
    reduced = sum(w * part.mean(axis=0) for w, part in zip(weights(samples), parts, strict=True))
    np.testing.assert_allclose(reduced, per_sample.mean(axis=0), rtol=1e-12, atol=1e-14)


def test_weights_refuse_a_rank_without_samples():
    with pytest.raises(ArgumentError, match="every rank needs at least one"):
        weights((4, 0))
    with pytest.raises(ArgumentError):
        weights(())
