"""DTensor and tensor parallelism: sharded matrices give the results of whole ones."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)  # fmt: skip
from torchchecks import close, me, noise, perceptron, same, size
from torchjobs import Job


def numbers(*shape: int) -> torch.Tensor:
    """Whole numbers, so that the order of additions does not matter."""
    return (noise(0, *shape) * 4).round()


def redistributed() -> None:
    mesh = init_device_mesh("cpu", (size(),))
    x = numbers(2 * size() + 1, 3 * size())
    placements = (Shard(0), Shard(1), Replicate())
    for before, after in itertools.product(placements, placements):
        there = distribute_tensor(x, mesh, [before]).redistribute(mesh, [after])
        same(there.full_tensor(), x)
        same(there.to_local(), distribute_tensor(x, mesh, [after]).to_local())
    for after in placements:
        partial = DTensor.from_local(x * (me() + 1), mesh, [Partial()])
        same(partial.redistribute(mesh, [after]).full_tensor(), x * sum(range(1, size() + 1)))
    for kind in ("max", "min", "avg"):
        found = DTensor.from_local(x + 2 * me(), mesh, [Partial(kind)]).full_tensor()
        same(found, x + {"max": 2 * size() - 2, "min": 0, "avg": size() - 1}[kind])


def test_every_redistribution(pair: Job, four: Job) -> None:
    pair.run(redistributed)
    four.run(redistributed)


def products() -> None:
    mesh = init_device_mesh("cpu", (size(),))
    a, b = numbers(8, 6), numbers(6, 8)
    for left, right in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2):
        found = distribute_tensor(a, mesh, [left]) @ distribute_tensor(b, mesh, [right])
        same(found.full_tensor(), a @ b)
    x = distribute_tensor(a, mesh, [Shard(0)])
    same(x.sum().full_tensor(), a.sum())
    same(x.mean(0).full_tensor(), a.mean(0))
    same(x.max().full_tensor(), a.max())
    close(x.softmax(0).full_tensor(), a.softmax(0))
    same(torch.distributed.tensor.ones(5, 4, device_mesh=mesh, placements=[Shard(0)]).full_tensor(), torch.ones(5, 4))


def test_operations(pair: Job) -> None:
    pair.run(products)


def two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = numbers(7, 6)
    kinds = (Shard(0), Shard(1), Replicate())
    for before, after in zip(
        itertools.product(kinds, kinds), reversed(list(itertools.product(kinds, kinds))), strict=True
    ):
        there = distribute_tensor(x, mesh, before).redistribute(mesh, after)
        same(there.full_tensor(), x)
    same((distribute_tensor(x, mesh, [Shard(0), Shard(1)]) * 2).full_tensor(), x * 2)


def test_a_mesh_of_two_dimensions(four: Job) -> None:
    four.run(two_dimensions)


def gradients() -> None:
    mesh = init_device_mesh("cpu", (size(),))
    a, b = numbers(4, 6).requires_grad_(), numbers(6, 8).requires_grad_()
    (a @ b).sum().backward()
    left = distribute_tensor(a.detach(), mesh, [Shard(1)]).requires_grad_()
    right = distribute_tensor(b.detach(), mesh, [Shard(0)]).requires_grad_()
    (left @ right).redistribute(mesh, [Replicate()]).sum().backward()
    same(left.grad.full_tensor(), a.grad)
    same(right.grad.full_tensor(), b.grad)
    mapped = local_map(lambda x: x * 2, out_placements=[Shard(0)], in_placements=([Shard(0)],), device_mesh=mesh)
    same(mapped(distribute_tensor(a.detach(), mesh, [Shard(0)])).full_tensor(), a.detach() * 2)


def test_gradients(pair: Job) -> None:
    pair.run(gradients)


def column_and_row() -> None:
    mesh = init_device_mesh("cpu", (size(),))
    alone, x = perceptron(), noise(0, 5, 8)
    expected = alone(x)
    expected.pow(2).sum().backward()
    model = parallelize_module(perceptron(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    found = model(x)
    close(found, expected)
    found.pow(2).sum().backward()
    for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
        close(parameter.grad.full_tensor(), other.grad, 1e-5)


def test_tensor_parallel_layers(pair: Job, four: Job) -> None:
    pair.run(column_and_row)
    four.run(column_and_row)


class Block(nn.Module):
    """A norm and a perceptron, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def sequences() -> None:
    mesh = init_device_mesh("cpu", (size(),))
    alone, x = Block(), noise(0, 2, 4 * size(), 8)
    expected = alone(x)
    expected.pow(2).sum().backward()
    plan = {
        "": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    model = parallelize_module(Block(), mesh, plan)
    found = model(x)
    close(found.full_tensor(), expected, 1e-5)
    found.full_tensor().pow(2).sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        gradient = parameter.grad.full_tensor()
        torch.testing.assert_close(
            gradient, other.grad, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_sequence_parallel(pair: Job) -> None:
    pair.run(sequences)


def parallel_loss() -> None:
    mesh = init_device_mesh("cpu", (size(),))
    logits, labels = noise(0, 6, 8), torch.arange(6)
    whole = logits.clone().requires_grad_()
    expected = nn.functional.cross_entropy(whole, labels)
    expected.backward()
    with loss_parallel():
        shards = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
        found = nn.functional.cross_entropy(shards, distribute_tensor(labels, mesh, [Replicate()]))
        found.backward()
    close(found.full_tensor(), expected)
    close(shards.grad.full_tensor(), whole.grad)


def test_loss_parallel(pair: Job) -> None:
    pair.run(parallel_loss)


def modules() -> None:
    mesh = init_device_mesh("cpu", (size(),))
    torch.manual_seed(me())
    module = distribute_module(nn.Linear(4, 4), mesh)
    weight = module.weight.to_local()
    dist.all_gather(found := [torch.zeros(4, 4) for _ in range(size())], weight.detach())
    for other in found:
        same(other, found[0])


def test_modules_start_with_the_parameters_of_rank_0(pair: Job) -> None:
    pair.run(modules)


def with_data_parallel() -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone = perceptron()
    for replica in range(2):
        (alone(noise(replica, 5, 8)).pow(2).mean() / 2).backward()
    model = parallelize_module(perceptron(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    model(noise(mesh.get_local_rank("dp"), 5, 8)).pow(2).mean().backward()
    for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
        close(parameter.grad.full_tensor(), other.grad, 1e-5)


def test_tensor_parallel_inside_and_sharded_across(four: Job) -> None:
    four.run(with_data_parallel)
