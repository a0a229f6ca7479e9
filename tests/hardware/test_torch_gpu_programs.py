"""Programs on PyTorch's backend with GPUs: sharding, pipelines, compiled steps, gradients; the same as on the host."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

# For the modules there and here, in this process and on the ranks.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "adapters" / "torch"))

import test_torch_devices as devices
import test_torch_fsdp as fsdp
import test_torch_functional as functional
import test_torch_functions as functions
import test_torch_groups as groups
import test_torch_messages as messages
import test_torch_pipelining as pipelining
import test_torch_sparse as sparse
import torch
import torch.distributed as dist
from test_torch_gpu import equal, here, mine, total
from torch.distributed.distributed_c10d import _coalescing_manager
from torchchecks import me, size
from torchjobs import Job

from xvcomm.testing.cases import SMALL_GPU_RINGS

if TYPE_CHECKING:
    from collections.abc import Callable

    from xvcomm.testing import World

pytestmark = pytest.mark.gpu

ROUNDING = 1e-5
"""Tolerated relative difference between a GPU's sums and the host's; on the host alone it is a tenth of this."""
ISLANDS = {"one island": "a:2", "1 and 1": "a:1,b:1"}


def sharded() -> None:
    """Both versions of FSDP: gradients, and weights after three steps."""
    place = here()
    fsdp.first_version("FULL_SHARD", str(place), ROUNDING)
    # AdamW divides by gradients that are nearly nothing.
    fsdp.second_version((size(),), True, place.type, 10 * ROUNDING)


def piped() -> None:
    """One stage per rank, and two."""
    for schedule in ("Schedule1F1B", "ScheduleInterleaved1F1B"):
        pipelining.piped(schedule, where=str(here()), relative=ROUNDING)


def compiled() -> None:
    """A compiled function with collectives and without graph breaks, and DDP's step."""
    functional.runs_compiled("aot_eager", str(here()))
    functional.parallel_compiled("aot_eager", str(here()))


def added_sparse() -> None:
    """Sums of COO tensors with different numbers of elements."""
    sparse.added(place=str(here()))
    sparse.added(2, place=str(here()))


def from_anybody() -> None:
    """Messages without a source."""
    found = messages.from_anybody(str(here()))
    assert sorted(found) == [rank for rank in range(1, size()) for _ in range(2)] * (me() == 0)


def coalesced() -> None:
    """Collectives of one kind, and messages in both directions, coalesced."""
    place, other = here(), size() - 1 - me()
    for asynchronous in (False, True):
        with _coalescing_manager(device=place, async_ops=asynchronous) as manager:
            dist.all_reduce(a := mine(place, 3))
            dist.all_reduce(b := mine(place, 50_000))
        if asynchronous:
            manager.wait()
        equal(a, total(3))
        equal(b, total(50_000))
    with _coalescing_manager(dist.group.WORLD, place, async_ops=True) as manager:
        dist.isend(mine(place, 1000), other)
        dist.irecv(x := torch.zeros(1000, device=place), other)
    manager.wait()
    equal(x, torch.arange(1000) % 7 + other)


def elsewhere() -> None:
    """Tensors of one call in host memory, on the other GPU, or without memory, with others on this GPU."""
    place = str(here())
    far = next(f"{here().type}:{i}" for i in range(size()) if i != me())
    for form in devices.SEVERAL:
        for home, other in ((place, "cpu"), (place, "meta"), (place, far), ("cpu", place)):
            devices.refused(form, False, home, other)
            devices.refused(form, True, home, other)


@pytest.fixture
def start(
    vendor: str, places: Callable[[str], tuple[str, ...]], libraries: Callable[[str], dict[str, str]]
) -> Callable[..., Job]:
    """Starts two ranks on separate GPUs; skips if there are fewer."""

    def begin(name: str, backend: str | None) -> Job:
        kinds = places("cuda:2")
        if torch.cuda.device_count() < len(kinds):
            pytest.skip(f"this torch is not built for {vendor}, or sees too few GPUs")
        env = [{**SMALL_GPU_RINGS, "XVCOMM_DEVICE": kind, **libraries(kind)} for kind in kinds]
        return Job(ISLANDS[name], backend, env=env, timeout=40)

    return begin


@pytest.mark.parametrize("name", ISLANDS)
def test_programs(start: Callable[..., Job], name: str) -> None:
    """All in one job, because its start takes most of the time."""
    with start(name, "xvcomm") as ranks:
        for check in (sharded, piped, compiled, added_sparse, from_anybody, coalesced, elsewhere):
            ranks.run(check)


def split() -> None:
    """`device_id=` selects the device, and lets torch split groups."""
    place = torch.device("cuda", int(os.environ["RANK"]))
    dist.init_process_group("xvcomm", device_id=place)
    assert dist.group.WORLD.planes.comms["main"].device_index == place.index
    groups.splits_by_torch([[0, 1]], [[0], [1]], [[1]], place=str(place))


@pytest.mark.parametrize("name", ISLANDS)
def test_split_group(start: Callable[..., Job], name: str) -> None:
    with start(name, None) as ranks:
        ranks.run(split)


@pytest.mark.parametrize("name", ISLANDS)
def test_gradients_through_functions(job: Callable[..., World], name: str) -> None:
    with job("cuda:2", ISLANDS[name]) as ranks:
        for check in functions.CHECKS:
            ranks.run(check)
