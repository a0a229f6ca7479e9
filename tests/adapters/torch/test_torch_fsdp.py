"""Sharded data parallelism: FSDP1, FSDP2, meshes of several dimensions, and checkpoints of sharded state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torchchecks import close, loss_of, me, mean_gradients, noise, perceptron, same, size, trained_alone
from torchjobs import Job


def first_version(strategy: str, place: str = "cpu", relative: float = 1e-6) -> None:
    alone = trained_alone(3, torch.optim.SGD, lr=0.1)
    model = FullyShardedDataParallel(
        perceptron(), device_id=torch.device(place), use_orig_params=True, sharding_strategy=ShardingStrategy[strategy]
    )
    rule = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        rule.zero_grad()
        loss_of(model, me(), step).backward()
        if step == 0:
            with FullyShardedDataParallel.summon_full_params(model, with_grads=strategy != "NO_SHARD"):
                for parameter, expected in zip(model.parameters(), mean_gradients(), strict=True):
                    close(parameter.grad, expected, relative)
        rule.step()
    with FullyShardedDataParallel.summon_full_params(model):
        for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
            close(found, expected, 10 * relative)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_fsdp1(pair: Job, strategy: str) -> None:
    pair.run(first_version, strategy)


def sharded(mesh: Any, **options: Any) -> nn.Sequential:
    """The perceptron under FSDP2, one unit per layer, on the mesh's devices."""
    model = perceptron().to(mesh.device_type)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def whole(tensor: Any) -> torch.Tensor:
    """A sharded tensor gathered into one."""
    found: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def mesh_of(shape: tuple[int, ...], kind: str = "cpu") -> Any:
    """A mesh of replicas and shards, or of shards."""
    return init_device_mesh(kind, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])


def second_version(shape: tuple[int, ...], reshard: bool, kind: str = "cpu", relative: float = 1e-6) -> None:
    alone = trained_alone(3, torch.optim.AdamW, lr=0.01)
    model = sharded(mesh_of(shape, kind), reshard_after_forward=reshard)
    rule = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        rule.zero_grad()
        loss_of(model, me(), step).backward()
        if step == 0:
            for parameter, expected in zip(model.parameters(), mean_gradients(), strict=True):
                close(whole(parameter.grad), expected, relative)
        rule.step()
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        close(whole(found), expected, 10 * relative)


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2(pair: Job, reshard: bool) -> None:
    pair.run(second_version, (2,), reshard)


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1), (1, 4)])
def test_fsdp2_on_four_ranks(four: Job, shape: tuple[int, ...]) -> None:
    four.run(second_version, shape, True)


def clipped() -> None:
    model, alone = sharded(mesh_of((size(),))), perceptron()
    loss_of(model, me()).backward()
    for parameter, gradient in zip(alone.parameters(), mean_gradients(), strict=True):
        parameter.grad = gradient.clone()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    close(whole(norm), nn.utils.clip_grad_norm_(alone.parameters(), 0.01))
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        close(whole(found.grad), expected.grad)


def test_gradient_clipping(pair: Job) -> None:
    pair.run(clipped)


def mixed_precision(shape: tuple[int, ...], reduce: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    model = sharded(mesh_of(shape), mp_policy=policy)
    model(noise(me(), 5, 8)).pow(2).mean().backward()
    for parameter, expected in zip(model.parameters(), mean_gradients(), strict=True):
        assert parameter.grad.dtype == torch.float32
        torch.testing.assert_close(whole(parameter.grad), expected, rtol=0.1, atol=0.01)


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
def test_mixed_precision_over_the_border(four: Job, reduce: torch.dtype) -> None:
    four.run(mixed_precision, (2, 2), reduce)


def accumulated() -> None:
    model = sharded(mesh_of((size(),)))
    model.set_requires_gradient_sync(False)
    loss_of(model, me()).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, me()).backward()
    for parameter, expected in zip(model.parameters(), mean_gradients(), strict=True):
        close(whole(parameter.grad), 2 * expected)


def test_accumulation_without_sync(pair: Job) -> None:
    pair.run(accumulated)


def prefetched() -> None:
    model = sharded(mesh_of((size(),)))
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    layers[0].set_modules_to_forward_prefetch([layers[1]])
    layers[1].set_modules_to_backward_prefetch([layers[0]])
    model.unshard(async_op=True).wait()
    loss_of(model, me()).backward()
    for parameter, expected in zip(model.parameters(), mean_gradients(), strict=True):
        close(whole(parameter.grad), expected)


def test_prefetching(pair: Job) -> None:
    pair.run(prefetched)


def saved_and_loaded(folder: str, asynchronous: bool) -> None:
    model = sharded(mesh_of((size(),)))
    rule = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_of(model, me()).backward()
    rule.step()
    states = get_state_dict(model, rule)
    parts = {"model": states[0], "optimizer": states[1]}
    expected = [whole(p).detach().clone() for p in model.parameters()]
    if asynchronous:
        checkpoint.async_save(parts, checkpoint_id=folder, process_group=dist.new_group(backend="gloo")).result()
    else:
        checkpoint.save(parts, checkpoint_id=folder)
    dist.barrier()
    other = sharded(mesh_of((size(),)))
    other_rule = torch.optim.Adam(other.parameters(), lr=0.01)
    other_states = get_state_dict(other, other_rule)
    checkpoint.load({"model": other_states[0], "optimizer": other_states[1]}, checkpoint_id=folder)
    set_state_dict(other, other_rule, model_state_dict=other_states[0], optim_state_dict=other_states[1])
    for found, wanted in zip(other.parameters(), expected, strict=True):
        same(whole(found), wanted)
    for step in (1, 2):
        for each, each_rule in ((model, rule), (other, other_rule)):
            each_rule.zero_grad()
            loss_of(each, me(), step).backward()
            each_rule.step()
    for found, wanted in zip(other.parameters(), model.parameters(), strict=True):
        same(whole(found), whole(wanted))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints(pair: Job, tmp_path: Path, asynchronous: bool) -> None:
    pair.run(saved_and_loaded, str(tmp_path), asynchronous)
