"""Distributed checkpoints over the backend: saved with one layout of ranks, loaded with another."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RanksOfOneClass
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.common_fsdp import MLPStack
from torch.testing._internal.distributed.checkpoint_utils import with_temp_dir
from torch.testing._internal.distributed.common_state_dict import VerifyStateDictMixin

WIDTH = 6


class Checkpoints(VerifyStateDictMixin, RanksOfOneClass):
    """`torch.distributed.checkpoint`, with torch's comparison of state dicts."""

    def _trained(self) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
        torch.manual_seed(0)
        whole, model = MLPStack(WIDTH), MLPStack(WIDTH)
        model.load_state_dict(whole.state_dict())
        for block in model:
            fully_shard(block, mesh=self.build_device_mesh())
        fully_shard(model, mesh=self.build_device_mesh())
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (whole, model)]
        for m, optimizer in zip((whole, model), optimizers, strict=True):
            m(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
        return whole, model, *optimizers

    @with_temp_dir
    def test_other_sharding(self) -> None:
        mesh = self.build_device_mesh()
        x = torch.arange(float(6 * self.world_size * 5)).reshape(-1, 5)
        dcp.save({"x": distribute_tensor(x, mesh, [Shard(0)]), "step": 7}, checkpoint_id=self.temp_dir)
        for placement in (Shard(1), Replicate(), Shard(0)):
            loaded = {"x": distribute_tensor(torch.zeros_like(x), mesh, [placement]), "step": 0}
            dcp.load(loaded, checkpoint_id=self.temp_dir)
            self.assertEqual(loaded["x"].full_tensor(), x)
            self.assertEqual(loaded["step"], 7)

    @with_temp_dir
    def test_model_and_optimizer(self) -> None:
        _, model, _, optimizer = self._trained()
        saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(saved, checkpoint_id=self.temp_dir)
        expected = {name: tensor.full_tensor().clone() for name, tensor in saved["model"].items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        loaded = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(loaded, checkpoint_id=self.temp_dir)
        set_model_state_dict(model, loaded["model"])
        for name, parameter in model.named_parameters():
            self.assertEqual(parameter.full_tensor(), expected[name])

    @with_temp_dir
    def test_asynchronous(self) -> None:
        """Saved by a thread, over a second group, while the ranks continue."""
        mesh = self.build_device_mesh()
        x = distribute_tensor(torch.arange(64.0), mesh, [Shard(0)])
        group = dist.new_group()
        saving = dcp.async_save({"x": x}, checkpoint_id=self.temp_dir, process_group=group)
        for _ in range(5):
            dist.all_reduce(torch.ones(10))
        saving.result()
        dist.barrier()
        loaded = {"x": distribute_tensor(torch.zeros(64), mesh, [Shard(0)])}
        dcp.load(loaded, checkpoint_id=self.temp_dir)
        self.assertEqual(loaded["x"].full_tensor(), torch.arange(64.0))

    def test_state_dicts_of_shards(self) -> None:
        whole, model, _, optimizer = self._trained()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        self._verify_msd(get_model_state_dict(whole), model_state)
        self.assertTrue(all(isinstance(part["exp_avg"], DTensor) for part in optimizer_state["state"].values()))

    def test_whole_state_on_rank_0(self) -> None:
        whole, model, *_ = self._trained()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        found = get_model_state_dict(model, options=options)
        self.assertEqual(found, dict(whole.state_dict()) if self.rank == 0 else {})

    def test_whole_state_from_rank_0(self) -> None:
        whole, model, *_ = self._trained()
        state = {name: tensor + 1 for name, tensor in whole.state_dict().items()} if self.rank == 0 else {}
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        for name, parameter in model.named_parameters():
            self.assertEqual(parameter.full_tensor(), whole.get_parameter(name) + 1)


CLASSES = (Checkpoints,)
