"""Ranks with GPU memory over several hosts: the ROCm backend over its stand-in, with each rank's host by label."""

import sys
from pathlib import Path

import pytest

from xvcomm.testing import World
from xvcomm.testing.cases import SMALL_GPU_RINGS

pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install hip-python")
sys.path.append(str(Path(__file__).parent.parent / "conformance"))
import between_hosts

PLACES = {
    "two islands on two hosts": {"devices": "rocm:2", "hosts": "a,b", "islands": "x,y"},
    "an island over two hosts": {"devices": "rocm:2", "hosts": "a,b"},
    "islands in turns": {"devices": "rocm:2,host:2", "hosts": "a,b,a,b"},
}


@pytest.fixture(scope="module", params=PLACES)
def world(request, rocm_path):
    """Ranks on GPUs of the stand-in, some with ranks on host memory beside them."""
    with World(**PLACES[request.param], env={"ROCM_PATH": str(rocm_path), **SMALL_GPU_RINGS}) as ranks:
        ranks.graphs = "host" not in PLACES[request.param]["devices"]
        yield ranks


@pytest.mark.parametrize("case", between_hosts.CHECKS, ids=between_hosts.name)
def test_between_hosts(world, case):
    """Everything that crosses, also from graphs at every replay."""
    check, *args = case
    if check in between_hosts.GRAPHS and not world.graphs:
        pytest.skip("ranks on host memory have no graphs")
    world.run(check, *args)
