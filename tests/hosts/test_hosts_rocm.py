"""Ranks with GPU memory over several hosts: the ROCm backend over its stand-in, with each rank's host by label."""

import pytest

from xvcomm.testing import World, asynchronous, channels, collectives, graphs, pointtopoint
from xvcomm.testing.cases import SMALL_GPU_RINGS

pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install hip-python")

PLACES = {
    "two islands on two hosts": {"devices": "rocm:2", "hosts": "a,b", "islands": "x,y"},
    "an island over two hosts": {"devices": "rocm:2", "hosts": "a,b"},
    "islands in turns": {"devices": "rocm:2,host:2", "hosts": "a,b,a,b"},
}


@pytest.fixture(scope="module", params=PLACES)
def world(request, rocm_path):
    """Ranks on GPUs of the stand-in, some with ranks on host memory beside them."""
    with World(**PLACES[request.param], env={"ROCM_PATH": str(rocm_path), **SMALL_GPU_RINGS}) as ranks:
        yield ranks


@pytest.mark.parametrize("count", [1, 1000, 1_000_003])
def test_collectives(world, count):
    world.run(collectives.check_all_reduce, "float32", "sum", count)
    world.run(collectives.check_all_gather, "float32", count // 10)
    world.run(collectives.check_all_to_all, "float32", count // 10)


@pytest.mark.parametrize("count", [0, 1001, 1_000_003])
def test_messages(world, count):
    world.run(pointtopoint.check_exchange, "float32", count)


@pytest.mark.parametrize("check", channels.CHECKS, ids=lambda check: check.__name__)
def test_channels(world, check):
    world.run(check)


@pytest.mark.parametrize("check", asynchronous.CHECKS, ids=lambda check: check.__name__)
def test_order(world, check):
    """What the host need not wait for, and what streams wait for."""
    world.run(check)


@pytest.mark.parametrize("check", [graphs.check_graphs, graphs.check_graph_of_many], ids=lambda check: check.__name__)
def test_graphs(world, request, check):
    """Messages of graphs cross at every replay."""
    if "host" in PLACES[request.node.callspec.params["world"]]["devices"]:
        pytest.skip("ranks on host memory have no graphs")
    world.run(check)
