"""The trainer of examples/ on two hosts, an island each, over RDMA: the losses of the same job over TCP, and of one process."""

from __future__ import annotations

import itertools
from pathlib import Path

import job
import pytest

import xvcomm

pytestmark = pytest.mark.rdma

STEPS, MICRO_BATCHES = 3, 4
_ports = itertools.count(7400)


@pytest.fixture(scope="module")
def trainer():
    """The trainer's module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
        import train

        yield train


@pytest.fixture
def settings(trainer):
    """Of the training."""
    model = trainer.Model(layers=2, dim=64, heads=4, kv_heads=2, hidden=128, context=32)
    return trainer.Job(
        model, trainer.AdamW(1e-3), ("numpy",), "1f1b", MICRO_BATCHES, sequences=1, chunks=1, layers_per_stage=None,
        steps=STEPS, seed=0,
    )  # fmt: skip


@pytest.fixture
def join(monkeypatch):
    """A function that joins a job of one rank on each host."""

    def joined(**more):
        for name, value in job.settings(next(_ports), **more).items():
            monkeypatch.setenv(name, value)
        return xvcomm.init()

    return joined


class Silent:
    """A meter that shows nothing."""

    def step(self, *figures):
        """Ignore a step's figures."""


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (1, 2)], ids=["stages", "replicas"])
def test_losses(trainer, settings, join, pp, dp):
    """Activations between two stages, or gradients of two replicas."""
    with join(XVCOMM_RDMA="0") as comm:
        over_tcp = trainer.train(comm, trainer.Layout.over(comm.topology, pp, dp), settings, None)
        assert job.by_scheme(comm, "rdma") == 0
    with join(XVCOMM_RDMA="1") as comm:
        job.meet(comm)
        before = job.by_scheme(comm, "tcp"), job.by_scheme(comm, "rdma")
        over_rdma = trainer.train(comm, trainer.Layout.over(comm.topology, pp, dp), settings, None)
        tcp, rdma = job.by_scheme(comm, "tcp") - before[0], job.by_scheme(comm, "rdma") - before[1]
    activations = 4 * MICRO_BATCHES * settings.model.context * settings.model.dim
    gradients = 4 * settings.model.parameters
    assert rdma >= STEPS * (activations if pp > 1 else gradients) and tcp < 1 << 16
    assert over_rdma == over_tcp
    alone = trainer.train_alone(settings.framework(comm.topology, comm.rank), dp, settings, Silent())
    if pp > 1:
        assert over_rdma == alone
    else:  # the gradients' mean is added up in another order
        assert over_rdma == pytest.approx(alone, rel=trainer.TOLERANCE)
