"""The order of an all-gather's steps."""

from __future__ import annotations

import pytest

from xvcomm.schedule import build
from xvcomm.schedule.steps import Buf, Collective, Native, Put, Request
from xvcomm.types.topology import Topology


@pytest.mark.parametrize("labels", ["aabb", "abab", "aabbb"])
def test_equal_blocks_cross_the_border_while_islands_gather(labels: str) -> None:
    """Each rank sends its own block from the input: neither waits for the other, also where input and output coincide."""
    topology = Topology.from_labels(labels)
    request = Request(Collective.ALL_GATHER, 4, counts=(8,) * topology.size)
    for rank in range(topology.size):
        steps = build(request, topology, rank).steps
        sent = [step for step in steps if isinstance(step, Put)]
        assert sent and all(step.src.buf is Buf.IN and not step.after for step in sent)
        gathered = [step for step in steps if isinstance(step, Native) and step.src.buf is Buf.IN]
        assert not any(step.after for step in gathered)
