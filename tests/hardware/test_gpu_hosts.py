"""Ranks on GPUs over several hosts by label: what crosses between GPUs of one machine goes by TCP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import between_hosts
import pytest

from xvcomm.testing import World

pytestmark = pytest.mark.gpu

PLACES = {
    "1 and 1": ("cuda:2", "a,b", "x,y"),
    "one island of 2": ("cuda:2", "a:2", "x,y"),
    "2 and 2 in turns": ("cuda:4", "a,b,a,b", "x,x,y,y"),
    "cuda and rocm": ("cuda:1,rocm:1", None, "x,y"),
    "cuda and host": ("cuda:1,host:1", None, "x,y"),
}


@pytest.fixture(scope="module", params=PLACES)
def world(job: Callable[..., World], request: pytest.FixtureRequest) -> Iterator[World]:
    """Ranks for all checks of one placement."""
    devices, islands, hosts = PLACES[request.param]
    with job(devices, islands, hosts=hosts) as ranks:
        yield ranks


@pytest.mark.parametrize("case", between_hosts.CHECKS, ids=between_hosts.name)
def test_between_hosts(world: World, request: pytest.FixtureRequest, case: tuple[Any, ...]) -> None:
    """Everything that crosses, also from graphs at every replay."""
    check, *args = case
    if check in between_hosts.GRAPHS and "host" in request.node.callspec.params["world"]:
        pytest.skip("ranks on host memory have no graphs")
    world.run(check, *args)
