"""Tensors on a wrong device or without memory: the calling rank raises, and the group stays usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import _coalescing_manager
from torchchecks import me, same, size
from torchjobs import Job

from xvcomm.errors import ArrayError

pytestmark = pytest.mark.not_gloo("named errors for tensors on several devices")


where = {"here": "cpu", "foreign": "meta"}


def foreign(count: int = 4) -> torch.Tensor:
    """A tensor on another device than the call's other tensors."""
    return torch.empty(count, device=where["foreign"])


def here(count: int = 4) -> torch.Tensor:
    return torch.zeros(count, device=where["here"])


def coalesced(*calls: Callable[[], Any]) -> None:
    with _coalescing_manager():
        for call in calls:
            call()


ONE: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda o: dist.all_reduce(foreign(), **o),
    "broadcast": lambda o: dist.broadcast(foreign(), 0, **o),
    "reduce": lambda o: dist.reduce(foreign(), 0, **o),
    "send": lambda _: dist.send(foreign(), 1),
    "recv": lambda _: dist.recv(foreign(), 1),
    "recv from any": lambda _: dist.recv(foreign()),
    "isend": lambda _: dist.isend(foreign(), 1),
    "irecv": lambda _: dist.irecv(foreign(), 1),
    "gather to another": lambda o: dist.gather(foreign(), None, 1, **o),
    "scatter from another": lambda o: dist.scatter(foreign(), None, 1, **o),
}
SEVERAL: dict[str, Callable[[Any], Any]] = {
    "all_reduce, the second": lambda _: dist.group.WORLD.allreduce([here(), foreign()]),
    "all_reduce_coalesced": lambda o: dist.all_reduce_coalesced([here(), foreign()], **o),
    "broadcast, the second": lambda _: dist.group.WORLD.broadcast([here(), foreign()]),
    "reduce, the second": lambda _: dist.group.WORLD.reduce([here(), foreign()]),
    "all_gather_into_tensor in": lambda o: dist.all_gather_into_tensor(here(8), foreign(), **o),
    "all_gather_into_tensor out": lambda o: dist.all_gather_into_tensor(foreign(8), here(), **o),
    "all_gather in": lambda o: dist.all_gather([here(), here()], foreign(), **o),
    "all_gather outs": lambda o: dist.all_gather([foreign(), foreign()], here(), **o),
    "all_gather an out": lambda o: dist.all_gather([here(), foreign()], here(), **o),
    "all_gather, the second": lambda _: dist.group.WORLD.allgather(
        [[here(), here()], [here(), foreign()]], [here(), here()]
    ),
    "all_gather_coalesced in": lambda o: dist.all_gather_coalesced([[here()], [here()]], [foreign()], **o),
    "all_gather_coalesced out": lambda o: dist.all_gather_coalesced([[here()], [foreign()]], [here()], **o),
    "all_gather_single_coalesced": lambda _: dist.group.WORLD.all_gather_single_coalesced(
        [here(8), here(8)], [here(), foreign()]
    ),
    "reduce_scatter_tensor in": lambda o: dist.reduce_scatter_tensor(here(), foreign(8), **o),
    "reduce_scatter_tensor out": lambda o: dist.reduce_scatter_tensor(foreign(), here(8), **o),
    "reduce_scatter ins": lambda o: dist.reduce_scatter(here(), [foreign(), foreign()], **o),
    "reduce_scatter an in": lambda o: dist.reduce_scatter(here(), [here(), foreign()], **o),
    "reduce_scatter out": lambda o: dist.reduce_scatter(foreign(), [here(), here()], **o),
    "reduce_scatter_single_coalesced": lambda _: dist.group.WORLD.reduce_scatter_single_coalesced(
        [here(), here()], [here(8), foreign(8)]
    ),
    "gather in": lambda o: dist.gather(foreign(), [here(), here()], 0, **o),
    "gather outs": lambda o: dist.gather(here(), [foreign(), foreign()], 0, **o),
    "gather an out": lambda o: dist.gather(here(), [here(), foreign()], 0, **o),
    "scatter ins": lambda o: dist.scatter(here(), [foreign(), foreign()], 0, **o),
    "scatter an in": lambda o: dist.scatter(here(), [here(), foreign()], 0, **o),
    "scatter out": lambda o: dist.scatter(foreign(), [here(), here()], 0, **o),
    "all_to_all_single in": lambda o: dist.all_to_all_single(here(), foreign(), **o),
    "all_to_all_single out": lambda o: dist.all_to_all_single(foreign(), here(), **o),
    "all_to_all ins": lambda o: dist.all_to_all([here(), here()], [foreign(), foreign()], **o),
    "all_to_all an in": lambda o: dist.all_to_all([here(), here()], [here(), foreign()], **o),
    "all_to_all an out": lambda o: dist.all_to_all([here(), foreign()], [here(), here()], **o),
    "coalescing": lambda _: coalesced(lambda: dist.all_reduce(here()), lambda: dist.all_reduce(foreign())),
}  # fmt: skip


def refused(form: str, async_op: bool, home: str = "cpu", other: str = "meta") -> None:
    """Only rank 0 calls it: if it had begun anything, the next operation of all ranks would mismatch."""
    where.update(here=home, foreign=other)
    if me() == 0:
        before = dist.group.WORLD._get_sequence_number_for_group()
        with pytest.raises(dist.DistBackendError, match=rf"{other}.*move") as caught:
            (ONE | SEVERAL)[form]({"async_op": async_op})
        assert isinstance(caught.value, ArrayError)
        assert dist.group.WORLD._get_sequence_number_for_group() == before
    dist.all_reduce(x := torch.ones(3, device=home))
    same(x, torch.full((3,), float(size())))


@pytest.mark.parametrize("form", ONE | SEVERAL)
def test_tensors_on_several_devices(pair: Job, form: str) -> None:
    for async_op in (False, True):
        pair.run(refused, form, async_op)


def without_memory() -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    for x in (fake, freed):
        if me() == 0:
            with pytest.raises(ArrayError, match="without memory"):
                dist.all_reduce(x)
            with pytest.raises(ArrayError, match="without memory"):
                dist.all_reduce(x, async_op=True).wait()
    dist.all_reduce(x := torch.ones(3))
    same(x, torch.full((3,), float(size())))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_tensors_without_memory(pair: Job) -> None:
    pair.run(without_memory)
