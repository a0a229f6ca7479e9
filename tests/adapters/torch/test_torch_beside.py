"""An xvcomm group beside another backend's group does not affect that group's operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchchecks import me, same, size
from torchjobs import BACKEND, Job

pytestmark = pytest.mark.skipif(BACKEND == "gloo", reason="it is about xvcomm's groups beside Gloo's")


def busy() -> None:
    dist.new_group(backend="xvcomm")
    n = size()
    gathered = torch.zeros(4 * n)
    for number in range(2000):
        dist.all_gather_into_tensor(gathered, torch.full((4,), float(number + me())))
    same(gathered, torch.arange(n, dtype=torch.float32).repeat_interleave(4) + 1999)


def functional() -> None:
    dist.new_group(backend="xvcomm")
    operations, n = torch.ops._c10d_functional, size()
    name = dist.group.WORLD.group_name
    gathered = torch.zeros(4 * n)
    for number in range(500):
        part = torch.full((4,), float(number + me()))
        operations.wait_tensor(operations.all_gather_into_tensor_out(part, n, name, out=gathered))
    same(gathered, torch.arange(n, dtype=torch.float32).repeat_interleave(4) + 499)


def sharded() -> None:
    dist.new_group(backend="xvcomm")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(30):
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("program", [busy, functional, sharded])
def test_gloo_works_beside_an_unused_xvcomm_group(start: Callable[..., Job], program: Callable[[], None]) -> None:
    start("a:1,b:1", "gloo").run(program, timeout=120)
