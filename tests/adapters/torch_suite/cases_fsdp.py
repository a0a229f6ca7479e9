"""FSDP2 (`fully_shard`) and the sharded optimizer over the backend, with torch's fixtures for FSDP."""

from __future__ import annotations

import copy
import unittest
from itertools import pairwise

import torch
import torch.distributed as dist
from ranks import RanksOfOneClass
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_fsdp import MLP, FSDPTestMixin, MLPStack, check_sharded_parity
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

FOUR = unittest.skipIf(RanksOfOneClass.world_size < 4, "needs four ranks")
WIDTH = 6


def inputs(rank: int, step: int) -> torch.Tensor:
    """The batch of a rank in a step."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


class Sharded(FSDPTestMixin, RanksOfOneClass):
    """Parameters and gradients of sharded modules against the unsharded module trained on all ranks' batches."""

    def _whole(self) -> nn.Module:
        torch.manual_seed(0)
        return MLPStack(WIDTH)

    def _train(self, whole: nn.Module, model: nn.Module, ranks_of_batch: int = 1) -> None:
        """Train both for three steps and compare; consecutive ranks in groups of this size share a batch."""
        ranks, mine = self.world_size // ranks_of_batch, self.rank // ranks_of_batch
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.02) for m in (whole, model)]
        for step in range(3):
            (sum(whole(inputs(rank, step)).square().mean() for rank in range(ranks)) / ranks).backward()
            model(inputs(mine, step)).square().mean().backward()
            self._compare(whole, model, gradients=True)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        self._compare(whole, model)

    def _compare(self, whole: nn.Module, model: nn.Module, gradients: bool = False) -> None:
        for (_, expected), (_, found) in zip(whole.named_parameters(), model.named_parameters(), strict=True):
            if gradients:
                expected, found = expected.grad, found.grad
            self.assertEqual(found.full_tensor() if isinstance(found, DTensor) else found, expected)

    @staticmethod
    def _shard(model: nn.Module, mesh: DeviceMesh, **settings: object) -> FSDPModule:
        for block in model:
            fully_shard(block, mesh=mesh, **settings)
        return fully_shard(model, mesh=mesh, **settings)

    @parametrize("reshard", [True, False])
    def test_training(self, reshard: bool) -> None:
        whole = self._whole()
        model = self._shard(copy.deepcopy(whole), self.build_device_mesh(), reshard_after_forward=reshard)
        check_sharded_parity(self, whole, model)
        self._train(whole, model)

    def test_one_group_of_parameters(self) -> None:
        whole = self._whole()
        self._train(whole, fully_shard(copy.deepcopy(whole), mesh=self.build_device_mesh()))

    def test_offloaded_to_host(self) -> None:
        whole = self._whole()
        policy = CPUOffloadPolicy(pin_memory=False)
        self._train(whole, self._shard(copy.deepcopy(whole), self.build_device_mesh(), offload_policy=policy))

    @parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_mixed_precision(self, dtype: torch.dtype) -> None:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        whole = self._whole()
        model = self._shard(copy.deepcopy(whole), self.build_device_mesh(), mp_policy=policy)
        low = copy.deepcopy(whole).to(dtype)
        for rank in range(self.world_size):
            low(inputs(rank, 0).to(dtype)).float().square().mean().backward()
            for expected, part in zip(whole.parameters(), low.parameters(), strict=True):
                part_of_mean = part.grad.float() / self.world_size
                expected.grad = part_of_mean if expected.grad is None else expected.grad + part_of_mean
                part.grad = None
        model(inputs(self.rank, 0)).float().square().mean().backward()
        self._compare(whole, model, gradients=True)

    def test_low_precision_reduction(self) -> None:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        whole, model = self._whole(), self._shard(self._whole(), self.build_device_mesh(), mp_policy=policy)
        model(inputs(0, 0)).square().mean().backward()  # the same batch everywhere: the mean is that of one rank
        whole(inputs(0, 0)).square().mean().backward()
        for expected, found in zip(whole.parameters(), model.parameters(), strict=True):
            self.assertEqual(found.grad.full_tensor(), expected.grad, atol=1e-2, rtol=2e-2)

    def test_accumulation_without_reduction(self) -> None:
        whole = self._whole()
        model = self._shard(copy.deepcopy(whole), self.build_device_mesh())
        for step, last in ((0, False), (1, True)):
            model.set_requires_gradient_sync(last)
            model(inputs(self.rank, step)).square().mean().backward()
            (sum(whole(inputs(r, step)).square().mean() for r in range(self.world_size)) / self.world_size).backward()
        self._compare(whole, model, gradients=True)

    def test_gradient_norm(self) -> None:
        whole = self._whole()
        model = self._shard(copy.deepcopy(whole), self.build_device_mesh())
        model(inputs(0, 0)).square().mean().backward()
        whole(inputs(0, 0)).square().mean().backward()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        found = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        self.assertEqual(found.full_tensor(), expected)
        self._compare(whole, model, gradients=True)

    def test_explicit_prefetching(self) -> None:
        whole = self._whole()
        model = self._shard(copy.deepcopy(whole), self.build_device_mesh())
        for before, after in pairwise(list(model)):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
        model.unshard(async_op=True)
        self._train(whole, model)

    def test_frozen_parameters(self) -> None:
        whole = self._whole()
        whole[1].requires_grad_(False)
        model = self._shard(copy.deepcopy(whole), self.build_device_mesh())
        model(inputs(0, 0)).square().mean().backward()
        whole(inputs(0, 0)).square().mean().backward()
        self.assertEqual(model[0].in_proj.weight.grad.full_tensor(), whole[0].in_proj.weight.grad)
        self.assertIsNone(model[1].in_proj.weight.grad)

    @FOUR
    def test_replicas_of_shards(self) -> None:
        whole = self._whole()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        self._train(whole, self._shard(copy.deepcopy(whole), mesh))

    @FOUR
    def test_with_tensor_parallelism(self) -> None:
        whole = self._whole()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = copy.deepcopy(whole).parallelize(mesh["tp"], mesh["dp"], use_activation_checkpointing=False)
        self._train(whole, model, ranks_of_batch=2)


class Replicated(RanksOfOneClass):
    """DDP with communication hooks, compiled models and sharded optimizers."""

    def _model(self) -> nn.Module:
        torch.manual_seed(0)
        return MLP(WIDTH)

    def _mean_gradients(self) -> list[torch.Tensor]:
        model = self._model()
        for rank in range(self.world_size):
            (model(inputs(rank, 0)).square().mean() / self.world_size).backward()
        return [parameter.grad for parameter in model.parameters()]

    @parametrize("hook", ["fp16_compress_hook", "allreduce_hook"])
    def test_hook(self, hook: str) -> None:
        model = DistributedDataParallel(self._model())
        model.register_comm_hook(None, getattr(default_hooks, hook))
        model(inputs(self.rank, 0)).square().mean().backward()
        for found, expected in zip(model.parameters(), self._mean_gradients(), strict=True):
            self.assertEqual(found.grad, expected, atol=1e-2, rtol=2e-2)

    def test_power_sgd(self) -> None:
        model = DistributedDataParallel(self._model())
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=WIDTH, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for _ in range(4):
            model.zero_grad()
            model(inputs(self.rank, 0)).square().mean().backward()
        for found in model.parameters():
            dist.all_gather(every := [torch.empty_like(found.grad) for _ in range(self.world_size)], found.grad)
            self.assertTrue(all(torch.equal(other, found.grad) for other in every))

    def test_many_buckets(self) -> None:
        model = DistributedDataParallel(self._model(), bucket_cap_mb=0.0001, gradient_as_bucket_view=True)
        for _ in range(3):
            model.zero_grad()
            model(inputs(self.rank, 0)).square().mean().backward()
            self.assertEqual([parameter.grad for parameter in model.parameters()], self._mean_gradients())

    @parametrize("divide_by_all", [False, True])
    def test_ranks_that_end_early(self, divide_by_all: bool) -> None:
        model = DistributedDataParallel(self._model())
        steps = 2 + self.rank
        with model.join(divide_by_initial_world_size=divide_by_all):
            for step in range(steps):
                model.zero_grad()
                model(inputs(self.rank, step)).square().mean().backward()
        ranks = range(self.rank, self.world_size)  # those that were still there in this rank's last step
        whole = self._model()
        for rank in ranks:
            divisor = self.world_size if divide_by_all else len(ranks)
            (whole(inputs(rank, steps - 1)).square().mean() / divisor).backward()
        self.assertEqual([p.grad for p in model.parameters()], [p.grad for p in whole.parameters()])

    def test_compiled(self) -> None:
        torch._dynamo.reset()
        model = torch.compile(DistributedDataParallel(self._model()), backend="aot_eager")
        model(inputs(self.rank, 0)).square().mean().backward()
        self.assertEqual([parameter.grad for parameter in model.parameters()], self._mean_gradients())

    def test_optimizer_in_shards(self) -> None:
        whole = self._model()
        model = DistributedDataParallel(copy.deepcopy(whole))
        sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.02)
        reference = torch.optim.Adam(whole.parameters(), lr=0.02)
        for step in range(3):
            sharded.zero_grad()
            reference.zero_grad()
            model(inputs(self.rank, step)).square().mean().backward()
            for rank in range(self.world_size):
                (whole(inputs(rank, step)).square().mean() / self.world_size).backward()
            sharded.step()
            reference.step()
        self.assertEqual(list(model.module.parameters()), list(whole.parameters()))
        sharded.consolidate_state_dict(to=0)
        if self.rank == 0:
            self.assertEqual(sharded.state_dict()["state"][0]["exp_avg"], reference.state_dict()["state"][0]["exp_avg"])


for _case in (Sharded, Replicated):
    instantiate_parametrized_tests(_case)
CLASSES = (Sharded, Replicated)
