"""Random programs whose ranks die one after the other, in any phase, or at once: the others always go on.

A run is determined by its seed. To repeat one:

    pytest "tests/faults/test_faults_shrink_campaign.py::test_run[17]"

Seeds from 10,000 on are over several hosts, by labels.
"""

import pytest
from shrinking import HOSTS, Plan, play
from stores import variables

from xvcomm.testing.world import World

USUAL, ALL = 8, 100


def seeds(first):
    """Seeds from `first` on, of which those that run only in `make test-slow` are marked."""
    return [first + n if n < USUAL else pytest.param(first + n, marks=pytest.mark.slow) for n in range(ALL)]


@pytest.mark.parametrize("seed", seeds(0) + seeds(HOSTS))
def test_run(seed, tmp_path):
    plan = Plan.of(seed)
    print(plan)
    where = {"hosts": plan.labels} if plan.on_hosts else {"islands": plan.labels}
    with World(**where, env=variables(plan.store, tmp_path / "store"), timeout=100) as world:
        outcomes = world.outcomes(play, seed, timeout=120)
    for rank, outcome in enumerate(outcomes):
        print(f"rank {rank}: {outcome!r}")
        if rank in plan.deaths:
            assert outcome is None or isinstance(outcome, EOFError)
        else:
            assert isinstance(outcome, list), f"rank {rank}: {outcome!r}"
