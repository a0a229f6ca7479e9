"""Fixtures of the suites: the devices of every backend, in every topology that a test module requests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from xvcomm.config import Config
from xvcomm.engine.session import plugins
from xvcomm.testing import World
from xvcomm.testing.benches import Bench
from xvcomm.testing.cases import ISLANDS, environment, kinds, too_few_devices


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `place` with the device types, and with `ISLANDS`, of the module if it has its own."""
    if "place" in metafunc.fixturenames:
        wanted = getattr(metafunc.module, "ISLANDS", ISLANDS)
        places = [pytest.param((kind, islands), id=f"{kind}-{islands}") for kind in kinds() for islands in wanted]
        metafunc.parametrize("place", places, indirect=True, scope="module")


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Device type and islands of the ranks under test."""
    where: tuple[str, str] = request.param
    why = too_few_devices(*where)
    if why:
        pytest.skip(why)
    return where


@pytest.fixture(scope="module")
def world(place: tuple[str, str], request: pytest.FixtureRequest) -> Iterator[World]:
    """Ranks for all tests of a module, with the modules that its `PRELOAD` names."""
    kind, islands = place
    with World(islands=islands, env=environment(kind), preload=getattr(request.module, "PRELOAD", ())) as ranks:
        yield ranks


@pytest.fixture(scope="module", params=kinds())
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The devices of one backend, and a ring between them."""
    backend, config = plugins.backend(request.param), Config()
    with ThreadPoolExecutor(2) as threads:
        yield Bench(config, backend.device(config), backend.device(config), threads)
