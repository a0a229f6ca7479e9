"""Arrays of each framework in host memory, through collectives and messages, within an island and across a border."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from xvcomm.testing import World, frameworks


@pytest.fixture(scope="module", params=["a:2", "a:2,b:1"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Ranks on host memory that serve all tests of this module."""
    with World(islands=request.param, env={"XVCOMM_DEVICE": "host"}) as ranks:
        yield ranks


@pytest.mark.parametrize("framework", frameworks.NAMES)
def test_arrays_come_out_as_they_went_in(world: World, framework: str) -> None:
    """Every dtype that the framework has."""
    if framework in ("torch", "jax"):
        pytest.importorskip(framework)
    world.run(frameworks.check_collectives, framework)
    world.run(frameworks.check_messages, framework)
