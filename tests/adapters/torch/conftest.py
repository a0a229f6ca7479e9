"""Torch jobs shared by the tests of this folder. A job that a test broke is replaced before the next test."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the two modules beside this one, here and on the ranks

from torchjobs import BACKEND, Job

ISLANDS = {"pair": "cuda:1,rocm:1", "four": "cuda:2,rocm:2", "island": "cuda:2"}
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_torch_*.py"]
kept: dict[str, Job] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start the job that the test uses, before the leak check takes its snapshot."""
    mark = item.get_closest_marker("not_gloo")
    if mark is not None and BACKEND == "gloo":
        pytest.skip(f"gloo: {mark.args[0]}")
    for name in ISLANDS.keys() & set(getattr(item, "fixturenames", ())):
        if name in kept and kept[name].broken:
            kept.pop(name).close()
        if name not in kept:
            kept[name] = Job(ISLANDS[name])


@pytest.fixture(scope="session", autouse=True)
def jobs_end() -> Iterator[None]:
    """Close the shared jobs."""
    yield
    while kept:
        kept.popitem()[1].close()


@pytest.fixture
def pair() -> Job:
    """Two ranks in two islands."""
    return kept["pair"]


@pytest.fixture
def four() -> Job:
    """Two islands of two ranks."""
    return kept["four"]


@pytest.fixture
def island() -> Job:
    """Two ranks of one island."""
    return kept["island"]


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    """Starts jobs that the test does not share, and may break."""
    started: list[Job] = []

    def begin(*args: object, **options: object) -> Job:
        started.append(Job(*args, **options))  # type: ignore[arg-type]
        return started[-1]

    yield begin
    for job in started:
        job.close()
