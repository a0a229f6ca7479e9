"""Actors that hold a communicator, on nodes of both vendors, and go on without those that die.

    python actors.py --actors nvidia=2 amd=2 --steps 100

Here an actor may have an environment of its own on each kind of node, by `py_executable` of its runtime_env.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import ray
import xvcomm_ray

import xvcomm


@ray.remote(max_restarts=0)
class Rank:
    """One rank."""

    def __init__(self, group: str, rank: int, size: int) -> None:
        self.comm = xvcomm_ray.join(group, rank, size)

    def train(self, steps: int) -> dict[str, Any]:
        """Steps until the end; after a loss those that are left agree on the step, and go on."""
        step, agreed, weights, lost = 0, True, np.zeros(4), []
        while step < steps:
            try:
                if not agreed:
                    # Rank 0 of those that are left knows the weights: they are the same on all at the same step.
                    step, weights = self.comm.broadcast_object((step, weights), root=0)
                    agreed = True
                gradient = weights - self.comm.job_ranks[self.comm.rank]
                self.comm.all_reduce(gradient, op="avg")
                weights, step = weights - 0.1 * gradient, step + 1
            except xvcomm.PeerLost as loss:
                lost.append(loss.peer)
                self.comm, agreed = self.comm.shrink(), False
        return {"ranks": list(self.comm.job_ranks), "step": step, "weights": weights.tolist(), "lost": lost}


def start(counts: dict[str, int], group: str, pythons: dict[str, str], **options: Any) -> list[Any]:
    """So many actors on the nodes of each label `vendor`; those of `pythons` with this Python."""
    places = [vendor for vendor, count in counts.items() for _ in range(count)]
    actors = []
    for rank, vendor in enumerate(places):
        own = {"runtime_env": {"py_executable": pythons[vendor]}} if vendor in pythons else {}
        place = Rank.options(label_selector={"vendor": vendor}, **own, **options)
        actors.append(place.remote(group, rank, len(places)))
    return actors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--actors", nargs="+", default=["nvidia=2", "amd=2"])
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    ray.init(runtime_env={"working_dir": "."})
    numbers = {vendor: int(count) for vendor, _, count in (text.partition("=") for text in args.actors)}
    print(ray.get([actor.train.remote(args.steps) for actor in start(numbers, "train", {}, num_gpus=1)]))
