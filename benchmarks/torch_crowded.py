"""Training on the CPU with more ranks than cores: xvcomm beside Gloo, alternating in one job.

    taskset -c 0,1 torchrun --nproc-per-node 4 benchmarks/torch_crowded.py

trains two models, each with DDP, FSDP2 and a pipeline (1F1B), over a Gloo group and over an xvcomm group. Steps
of the two alternate. Prints medians and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

SHAPES = ((32, 16), (256, 64))
"""(width, tokens per sample) of the models."""

LAYERS, VOCABULARY, SAMPLES, MICRO_BATCHES = 4, 512, 8, 8
STEPS = 3
"""Steps per turn."""

WARM_UP = 3
"""Turns that are not counted."""

Step = Callable[[Tensor, Tensor], object]


class Block(nn.Module):
    """A feed-forward layer with an RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, tokens, width) to the same shape."""
        return x + self.down(F.silu(self.up(self.norm(x))))


def model(width: int, first: int = 0, stop: int = LAYERS) -> nn.Sequential:
    """Layers `first` to `stop` - 1, with the embedding before the first and the head after the last layer of the model."""
    torch.manual_seed(first)
    parts: list[nn.Module] = [nn.Embedding(VOCABULARY, width)] if first == 0 else []
    parts += [Block(width) for _ in range(first, stop)]
    if stop == LAYERS:
        parts.append(nn.Linear(width, VOCABULARY))
    return nn.Sequential(*parts)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def replicated(net: nn.Module) -> Step:
    """A step in which every rank runs its samples through all layers."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return lambda x, y: loss_of(net(x[mine]), y[mine]).backward()


def ddp(width: int, group: dist.ProcessGroup) -> tuple[nn.Module, Step]:
    """The module wrapped by DDP, and its step."""
    net = nn.parallel.DistributedDataParallel(model(width), process_group=group)
    return net, replicated(net)


def fsdp2(width: int, group: dist.ProcessGroup) -> tuple[nn.Module, Step]:
    """The module sharded by FSDP2, one unit per block, and its step."""
    mesh, net = DeviceMesh.from_group(group, "cpu"), model(width)
    for part in net:
        if isinstance(part, Block):
            fully_shard(part, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, replicated(net)


def pipeline(width: int, group: dist.ProcessGroup) -> tuple[nn.Module, Step]:
    """This rank's stage, and its step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    share = LAYERS // ranks
    net = model(width, rank * share, (rank + 1) * share)
    stage = PipelineStage(net, rank, ranks, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)

    def step(x: Tensor, y: Tensor) -> None:
        inputs = (x,) if rank == 0 else ()
        target = {"target": y} if rank == ranks - 1 else {}
        schedule.step(*inputs, **target)

    return net, step


def measure(make: Callable[[int, dist.ProcessGroup], tuple[nn.Module, Step]], width: int, tokens: int,
            groups: dict[str, dist.ProcessGroup], turns: int) -> dict[str, float]:  # fmt: skip
    """Milliseconds per step with each group, as medians over the turns."""
    made = {name: make(width, group) for name, group in groups.items()}
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.01) for name, (net, _) in made.items()}
    generator = torch.Generator().manual_seed(1)
    times: dict[str, list[float]] = {name: [] for name in groups}
    for turn in range(WARM_UP + turns):
        text = torch.randint(VOCABULARY, (SAMPLES, tokens + 1), generator=generator)
        for name in list(groups)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(STEPS):
                made[name][1](text[:, :-1], text[:, 1:])
                optimizers[name].step()
                optimizers[name].zero_grad()
            dist.barrier()
            times[name].append((time.perf_counter() - begin) / STEPS * 1e3)
    return {name: statistics.median(each[WARM_UP:]) for name, each in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=22)
    turns = parser.parse_args().turns
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {"gloo": dist.group.WORLD, "xvcomm": dist.new_group(backend="xvcomm")}
    if LAYERS % dist.get_world_size():
        raise SystemExit(f"the pipeline of {LAYERS} layers takes 1, 2 or {LAYERS} ranks")
    for width, tokens in SHAPES:
        for make in (ddp, fsdp2, pipeline):
            found = measure(make, width, tokens, groups, turns)
            if dist.get_rank() == 0:
                times = "  ".join(f"{name} {time:7.2f} ms" for name, time in found.items())
                ratio = found["xvcomm"] / found["gloo"]
                print(f"width {width:4}  {make.__name__:8}  {times}  part of Gloo's time {ratio:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
