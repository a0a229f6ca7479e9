"""An all_reduce passes through few files of xvcomm, so that a reader can follow it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import numpy as np

import xvcomm
from xvcomm.comm.communicator import Communicator
from xvcomm.testing import World

ROOT = Path(xvcomm.__file__).resolve().parents[1]


def passed(comm: Communicator, count: int) -> set[str]:
    """The files whose functions a blocking all_reduce of so many elements calls."""
    code = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            code.add(frame.f_code.co_filename)

    x = np.ones(count)
    sys.setprofile(note)
    try:
        comm.all_reduce(x)
    finally:
        sys.setprofile(None)
    files = {Path(name).resolve() for name in code}
    places = {str(file.relative_to(ROOT)) for file in files if file.is_relative_to(ROOT)}
    return {place for place in places if place.startswith(("xvcomm/", "backends/"))}


def ways(comm: Communicator) -> tuple[set[str], set[str]]:
    """Of the first all_reduce of a shape, once the native library is joined, and of the third."""
    for _ in range(3):
        comm.all_reduce(np.ones(5))
    first = passed(comm, 6)
    passed(comm, 6)
    return first, passed(comm, 6)


def test_an_all_reduce_of_one_host_passes_through_few_files() -> None:
    with World(size=2) as world:
        for first, third in world.run(ways):
            assert {"xvcomm/comm/collectives.py", "backends/host/collective.py"} <= first
            assert len(first) <= 12, sorted(first)
            assert "xvcomm/engine/prepared.py" in third
            assert len(third) <= 5, sorted(third)
