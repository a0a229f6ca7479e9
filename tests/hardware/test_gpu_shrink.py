"""Ranks on GPUs are lost, and the others go on, by `shrink` and `grow`: what tests/faults does on the stand-in for GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from growing import restarted
from shrinking import outcomes
from shrinking_gpus import PHASES, PLACES, come_back, survive, survive_and_take_in

from xvcomm.testing import World
from xvcomm.types.topology import parse_islands

pytestmark = pytest.mark.gpu
TAKEN_ALONG = re.compile(r"error_?mps", re.IGNORECASE)
"""In the vendor's name of an error of a process whose GPU's Multi-Process Service has ended because of another process."""


@pytest.fixture(params=PLACES)
def place(job: Callable[..., World], gpus: int, request: pytest.FixtureRequest) -> tuple[World, Sequence[int], bool]:
    """Ranks; those that die; whether islands share GPUs."""
    devices, islands, victims = PLACES[request.param]
    if "graph" in request.node.name and "host" in devices:
        pytest.skip("ranks on host memory have no graphs")
    on_gpus = sum(kind != "host" for kind in parse_islands(devices.format(gpu="cuda")))
    world = job(devices.format(gpu="cuda"), islands)
    request.addfinalizer(world.close)
    return world, victims, on_gpus > gpus


def skip_if_taken_along(failure: AssertionError, shared: bool) -> None:
    """Under CUDA's Multi-Process Service a killed process may end the others of its GPU."""
    if shared and TAKEN_ALONG.search(str(failure)):
        pytest.skip(
            "under CUDA's Multi-Process Service the killed rank took others of its GPU with it: needs more GPUs"
        )


@pytest.mark.parametrize("phase", PHASES)
def test_the_others_go_on(place: tuple[World, Sequence[int], bool], phase: str) -> None:
    """Whatever they were in; operations of the native library end too, and the next communicator uses it again."""
    world, victims, shared = place
    try:
        print("seconds:", outcomes(world, victims, survive, phase, victims))
    except AssertionError as failure:
        skip_if_taken_along(failure, shared)
        raise


def test_lost_ranks_come_back(place: tuple[World, Sequence[int], bool]) -> None:
    """They get the weights from a rank that has stayed."""
    world, victims, shared = place
    joining: tuple[Any, ...] = (tuple(range(world.size)), victims)
    call = survive_and_take_in, "running", victims
    try:
        print("seconds:", restarted(world, victims, *call, join=come_back, joining=joining))
    except AssertionError as failure:
        skip_if_taken_along(failure, shared)
        raise
