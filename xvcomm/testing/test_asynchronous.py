"""Order and waiting on every registered backend whose streams go on behind the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from xvcomm.testing import World, asynchronous, failures, graphs
from xvcomm.testing.cases import environment, is_asynchronous, kinds, too_few_devices

ISLANDS = ("a:2", "a:1,b:1", "a:2,b:1", "a:2,b:2")
PLACES = [pytest.param((kind, islands), id=f"{kind}-{islands}") for kind in kinds() for islands in ISLANDS]


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Device kind and islands of the ranks under test."""
    where: tuple[str, str] = request.param
    return where


@pytest.fixture(scope="module")
def world(place: tuple[str, str]) -> Iterator[World]:
    """Ranks that serve all tests of this module."""
    kind, islands = place
    if not is_asynchronous(kind):
        pytest.skip(f"on {kind} the host waits for every operation")
    why = too_few_devices(kind, islands)
    if why:
        pytest.skip(why)
    with World(islands=islands, env=environment(kind)) as ranks:
        yield ranks


@pytest.mark.parametrize("check", asynchronous.CHECKS, ids=lambda check: check.__name__)
def test_order(world: World, check: Callable[..., None]) -> None:
    """What is ordered, and who does not wait."""
    world.run(check)


@pytest.mark.parametrize("check", failures.CHECKS, ids=lambda check: check.__name__)
def test_errors(world: World, check: Callable[..., None]) -> None:
    """What goes wrong comes out of `synchronize` and of the next operation."""
    world.run(check)


@pytest.mark.parametrize("check", [graphs.check_graphs, graphs.check_graph_of_many], ids=lambda check: check.__name__)
def test_graphs(world: World, place: tuple[str, str], check: Callable[..., None]) -> None:
    """Operations that were captured."""
    if place[0] not in graphs.CAPTURES:
        pytest.skip(f"nobody has said how graphs are captured on {place[0]}")
    world.run(check)
