"""DistributedDataParallel: gradients and trained parameters equal those of one process with all batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    ddp_zero_hook,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    register_ddp_comm_hook,
)  # fmt: skip
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as Parallel
from torchchecks import close, loss_of, me, mean_gradients, noise, perceptron, raw, size, trained_alone
from torchjobs import Job


def averaged(options: dict[str, Any], tolerance: float = 0.0) -> None:
    """One backward pass gives the mean of all gradients: the same bits on two ranks."""
    model = Parallel(perceptron(), **options)
    for _ in range(3):
        model.zero_grad()
        loss_of(model, me()).backward()
        for parameter, expected in zip(model.parameters(), mean_gradients(), strict=True):
            close(parameter.grad, expected, tolerance or 1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"bucket_cap_mb": 0.0005}, {"static_graph": True}, {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True}, {"broadcast_buffers": False}, {"init_sync": False},
    ],
    ids=str,
)  # fmt: skip
def test_gradients_are_averaged(pair: Job, options: dict[str, Any]) -> None:
    pair.run(averaged, options)


def test_gradients_are_averaged_on_four_ranks(four: Job) -> None:
    four.run(averaged, {"bucket_cap_mb": 0.0005})


def trained(steps: int) -> bytes:
    model = Parallel(perceptron(), bucket_cap_mb=0.0005)
    rule = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        rule.zero_grad()
        loss_of(model, me(), step).backward()
        rule.step()
    for found, expected in zip(
        model.parameters(), trained_alone(steps, torch.optim.AdamW, lr=0.01).parameters(), strict=True
    ):
        close(found, expected, 1e-5)
    return b"".join(raw(parameter) for parameter in model.parameters())


def test_training(four: Job) -> None:
    assert len(set(four.run(trained, 10))) == 1


def starts_alike() -> None:
    torch.manual_seed(me())
    model = Parallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    dist.all_gather_object(found := [None] * size(), [raw(x) for x in model.state_dict().values()])
    assert all(other == found[0] for other in found)


def test_replicas_start_with_the_parameters_of_rank_0(pair: Job) -> None:
    pair.run(starts_alike)


def accumulated() -> None:
    model = Parallel(perceptron())
    with model.no_sync():
        loss_of(model, me()).backward()
    dist.all_gather_object(found := [None] * size(), raw(next(model.parameters()).grad))
    assert len(set(found)) == size()
    loss_of(model, me()).backward()
    for parameter, expected in zip(model.parameters(), mean_gradients(), strict=True):
        close(parameter.grad, 2 * expected)


def test_no_sync(pair: Job) -> None:
    pair.run(accumulated)


class Branches(nn.Module):
    """Uses one of two layers, depending on the rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[me()](x)


def unused() -> None:
    model = Parallel(Branches(), find_unused_parameters=True)
    for _ in range(3):
        model.zero_grad()
        model(noise(me(), 5, 8)).sum().backward()
        for rank in range(size()):
            close(model.module.layers[rank].weight.grad, noise(rank, 5, 8).sum(0).expand(4, 8) / size())
        assert model.module.layers[2].weight.grad is None or not model.module.layers[2].weight.grad.any()


def test_unused_parameters(pair: Job) -> None:
    pair.run(unused)


def uneven_inputs() -> None:
    model = Parallel(perceptron(), bucket_cap_mb=0.0005)
    rule = torch.optim.SGD(model.parameters(), 0.1)
    with model.join():
        for step in range(2 + 3 * me()):
            rule.zero_grad()
            loss_of(model, me(), step).backward()
            rule.step()
    dist.all_gather_object(found := [None] * size(), [raw(p) for p in model.parameters()])
    assert all(other == found[0] for other in found)


def test_join_with_uneven_inputs(pair: Job) -> None:
    pair.run(uneven_inputs)


def compressed(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's hook under another name: under its own name torch requires NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


compressed.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def hooked(name: str, tolerance: float) -> None:
    model = Parallel(perceptron(), bucket_cap_mb=0.0005)
    hooks: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: model.register_comm_hook(None, default_hooks.allreduce_hook),
        "bf16": lambda: model.register_comm_hook(None, compressed),
        "fp16": lambda: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
        "built-in": lambda: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
        "built-in fp16": lambda: model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
        "by name": lambda: register_ddp_comm_hook(DDPCommHookType.ALLREDUCE, model),
    }
    hooks[name]()
    for _ in range(2):
        model.zero_grad()
        loss_of(model, me()).backward()
        for parameter, expected in zip(model.parameters(), mean_gradients(), strict=True):
            torch.testing.assert_close(parameter.grad, expected, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("allreduce", 1e-6), ("bf16", 0.03), ("fp16", 3e-3), ("built-in", 1e-6),
        ("built-in fp16", 3e-3), ("by name", 1e-6),
    ],
)  # fmt: skip
def test_communication_hooks(pair: Job, name: str, tolerance: float) -> None:
    pair.run(hooked, name, tolerance)


def same_parameters_after(model: nn.Module, rule: Any, steps: int, after: Any = None) -> None:
    """Train, and compare the parameters of all ranks."""
    first = None
    for step in range(steps):
        rule.zero_grad()
        loss = loss_of(model, me(), step % 2)
        first = loss.item() if first is None else first
        loss.backward()
        rule.step()
        if after is not None:
            after()
    assert loss_of(model, me()).item() < first
    dist.all_gather_object(found := [None] * size(), [raw(p) for p in model.parameters()])
    assert all(other == found[0] for other in found)


def power_sgd() -> None:
    model = Parallel(perceptron())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    same_parameters_after(model, torch.optim.SGD(model.parameters(), 0.05), 8)


def test_power_sgd(pair: Job) -> None:
    pair.run(power_sgd)


def local_sgd(kind: str) -> None:
    model = Parallel(perceptron())
    rule: Any = torch.optim.SGD(model.parameters(), 0.05)
    if kind == "post-local":
        alone, _ = dist.new_subgroups(1)
        state = post_localSGD_hook.PostLocalSGDState(None, subgroup=alone, start_localSGD_iter=2)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        rule = PostLocalSGDOptimizer(rule, averagers.PeriodicModelAverager(period=2, warmup_steps=2))
        same_parameters_after(model, rule, 7)
        return
    if kind == "hierarchical":
        averager: Any = hierarchical_model_averager.HierarchicalModelAverager({2: 2, size(): 4}, warmup_steps=0)
    else:
        averager = averagers.PeriodicModelAverager(period=1, warmup_steps=0)
    with model.no_sync() if kind == "periodic" else contextlib.nullcontext():
        same_parameters_after(model, rule, 8, lambda: averager.average_parameters(model.parameters()))


def test_model_averaging(pair: Job) -> None:
    pair.run(local_sgd, "periodic")
    pair.run(local_sgd, "post-local")


def test_hierarchical_model_averaging(four: Job) -> None:
    four.run(local_sgd, "hierarchical")


def sharded_optimizer(kind: str) -> None:
    model = Parallel(perceptron(), bucket_cap_mb=0.0005, static_graph=kind == "overlapped")
    rule = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=kind != "plain",
        overlap_with_ddp=kind == "overlapped",
    )  # fmt: skip
    steps = 4
    if kind == "overlapped":
        hook = ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, model, rule)
        model.register_comm_hook(None, hook)
        steps += 2  # it does not update in its first two backward passes
    for step in range(steps):
        rule.zero_grad()
        loss_of(model, me(), step - (steps - 4) if step >= steps - 4 else step).backward()
        rule.step()
    if kind == "overlapped":
        dist.all_gather_object(found := [None] * size(), [raw(p) for p in model.parameters()])
        assert all(other == found[0] for other in found)
        return
    for found, expected in zip(
        model.parameters(), trained_alone(4, torch.optim.Adam, lr=0.01).parameters(), strict=True
    ):
        close(found, expected, 1e-5)
    rule.consolidate_state_dict(0)
    if me() == 0:
        assert len(rule.state_dict()["state"]) == 4


@pytest.mark.parametrize("kind", ["plain", "bucket views"])
def test_zero_redundancy_optimizer(pair: Job, kind: str) -> None:
    pair.run(sharded_optimizer, kind)


def in_a_subgroup() -> None:
    group = dist.new_group([1, 2])
    if me() in (1, 2):
        model = Parallel(perceptron(), process_group=group)
        loss_of(model, me() - 1).backward()
        for parameter, expected in zip(model.parameters(), mean_gradients(2), strict=True):
            close(parameter.grad, expected)
        dist.destroy_process_group(group)


def test_a_subgroup_across_the_border(four: Job) -> None:
    four.run(in_a_subgroup)


def low_precision() -> None:
    model = Parallel(perceptron().to(torch.bfloat16))
    model(noise(me(), 5, 8, dtype=torch.bfloat16)).pow(2).mean().backward()
    for parameter, expected in zip(model.parameters(), mean_gradients(), strict=True):
        torch.testing.assert_close(parameter.grad.float(), expected, rtol=0.1, atol=0.01)


def test_bfloat16_parameters(pair: Job) -> None:
    pair.run(low_precision)
