"""Pipelines on real processes: the same losses and gradients as in one process, also with a different framework per rank."""

from __future__ import annotations

import numpy as np
import pytest

from xvcomm import pipeline
from xvcomm.errors import XvcommError
from xvcomm.testing import World

WIDTHS = [16, 24, 20, 32, 12, 16, 24, 20, 8]
BATCH = 64
STEPS = 2


def array_functions(framework):
    """A framework's functions that create an array from numpy data, and an uninitialised one."""
    if framework == "torch":
        import torch

        return torch.from_numpy, lambda shape, dtype: torch.empty(shape, dtype=getattr(torch, dtype))
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray, lambda shape, dtype: jnp.empty(shape, dtype)
    return np.asarray, np.empty


class Linear:
    """y = x w in any framework whose arrays have the usual operators; the last stage's loss is the squared distance."""

    def __init__(self, framework, number, depth):
        self.make, self.empty = array_functions(framework)
        self.number, self.last = number, number == depth - 1
        draw = np.random.default_rng(number).normal(size=(WIDTHS[number], WIDTHS[number + 1])) / 4
        self.w = self.make(draw.astype(np.float32))
        self.dw = self.w * 0
        self.input_spec = ((BATCH, WIDTHS[number]), "float32")
        self.output_spec = ((BATCH, WIDTHS[number + 1]), "float32")
        self.saved, self.halves = {}, {}

    def data(self, micro_batch, columns):
        draw = np.random.default_rng((columns, micro_batch)).normal(size=(BATCH, columns))
        return self.make(draw.astype(np.float32))

    def forward(self, x, micro_batch):
        x = self.data(micro_batch, WIDTHS[0]) if self.number == 0 else x
        y = x @ self.w
        self.saved[micro_batch] = x, y
        return float(((y - self.data(micro_batch, y.shape[1])) ** 2).mean()) if self.last else y

    def backward_input(self, dy, micro_batch):
        x, y = self.saved.pop(micro_batch)
        if self.last:
            dy = (y - self.data(micro_batch, y.shape[1])) * (2 / (y.shape[0] * y.shape[1]))
        self.halves[micro_batch] = x, dy
        return dy @ self.w.T if self.number else None

    def backward_weight(self, micro_batch):
        x, dy = self.halves.pop(micro_batch)
        self.dw = self.dw + x.T @ dy

    def backward(self, dy, micro_batch):
        dx = self.backward_input(dy, micro_batch)
        self.backward_weight(micro_batch)
        return dx


def broken(dy, micro_batch):
    raise TypeError("as a stage with an error in it does")


def alone(depth, micro_batches):
    """Losses and weight gradients of one step of all stages in one process, in numpy."""
    stages = [Linear("numpy", number, depth) for number in range(depth)]
    losses = []
    for m in range(micro_batches):
        x = dy = None
        for stage in stages:
            x = stage.forward(x, m)
        losses.append(x)
        for stage in reversed(stages):
            dy = stage.backward(dy, m)
    return losses, [stage.dw for stage in stages]


def run(comm, frameworks, case, fault):
    """One rank: run the pipeline; its losses, or the error, and its stages' gradients."""
    schedule = pipeline.build(case[0], len(frameworks), *case[1:])
    numbers = [schedule.stage(comm.rank, chunk) for chunk in range(schedule.chunks)]
    stages = [Linear(frameworks[comm.rank], number, schedule.depth) for number in numbers]
    if fault == "spec" and comm.rank == 1:
        stages[0].input_spec = ((BATCH, 1), "float32")
    if fault == "raise" and comm.rank == 1:
        stages[0].backward = broken
    report = {}
    with comm:
        try:
            pipe = pipeline.Pipeline(stages, comm, schedule)
            report["losses"] = [pipe.run() for _ in range(STEPS)]
        except (XvcommError, TypeError) as error:
            report["error"] = f"{type(error).__name__}: {error}"
    return report, {stage.number: np.asarray(stage.dw) for stage in stages}


def run_all(frameworks, case, fault="none"):
    """What `run` gives on each rank."""
    # Arithmetic threads of several ranks would only fight for the cores.
    with World(len(frameworks), env={"XVCOMM_DEVICE": "host", "OMP_NUM_THREADS": "1"}, timeout=30) as world:
        return zip(*world.run(run, frameworks, case, fault, timeout=90), strict=True)


@pytest.mark.parametrize(
    ("frameworks", "case"),
    [
        (["numpy"] * 2, ("gpipe", 3, 1)),
        (["numpy"] * 4, ("1f1b", 6, 1)),
        (["numpy"] * 2, ("interleaved", 4, 4)),
        (["numpy"] * 4, ("interleaved", 8, 2)),
        (["numpy"] * 3, ("zero-bubble", 5, 1)),
        (["numpy", "torch", "jax"], ("1f1b", 4, 1)),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
def test_same_losses_and_gradients_as_one_process(frameworks, case):
    for framework in set(frameworks):
        pytest.importorskip(framework)
    reports, computed = run_all(frameworks, case)
    _, micro_batches, chunks = case
    losses, gradients = alone(len(frameworks) * chunks, micro_batches)
    assert all("error" not in report for report in reports), reports
    for step in range(STEPS):
        np.testing.assert_allclose(reports[-1]["losses"][step], losses, rtol=1e-5)
        assert all(report["losses"][step] == [] for report in reports[:-1])
    found = {number: array for arrays in computed for number, array in arrays.items()}
    for number, expected in enumerate(gradients):
        np.testing.assert_allclose(found[number], STEPS * expected, rtol=1e-4, atol=1e-6)


def test_stages_that_disagree_are_refused_on_all_ranks():
    reports, _ = run_all(["numpy"] * 3, ("1f1b", 4, 1), "spec")
    complaint = "ScheduleError: rank 0: SendActivation(micro_batch=0, chunk=0, peer=1) gives 64 x 24 float32"
    assert all(report["error"].startswith(complaint) for report in reports), reports


def test_a_stage_that_raises_ends_all_ranks():
    reports, _ = run_all(["numpy"] * 3, ("1f1b", 4, 1), "raise")
    assert reports[1]["error"].startswith("TypeError")
    for other in (reports[0], reports[2]):
        assert other["error"].startswith("Aborted") and "rank 1" in other["error"], reports
