"""Arrays of each framework on every registered backend, within an island and across a border."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from xvcomm.testing import World, frameworks
from xvcomm.testing.cases import environment, kinds, too_few_devices

ISLANDS = ("a:2", "a:2,b:1")
PLACES = [pytest.param((kind, islands), id=f"{kind}-{islands}") for kind in kinds() for islands in ISLANDS]


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Device kind and islands of the ranks under test."""
    where: tuple[str, str] = request.param
    why = too_few_devices(*where)
    if why:
        pytest.skip(why)
    return where


@pytest.fixture(scope="module")
def world(place: tuple[str, str]) -> Iterator[World]:
    """Ranks that serve all tests of this module."""
    kind, islands = place
    with World(islands=islands, env=environment(kind)) as ranks:
        yield ranks


@pytest.mark.parametrize("framework", sorted({*frameworks.ON_HOST, *frameworks.ON_GPUS}))
def test_arrays_come_out_as_they_went_in(world: World, place: tuple[str, str], framework: str) -> None:
    """Every dtype that the framework has."""
    if framework not in (frameworks.ON_HOST if place[0] == "host" else frameworks.ON_GPUS):
        pytest.skip(f"{framework} has no arrays on {place[0]}")
    why = "".join(world.run(frameworks.missing, framework)[:1])
    if why:
        pytest.skip(why)
    world.run(frameworks.check_collectives, framework)
    world.run(frameworks.check_messages, framework)
