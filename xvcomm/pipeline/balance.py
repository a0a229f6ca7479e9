"""Load balancing for ranks of different speed: layers per stage, samples per rank, and weights that keep the gradient exact."""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from xvcomm.errors import ArgumentError

__all__ = ["split_layers", "split_samples", "weights"]


def split_layers(
    layers: int | Sequence[float],
    speeds: Sequence[float],
    memory: Sequence[float] | None = None,
    layer_bytes: float | Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Number of consecutive layers for each stage of a pipeline that minimizes the time of the slowest stage.

    Stage i with layers S_i takes t_i = (sum of cost_j for j in S_i) / speed_i. The result minimizes max t_i over all divisions
    that give every stage at least one layer and respect memory_i; among those it minimizes the sum of t_i squared, which is the
    most even one. Both are exact (dynamic programming, O(layers squared x stages)).

    Args:
        layers: number of equal layers, or the cost of each in model order (embedding and head may count as layers).
        speeds: of each stage, in layers (or cost) per second; only ratios matter.
        memory: bytes that each stage has for its layers: weights, gradients, optimizer state, and activations of all
            micro-batches in flight; no limit by default.
        layer_bytes: bytes that a layer needs, one number or one per layer; required with `memory`.

    Returns:
        Layers per stage; their sum is the number of layers.

    Raises:
        ArgumentError: an argument is out of range, there are fewer layers than stages, or the memory does not suffice.
    """
    costs = [float(c) for c in layers] if isinstance(layers, Sequence) else [1.0] * operator.index(layers)
    speeds = _checked(speeds)
    if any(not 0 <= cost < math.inf for cost in costs):
        raise ArgumentError("costs of layers must be finite and not negative")
    if len(costs) < len(speeds):
        raise ArgumentError(f"{len(costs)} layers cannot fill {len(speeds)} stages; use fewer stages")
    ends = [0.0, *accumulate(costs)]
    fits = _memory_rule(len(costs), len(speeds), memory, layer_bytes)

    def time(stage: int, start: int, stop: int) -> float:
        return (ends[stop] - ends[start]) / speeds[stage] if fits(stage, start, stop) else math.inf

    slowest, _ = _best_cuts(len(costs), len(speeds), time, max)
    if slowest == math.inf:
        raise ArgumentError(
            f"{len(costs)} layers do not fit into the memory of {len(speeds)} stages {tuple(memory or ())}; "
            f"use more stages, smaller micro-batches, or fewer bytes per layer"
        )

    def unevenness(stage: int, start: int, stop: int) -> float:
        taken = time(stage, start, stop)
        return taken * taken if taken <= slowest else math.inf

    _, cuts = _best_cuts(len(costs), len(speeds), unevenness, lambda before, this: before + this)
    return tuple(stop - start for start, stop in pairwise(cuts))


def _best_cuts(
    layers: int, stages: int, cost: Callable[[int, int, int], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The minimum total cost of dividing `layers` into `stages` non-empty runs, and the boundaries including both ends."""
    best = [0.0] + [math.inf] * layers
    choices: list[list[int]] = []
    for stage in range(stages):
        totals, starts = [math.inf] * (layers + 1), [0] * (layers + 1)
        for stop in range(stage + 1, layers - (stages - stage - 1) + 1):
            for start in range(stage, stop):
                total = join(best[start], cost(stage, start, stop)) if best[start] < math.inf else math.inf
                if total < totals[stop]:
                    totals[stop], starts[stop] = total, start
        best = totals
        choices.append(starts)
    cuts = [layers]
    for starts in reversed(choices):
        cuts.append(starts[cuts[-1]])
    return best[layers], cuts[::-1]


def _memory_rule(
    layers: int, stages: int, memory: Sequence[float] | None, layer_bytes: float | Sequence[float] | None
) -> Callable[[int, int, int], bool]:
    if (memory is None) != (layer_bytes is None):
        raise ArgumentError("memory and layer_bytes go together: give both or neither")
    if memory is None or layer_bytes is None:
        return lambda stage, start, stop: True
    sizes = list(layer_bytes) if isinstance(layer_bytes, Sequence) else [layer_bytes] * layers
    limits = list(memory)
    if len(sizes) != layers or len(limits) != stages:
        raise ArgumentError(
            f"layer_bytes needs one number or {layers}, memory {stages} numbers; given are {len(sizes)} and {len(limits)}"
        )
    if any(not size >= 0 for size in sizes) or any(not limit >= 0 for limit in limits):
        raise ArgumentError("memory and layer_bytes must not be negative")
    ends = [0.0, *accumulate(sizes)]
    return lambda stage, start, stop: ends[stop] - ends[start] <= limits[stage]


def split_samples(
    batch: int, speeds: Sequence[float], multiple: int = 1, limits: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Number of samples of a batch for each data-parallel rank that minimizes the time of the slowest rank.

    Minimizes max n_i / speed_i over n_i >= 1 with sum n_i = batch. Exact: each share is given to the rank that finishes it
    first. Average the ranks' mean gradients with `weights` of the result, not with `op="avg"`.

    Args:
        batch: total number of samples.
        speeds: of each rank, in samples per second; only ratios matter.
        multiple: every n_i is a multiple of it, for instance the micro-batches per step.
        limits: maximum number of samples that each rank's memory can hold; no limit by default.

    Returns:
        Samples per rank; their sum is `batch`.

    Raises:
        ArgumentError: `batch` is not a multiple of `multiple`, leaves a rank without samples, or exceeds the limits.
    """
    speeds = _checked(speeds)
    if multiple < 1 or batch % multiple:
        raise ArgumentError(f"a batch of {batch} cannot be cut into multiples of {multiple}; change one of them")
    shares = batch // multiple
    if shares < len(speeds):
        raise ArgumentError(
            f"a batch of {batch} in multiples of {multiple} leaves some of {len(speeds)} ranks without samples"
        )
    room = [shares] * len(speeds) if limits is None else [int(limit) // multiple for limit in limits]
    if len(room) != len(speeds):
        raise ArgumentError(f"{len(room)} limits for {len(speeds)} ranks; give one per rank")
    if min(room) < 1 or sum(room) < shares:
        raise ArgumentError(
            f"limits {tuple(limits or ())} do not hold a batch of {batch} in multiples of {multiple} with samples on "
            f"every rank; use a smaller batch or other ranks"
        )
    taken = [1] * len(speeds)
    ends = [(2 / speed, rank) for rank, speed in enumerate(speeds) if room[rank] > 1]
    heapq.heapify(ends)
    for _ in range(shares - len(speeds)):
        rank = ends[0][1]
        taken[rank] += 1
        if taken[rank] < room[rank]:
            heapq.heapreplace(ends, ((taken[rank] + 1) / speeds[rank], rank))
        else:
            heapq.heappop(ends)
    return tuple(n * multiple for n in taken)


def weights(samples: Sequence[int]) -> tuple[float, ...]:
    """Each rank's factor for `premul_sum` such that uneven batches give the gradient of the whole batch.

    With n_i samples and the mean gradient g_i on rank i, and N = sum n_i, the mean over all samples is sum over i of (n_i / N)
    g_i; so the factor of rank i is n_i / N:

        comm.all_reduce(gradient, op=xvcomm.premul_sum(weights(samples)[comm.rank]))

    Args:
        samples: n_i, as returned by `split_samples`.

    Raises:
        ArgumentError: a rank has no samples, so its mean gradient does not exist.
    """
    if not samples or any(n < 1 for n in samples):
        raise ArgumentError(f"samples {tuple(samples)}: every rank needs at least one, else it has no mean gradient")
    total = sum(samples)
    return tuple(n / total for n in samples)


def _checked(speeds: Sequence[float]) -> list[float]:
    values = [float(speed) for speed in speeds]
    if not values or any(not 0 < value < math.inf for value in values):
        raise ArgumentError(f"speeds {tuple(speeds)}: give at least one, all positive and finite")
    return values
