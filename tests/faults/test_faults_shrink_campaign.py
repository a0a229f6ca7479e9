"""Random programs whose ranks die one after the other, in any phase, or at once: the others always go on.

A run is determined by its seed. To repeat one:

    pytest "tests/faults/test_faults_shrink_campaign.py::test_run[17]"

Seeds from 10,000 on are over several hosts, by labels.
"""

import socket

import pytest
from shrinking import HOSTS, Plan, play

from xvcomm.testing.world import World

USUAL, ALL = 8, 100


def settings(plan, folder):
    """Variables of the ranks."""
    if plan.store == "file":
        folder.mkdir(mode=0o700)
        return {"XVCOMM_STORE": f"file://{folder}"}
    if plan.store == "rank 0":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return {"XVCOMM_STORE": f"tcp://127.0.0.1:{probe.getsockname()[1]}"}
    return {}


def seeds(first):
    """Seeds from `first` on, of which those that run only in `make test-slow` are marked."""
    return [first + n if n < USUAL else pytest.param(first + n, marks=pytest.mark.slow) for n in range(ALL)]


@pytest.mark.parametrize("seed", seeds(0) + seeds(HOSTS))
def test_run(seed, tmp_path):
    plan = Plan.of(seed)
    print(plan)
    where = {"hosts": plan.labels} if plan.on_hosts else {"islands": plan.labels}
    with World(**where, env=settings(plan, tmp_path / "store"), timeout=30) as world:
        outcomes = world.outcomes(play, seed, timeout=120)
    for rank, outcome in enumerate(outcomes):
        print(f"rank {rank}: {outcome!r}")
        if rank in plan.deaths:
            assert outcome is None or isinstance(outcome, EOFError)
        else:
            assert isinstance(outcome, list), f"rank {rank}: {outcome!r}"
