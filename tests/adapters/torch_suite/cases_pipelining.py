"""`torch.distributed.pipelining` over the backend: its schedules against the whole model in one process."""

from __future__ import annotations

import copy

import torch
from ranks import RanksOfOneClass
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

WIDTH = 8
ONE_STAGE = ("ScheduleGPipe", "Schedule1F1B")
SEVERAL_STAGES = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class Pipelining(RanksOfOneClass):
    """Losses, outputs and gradients of a model cut into stages."""

    def _check(self, schedule: str, mine: list[int], stages: int, last_on: int, micro_batches: int) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)]
        whole = copy.deepcopy(nn.Sequential(*layers))
        x, y = torch.randn(2 * micro_batches, WIDTH), torch.randn(2 * micro_batches, WIDTH)
        parts = [pipelining.PipelineStage(layers[i], i, stages, torch.device("cpu")) for i in mine]
        kind = getattr(pipelining, schedule)
        single = issubclass(kind, PipelineScheduleSingle)
        pipeline = kind(parts[0] if single else parts, micro_batches, loss_fn=nn.MSELoss())
        for _ in range(2):
            for layer in (whole, *layers):
                layer.zero_grad()
            losses: list[torch.Tensor] = []
            arguments = (x,) if self.rank == 0 else ()
            targets = {"target": y, "losses": losses} if self.rank == last_on else {}
            output = pipeline.step(*arguments, **targets)
            expected = whole(x)
            nn.functional.mse_loss(expected, y).backward()
            if self.rank == last_on:
                self.assertEqual(output, expected)
                self.assertEqual(torch.stack(losses).mean(), nn.functional.mse_loss(expected, y))
            for i in mine:
                self.assertEqual([p.grad for p in layers[i].parameters()], [p.grad for p in whole[i].parameters()])

    @parametrize("schedule", ONE_STAGE)
    @parametrize("rounds", [1, 3])
    def test_one_stage_a_rank(self, schedule: str, rounds: int) -> None:
        self._check(schedule, [self.rank], self.world_size, self.world_size - 1, rounds * self.world_size)

    @parametrize("schedule", SEVERAL_STAGES)
    def test_two_stages_a_rank(self, schedule: str) -> None:
        mine = [self.rank, self.rank + self.world_size]
        self._check(schedule, mine, 2 * self.world_size, self.world_size - 1, 2 * self.world_size)

    @parametrize("schedule", V_SHAPED)
    def test_v_shaped(self, schedule: str) -> None:
        mine = [self.rank, 2 * self.world_size - 1 - self.rank]
        self._check(schedule, mine, 2 * self.world_size, 0, 2 * self.world_size)

    def test_forward_only(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(self.world_size)]
        stage = pipelining.PipelineStage(layers[self.rank], self.rank, self.world_size, torch.device("cpu"))
        x = torch.randn(8, WIDTH)
        with torch.no_grad():
            output = pipelining.ScheduleGPipe(stage, 4).eval(*((x,) if self.rank == 0 else ()))
        if self.rank == self.world_size - 1:
            self.assertEqual(output, nn.Sequential(*layers)(x))

    def test_traced_and_cut(self) -> None:
        torch.manual_seed(0)
        names = [f"layer{i}" for i in range(self.world_size)]
        model = nn.Sequential()
        for name in names:
            model.add_module(name, nn.Linear(WIDTH, WIDTH))
        x = torch.randn(8, WIDTH)
        cuts = dict.fromkeys(names[1:], pipelining.SplitPoint.BEGINNING)
        stages = pipelining.pipeline(model, mb_args=(x[:2],), split_spec=cuts)
        schedule = pipelining.ScheduleGPipe(stages.build_stage(self.rank, torch.device("cpu")), 4)
        output = schedule.step(*((x,) if self.rank == 0 else ()))
        if self.rank == self.world_size - 1:
            self.assertEqual(output, model(x))


instantiate_parametrized_tests(Pipelining)
CLASSES = (Pipelining,)
