"""DTensor and tensor parallelism over the backend, with torch's fixtures and models."""

from __future__ import annotations

import copy
import unittest

import torch
from ranks import RanksOfOneClass
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    zeros,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)  # fmt: skip
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.distributed._tensor.common_dtensor import MLPModule

PLACEMENTS = (Replicate(), Shard(0), Shard(1), Partial())
FOUR = unittest.skipIf(RanksOfOneClass.world_size < 4, "needs four ranks")


class DTensors(RanksOfOneClass):
    """Distributed tensors against whole ones."""

    def setup_tensor(self, *shape: int) -> torch.Tensor:
        """The same random tensor on every rank."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def _distributed(self, x: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
        """`x` with these placements; partial placements divide it into equal summands."""
        if any(isinstance(placement, Partial) for placement in placements):
            return DTensor.from_local(x / self.world_size, mesh, placements)
        return distribute_tensor(x, mesh, placements)

    @parametrize("source", range(len(PLACEMENTS)))
    @parametrize("target", range(len(PLACEMENTS) - 1))
    def test_redistribute(self, source: int, target: int) -> None:
        mesh = self.build_device_mesh()
        for shape in ((4, 8), (5, 3), (1, 7)):
            x = self.setup_tensor(*shape)
            distributed = self._distributed(x, mesh, [PLACEMENTS[source]])
            found = distributed.redistribute(placements=[PLACEMENTS[target]])
            self.assertEqual(found.placements, (PLACEMENTS[target],))
            self.assertEqual(found.full_tensor(), x)

    def test_distribute_from_rank_0(self) -> None:
        x = self.setup_tensor(7, 3) if self.rank == 0 else torch.zeros(7, 3)
        for placement in (Replicate(), Shard(0), Shard(1)):
            found = distribute_tensor(x, self.build_device_mesh(), [placement])
            self.assertEqual(found.full_tensor(), self.setup_tensor(7, 3))

    @parametrize("reduction", ["sum", "avg", "max", "min"])
    def test_partial(self, reduction: str) -> None:
        mesh = self.build_device_mesh()
        local = torch.arange(6.0).reshape(2, 3) + self.rank
        found = DTensor.from_local(local, mesh, [Partial(reduction)]).full_tensor()
        everyone = torch.stack([torch.arange(6.0).reshape(2, 3) + rank for rank in range(self.world_size)])
        reduced = {"sum": everyone.sum(0), "avg": everyone.mean(0), "max": everyone.amax(0), "min": everyone.amin(0)}
        self.assertEqual(found, reduced[reduction])

    def test_operations_with_every_sharding(self) -> None:
        mesh = self.build_device_mesh()
        x, y = self.setup_tensor(4 * self.world_size, 4 * self.world_size), self.setup_tensor(4 * self.world_size, 8)
        self._test_op(mesh, torch.mm, x, y)
        self._test_op(mesh, lambda t: torch.softmax(t, dim=-1), x)
        self._test_op(mesh, lambda t: t.sum(dim=1), x)
        self._test_op(mesh, lambda t: (t * 2 + 1).t().contiguous(), x)

    def test_gradients_through_redistribute(self) -> None:
        mesh = self.build_device_mesh()
        x = self.setup_tensor(2 * self.world_size, 6)
        distributed = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        weight = distribute_tensor(self.setup_tensor(6, 6), mesh, [Replicate()])
        columns = distributed.redistribute(placements=[Shard(1)])
        (columns.redistribute(placements=[Replicate()]) @ weight).sum().backward()
        self.assertEqual(distributed.grad.full_tensor(), torch.ones(len(x), 6) @ self.setup_tensor(6, 6).T)

    def test_random_and_creation(self) -> None:
        mesh = self.build_device_mesh()
        self.assertEqual(zeros(9, 2, device_mesh=mesh, placements=[Shard(0)]).full_tensor(), torch.zeros(9, 2))
        dropped = nn.functional.dropout(distribute_tensor(torch.ones(6 * self.world_size, 4), mesh, [Shard(0)]), 0.5)
        self.assertTrue(set(dropped.full_tensor().flatten().tolist()) <= {0.0, 2.0})

    def test_distributed_module(self) -> None:
        def shard(_: str, module: nn.Module, mesh: object) -> None:
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        expected = model(x := self.setup_tensor(4, 8))
        mesh = self.build_device_mesh()
        found = distribute_module(copy.deepcopy(model), mesh, shard)(distribute_tensor(x, mesh, [Replicate()]))
        self.assertEqual(found.full_tensor(), expected)

    @FOUR
    def test_two_dimensions(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        x = self.setup_tensor(8, 12)
        for source in [[a, b] for a in PLACEMENTS for b in PLACEMENTS if a.is_partial() == b.is_partial()]:
            distributed = self._distributed(x, mesh, source)
            self.assertEqual(distributed.full_tensor(), x)
            self.assertEqual(distributed.redistribute(placements=[Shard(0), Shard(1)]).full_tensor(), x)


class TensorParallel(RanksOfOneClass):
    """Modules split over ranks, with torch's test models, against the unsplit modules."""

    def _step(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    @parametrize("sequence", [False, True])
    def test_mlp(self, sequence: bool) -> None:
        mesh = self.build_device_mesh()
        torch.manual_seed(5)
        whole = MLPModule("cpu")
        model = parallelize_module(copy.deepcopy(whole), mesh, {
            "net1": ColwiseParallel(input_layouts=Shard(0)) if sequence else ColwiseParallel(),
            "net2": RowwiseParallel(output_layouts=Shard(0)) if sequence else RowwiseParallel(),
        })  # fmt: skip
        x = torch.randn(4 * self.world_size, 10)
        mine = x.chunk(self.world_size)[self.rank] if sequence else x
        for _ in range(2):
            expected = self._step(whole, x)
            found = self._step(model, mine)
            if not sequence:
                self.assertEqual(found, expected)
        for name, parameter in model.named_parameters():
            found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            self.assertEqual(found, whole.get_parameter(name))

    def test_sequence_parallel_norm(self) -> None:
        mesh = self.build_device_mesh()
        torch.manual_seed(5)
        whole = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        model = parallelize_module(copy.deepcopy(whole), mesh, {
            "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
            "1": SequenceParallel(use_local_output=False),
            "2": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        })  # fmt: skip
        x = torch.randn(2, 2 * self.world_size, 8)
        self.assertEqual(model(x), whole(x))
        model(x).sum().backward()
        whole(x).sum().backward()
        for name, parameter in model.named_parameters():
            self.assertEqual(parameter.grad.full_tensor(), whole.get_parameter(name).grad)

    def test_loss_parallel(self) -> None:
        mesh = self.build_device_mesh()
        torch.manual_seed(1)
        x, y = torch.randn(6, 4 * self.world_size, requires_grad=True), torch.randint(0, 4 * self.world_size, (6,))
        distributed = distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            found = nn.functional.cross_entropy(distributed, y)
            found.backward()
        nn.functional.cross_entropy(x, y).backward()
        self.assertEqual(found.full_tensor(), nn.functional.cross_entropy(x, y))
        self.assertEqual(distributed.grad.full_tensor(), x.grad)

    def test_prepared_inputs(self) -> None:
        mesh = self.build_device_mesh()
        model = parallelize_module(nn.Identity(), mesh, PrepareModuleInput(
            input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),), use_local_output=True,
        ))  # fmt: skip
        self.assertEqual(model(torch.tensor([float(self.rank)])), torch.arange(float(self.world_size)))


for _case in (DTensors, TensorParallel):
    instantiate_parametrized_tests(_case)
CLASSES = (DTensors, TensorParallel)
