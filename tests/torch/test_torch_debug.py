"""Under TORCH_DISTRIBUTED_DEBUG=DETAIL, and what torch's profiler and flight recorder see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchchecks import close, loss_of, me, mean_gradients, noise, perceptron, same, size
from torchjobs import BACKEND, Job

from xvcomm import trace

DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


def everything() -> None:
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    n = size()
    dist.all_reduce(x := torch.ones(3))
    same(x, torch.full((3,), float(n)))
    dist.all_gather_into_tensor(out := torch.zeros(2 * n), noise(me(), 2))
    same(out, torch.cat([noise(rank, 2) for rank in range(n)]))
    dist.reduce_scatter_tensor(out := torch.zeros(1), torch.ones(n))
    same(out, [float(n)])
    dist.broadcast(x := noise(me(), 4), 1)
    same(x, noise(1, 4))
    dist.barrier()
    if me() == 0:
        dist.send(noise(0, 4), 1, tag=3)
    elif me() == 1:
        dist.recv(x := torch.zeros(4), 0, tag=3)
        same(x, noise(0, 4))
    group = dist.new_group([0, 1])
    if me() < 2:
        dist.all_reduce(x := torch.ones(1), group=group)
        same(x, [2.0])
    model = nn.parallel.DistributedDataParallel(perceptron())
    loss_of(model, me()).backward()
    for parameter, expected in zip(model.parameters(), mean_gradients(), strict=True):
        close(parameter.grad, expected)


@pytest.mark.not_gloo("DDP under DETAIL, which crashes there in torch 2.13")
def test_detail(start: Callable[..., Job]) -> None:
    start("cuda:1,rocm:1", env=DETAIL).run(everything)


def unlike() -> str:
    try:
        dist.all_reduce(torch.ones(4 + me()))
    except RuntimeError as error:
        return str(error)
    return ""


def test_detail_tells_what_does_not_fit(start: Callable[..., Job]) -> None:
    for text in start("cuda:1,rocm:1", env=DETAIL).run(unlike):
        assert text


def unlike_models() -> str:
    try:
        nn.parallel.DistributedDataParallel(nn.Linear(4, 4 + me()))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("level", ["INFO", "DETAIL"])
def test_models_of_unlike_shapes_are_told_apart(start: Callable[..., Job], level: str) -> None:
    job = start("cuda:1,rocm:1", env={"TORCH_DISTRIBUTED_DEBUG": level}, timeout=3.0)
    texts = job.run(unlike_models)
    assert any("param" in text and "size" in text for text in texts), texts


def profiled() -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4), async_op=True).wait()
        dist.all_gather_into_tensor(torch.zeros(4 * size()), torch.ones(4))
        dist.broadcast(torch.ones(4), 0)
        dist.barrier()
        if me() == 0:
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(torch.ones(4), 0)
    return [event.name for event in profile.events()]


def test_operations_are_events_of_the_profiler(pair: Job) -> None:
    sender, receiver = pair.run(profiled)
    assert sender.count(f"{BACKEND}:all_reduce") == 2
    assert f"{BACKEND}:broadcast" in sender
    assert any(name.startswith(f"{BACKEND}:") and "gather" in name for name in sender)
    assert f"{BACKEND}:send" in sender and f"{BACKEND}:recv" in receiver


def logged() -> dict[str, Any]:
    model = nn.parallel.DistributedDataParallel(perceptron())
    loss_of(model, me()).backward()
    data: dict[str, Any] = model._get_ddp_logging_data()
    return data


def test_ddp_logging_names_the_backend(pair: Job) -> None:
    for data in pair.run(logged):
        assert data["backend_name"] == BACKEND
        assert data["world_size"] == 2


def places() -> list[str]:
    """Where the flight recorder says that operations were called."""
    records: list[trace.Record] = []
    trace.hooks.append(records.append)
    try:
        dist.all_reduce(torch.ones(1))
        dist.all_gather_object([None] * size(), me())
    finally:
        trace.hooks.remove(records.append)
    return [record.site for record in records]


@pytest.mark.not_gloo("a flight recorder")
def test_the_flight_recorder_names_the_line_of_the_program(pair: Job) -> None:
    first = places.__code__.co_firstlineno + 5
    for sites in pair.run(places):
        assert set(sites) == {f"test_torch_debug.py:{first}", f"test_torch_debug.py:{first + 1}"}, sites
