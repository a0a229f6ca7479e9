"""This host's rank of two jobs that train alike, for `test_rdma_direct_hosts`: their GPUs are the stand-in's, and the rings of
the first lie in the memory of these. What computes is numpy, on copies in host memory; what crosses goes from GPU to GPU.

Arguments: stages, replicas, a port for each job. Prints the losses of both jobs and of one process, as JSON.
"""

import json
import os
import sys
from pathlib import Path

import job
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train
from llama.numpy_stage import NumpyPart

import xvcomm
from xvcomm.testing import inside
from xvcomm.testing.arrays import DeviceArray, arrays

STEPS, MICRO_BATCHES = 3, 4
MODEL = train.Model(layers=2, dim=64, heads=4, kv_heads=2, hidden=128, context=32)


def part_on(a):
    """The class of a part that gives and takes arrays in a GPU's memory."""

    def here(x):
        return a.get(x) if isinstance(x, DeviceArray) else x

    class Namespace:
        """What `Stage` asks of `arrays`."""

        @staticmethod
        def concatenate(parts):
            return a.put(np.concatenate(parts))

    class OnGpu(NumpyPart):
        """See `llama.stage.Framework`."""

        arrays = Namespace

        @staticmethod
        def settle(device, index):
            """It computes on copies."""

        @staticmethod
        def empty(shape):
            return a.put(np.zeros(shape, np.float32))

        def forward(self, x, targets):
            y, saved = super().forward(here(x), targets)
            return (y if self.part.predicts else a.put(y)), saved

        def backward(self, saved, dy):
            dx, gradients = super().backward(saved, here(dy))
            return (None if self.part.embeds else a.put(dx)), gradients

        def update(self, gradients, step):
            super().update({name: here(gradient) for name, gradient in gradients.items()}, step)

    return OnGpu


def settings():
    """Of the training."""
    return train.Job(
        MODEL, train.AdamW(1e-3), ("numpy",), "1f1b", MICRO_BATCHES, sequences=1, chunks=1, layers_per_stage=None,
        steps=STEPS, seed=0,
    )  # fmt: skip


def train_over_rdma(pp, dp, port, direct):
    """The losses of a job, whose rings lie where it is wanted, and whose bytes go over RDMA."""
    os.environ.update(job.settings(port, XVCOMM_DEVICE="rocm", XVCOMM_DEVICE_DIRECT=str(int(direct))))
    with xvcomm.init() as comm:
        job.meet(comm)
        before = job.by_scheme(comm, "rdma")
        kind = part_on(arrays(comm))
        train.framework = lambda name: kind
        losses = train.train(comm, train.Layout.over(comm.topology, pp, dp), settings(), None)
        elements = MICRO_BATCHES * MODEL.context * MODEL.dim if pp > 1 else MODEL.parameters
        assert job.by_scheme(comm, "rdma") - before >= STEPS * 4 * elements, inside.network(comm).paths()
        contexts = inside.context(comm).session.supervision.contexts()
        placed = {end.layout.apart for context in contexts if context.path != "0" for end in context.rings.ends()}
        assert placed == {direct}, placed
        comm.barrier()
    return losses


class Silent:
    """A meter that shows nothing."""

    def step(self, *figures):
        """Ignore a step's figures."""


def main():
    """Train, and say what was found."""
    pp, dp, *ports = map(int, sys.argv[1:])
    found = [train_over_rdma(pp, dp, port, direct) for port, direct in zip(ports, (True, False), strict=True)]
    print(json.dumps([*found, train.train_alone(NumpyPart, dp, settings(), Silent())]))


main()
