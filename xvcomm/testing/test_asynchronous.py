"""Order and waiting on every registered backend whose streams go on behind the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from xvcomm.testing import World, asynchronous, failures, graphs
from xvcomm.testing.cases import is_asynchronous

ISLANDS = ("a:2", "a:1,b:1", "a:2,b:1", "a:2,b:2")


@pytest.fixture(scope="module")
def place(place: tuple[str, str]) -> tuple[str, str]:
    """Device kind and islands of the ranks under test."""
    if not is_asynchronous(place[0]):
        pytest.skip(f"on {place[0]} the host waits for every operation")
    return place


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
