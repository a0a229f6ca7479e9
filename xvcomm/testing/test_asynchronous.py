"""Order and waiting on every registered asynchronous backend."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from xvcomm.testing import World, asynchronous, failures, graphs
from xvcomm.testing.cases import is_asynchronous

ISLANDS = ("a:2", "a:1,b:1", "a:2,b:1", "a:2,b:2")


@pytest.fixture(scope="module")
def place(place: tuple[str, str]) -> tuple[str, str]:
    """Device type and islands of the ranks under test."""
    if not is_asynchronous(place[0]):
        pytest.skip(f"on {place[0]} the host waits for every operation")
    return place


@pytest.mark.parametrize("check", asynchronous.CHECKS, ids=lambda check: check.__name__)
def test_order(world: World, check: Callable[..., None]) -> None:
    """Ordering, and calls that must not wait."""
    world.run(check)


@pytest.mark.parametrize("check", failures.CHECKS, ids=lambda check: check.__name__)
def test_errors(world: World, check: Callable[..., None]) -> None:
    """Errors are raised by `synchronize` and by the next operation."""
    world.run(check)


@pytest.mark.parametrize("check", [graphs.check_graphs, graphs.check_graph_of_many], ids=lambda check: check.__name__)
def test_graphs(world: World, place: tuple[str, str], check: Callable[..., None]) -> None:
    """Captured operations."""
    if place[0] not in graphs.CAPTURES:
        pytest.skip(f"graph capture is not defined for {place[0]}")
    world.run(check)
