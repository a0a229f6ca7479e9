"""Fixtures of the JAX adapter's tests: ranks with JAX on host memory, which are kept for all tests of the folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from xvcomm.testing.world import World

sys.path.append(str(Path(__file__).parent))  # ranks import what the files share

from jaxchecks import started

TOPOLOGIES = {"one island": "a:2", "two islands": "a,b"}


@pytest.fixture(scope="package", params=TOPOLOGIES)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Two ranks, in one island and in two."""
    with started(TOPOLOGIES[request.param]) as ranks:
        yield ranks


@pytest.fixture(scope="package")
def uneven() -> Iterator[World]:
    """Three ranks in two islands."""
    with started("a:1,b:2") as ranks:
        yield ranks


@pytest.fixture(scope="package")
def pair() -> Iterator[World]:
    """Two ranks, one in each of two islands."""
    with started("a,b") as ranks:
        yield ranks


@pytest.fixture(scope="package")
def hosts() -> Iterator[World]:
    """Two ranks in two islands, with two devices each."""
    with started("a,b", devices=2) as ranks:
        yield ranks
