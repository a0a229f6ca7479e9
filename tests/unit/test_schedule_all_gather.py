"""The order of an all-gather's steps."""

from __future__ import annotations

import pytest

from xvcomm.schedule import build
from xvcomm.schedule.steps import Buf, Collective, Get, Native, Put, Request
from xvcomm.types.topology import Topology


@pytest.mark.parametrize("labels", ["aabb", "abab", "abbb", "abc"])
def test_equal_blocks_of_an_all_gather_cross_the_border_before_any_native_call(labels: str) -> None:
    """Each rank sends its own block from the input, and waits for nothing."""
    topology = Topology.from_labels(labels)
    request = Request(Collective.ALL_GATHER, 4, counts=(7,) * topology.size)
    for rank in range(topology.size):
        steps = build(request, topology, rank).steps
        messages = {index for index, step in enumerate(steps) if isinstance(step, Put | Get)}
        assert messages == set(range(len(messages)))
        sent = [step for step in steps if isinstance(step, Put)]
        assert sent and all(step.src.buf is Buf.IN and not step.after for step in sent)
        natives = [step for step in steps if isinstance(step, Native) and step.src.buf is Buf.IN]
        assert not any(messages & set(step.after) for step in natives)
