"""`torch.distributed.pipelining`: every schedule gives the gradients of the undivided model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchchecks import close, me, noise, size
from torchjobs import Job

SINGLE = ("ScheduleGPipe", "Schedule1F1B")
MULTI = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
VEE = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
WIDTH = 8


def layers(count: int) -> list[nn.Module]:
    """The stages of the model, the same on all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def trained_alone(
    count: int, x: torch.Tensor, y: torch.Tensor, micro_batches: int
) -> tuple[list[nn.Module], torch.Tensor]:
    """The stages with their gradients, and the loss, computed in one process."""
    whole = layers(count)
    loss = sum(
        nn.functional.mse_loss(nn.Sequential(*whole)(a), b)
        for a, b in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True)
    )
    (loss / micro_batches).backward()
    return whole, loss / micro_batches


def places(schedule: str, rank: int, ranks: int) -> list[int]:
    """The stages of a rank."""
    if schedule in SINGLE:
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if schedule in VEE else [rank, rank + ranks]


def piped(schedule: str, group: Any = None, micro_batches: int = 4, where: str = "cpu", relative: float = 1e-6) -> None:
    """Two steps of a schedule over a group."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    mine = places(schedule, rank, ranks)
    count = ranks * len(mine)
    x, y, device = noise(1, 8, WIDTH), noise(2, 8, WIDTH), torch.device(where)
    stages = [
        pipelining.PipelineStage(layers(count)[place].to(device), place, count, device, group=group) for place in mine
    ]
    kind = getattr(pipelining, schedule)
    pipe = kind(stages[0] if schedule in SINGLE else stages, micro_batches, loss_fn=nn.functional.mse_loss)
    expected, loss = trained_alone(count, x, y, micro_batches)
    for _ in range(2):
        for stage in stages:
            stage.submod.zero_grad()
        losses: list[torch.Tensor] = []
        inputs = (x.to(device),) if 0 in mine else ()
        last = {"target": y.to(device), "losses": losses} if count - 1 in mine else {}
        pipe.step(*inputs, **last)
        for stage, place in zip(stages, mine, strict=True):
            for parameter, other in zip(stage.submod.parameters(), expected[place].parameters(), strict=True):
                close(parameter.grad, other.grad, 10 * relative)
        if losses:
            close(torch.stack(losses).mean(), loss, relative)


@pytest.mark.parametrize("schedule", [*SINGLE, *MULTI, *VEE])
def test_schedules_across_the_border(pair: Job, schedule: str) -> None:
    pair.run(piped, schedule)


@pytest.mark.parametrize(
    "schedule", ["Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"]
)
def test_schedules_on_four_ranks(four: Job, schedule: str) -> None:
    four.run(piped, schedule, None, 8)


def test_a_schedule_in_one_island(island: Job) -> None:
    island.run(piped, "Schedule1F1B")


def with_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    stage = copy.deepcopy(layers(2)[place])
    stage = nn.parallel.DistributedDataParallel(stage, process_group=mesh.get_group("dp"))
    pipe = pipelining.Schedule1F1B(
        pipelining.PipelineStage(stage, place, 2, torch.device("cpu"), group=mesh.get_group("pp")), 4,
        loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    xs, ys = [noise(10 + r, 8, WIDTH) for r in range(2)], [noise(20 + r, 8, WIDTH) for r in range(2)]
    whole = layers(2)
    for x, y in zip(xs, ys, strict=True):
        (nn.functional.mse_loss(nn.Sequential(*whole)(x), y) / 2).backward()
    pipe.step(*((xs[replica],) if place == 0 else ()), **({"target": ys[replica]} if place == 1 else {}))
    for parameter, other in zip(stage.parameters(), whole[place].parameters(), strict=True):
        close(parameter.grad, other.grad, 1e-5)


def test_stages_across_the_border_and_replicas_inside(four: Job) -> None:
    four.run(with_replicas)


class Whole(nn.Module):
    """A model for torch to split."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def traced() -> None:
    x, y = noise(1, 8, WIDTH), noise(2, 8, WIDTH)
    model = Whole()
    pipe = pipelining.pipeline(model, mb_args=(x[:2],), split_spec={"second": pipelining.SplitPoint.BEGINNING})
    stage = pipe.build_stage(me(), torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    out = schedule.step(x) if me() == 0 else schedule.step(target=y)
    if me() == size() - 1:
        close(out, Whole()(x), 1e-5)
    expected, _ = trained_alone(2, x, y, 4)
    for parameter, other in zip(stage.submod.parameters(), expected[me()].parameters(), strict=True):
        close(parameter.grad, other.grad, 1e-5)


def test_a_model_that_torch_cuts(pair: Job) -> None:
    pair.run(traced)
