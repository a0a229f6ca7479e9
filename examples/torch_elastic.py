"""Data-parallel training under torchrun that goes on from the last step when a rank is killed.

    torchrun --standalone --nproc-per-node 3 --max-restarts 3 examples/torch_elastic.py

torchrun's agent ends all ranks when one fails, and starts all of them again. What they had in memory is lost, so each keeps its
last two steps as files in host memory, which outlive it: ranks may be one step apart when one is killed. A rank whose files
are missing, on a host that was replaced, gets the state from another one.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.nn.parallel import DistributedDataParallel


class Snapshots:
    """The newest states of this rank in a folder, by step.

    Args:
        folder: of the rank; in host memory, it costs no disk.
        kept: how many.
    """

    def __init__(self, folder: Path, kept: int = 2) -> None:
        self._folder, self._kept = folder, kept
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def steps(self) -> list[int]:
        """The steps that are there, oldest first."""
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdigit())

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Keep the state after a step. A rank that is killed meanwhile leaves the ones before."""
        fresh = self._folder / "new"
        torch.save(state, fresh)
        fresh.replace(self._folder / str(step))
        for old in self.steps()[: -self._kept]:
            (self._folder / str(old)).unlink()

    def load(self, step: int) -> dict[str, Any]:
        """The state after a step."""
        state: dict[str, Any] = torch.load(self._folder / str(step), weights_only=True)
        return state


def resume(snapshots: Snapshots, steps: int) -> tuple[int, dict[str, Any] | None]:
    """The newest step that every rank that has any can continue from, and the state after it; None at the beginning.

    Args:
        steps: of the job. The last one is done again, as its loss is not kept.
    """
    mine, every = [step for step in snapshots.steps() if step < steps], [[0]] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    there = [set(steps) for steps in every if steps]
    common = set.intersection(*there) if there else set()
    if not common:
        return 0, None
    step = max(common)
    holder = next(rank for rank, steps in enumerate(every) if step in steps)
    state = [snapshots.load(step) if dist.get_rank() == holder else None]
    dist.broadcast_object_list(state, holder)  # the same bits on all ranks, also on those without files
    return step, state[0]


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of a step and rank: noisy values of a linear function."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 8, generator=draw)
    return x, x.sum(1, keepdim=True) + 0.01 * torch.randn(16, 1, generator=draw)


def main(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 100,
    snapshots: Annotated[
        Path, typer.Option(help="Folder for the snapshots; removed at the end, kept if the job fails.")
    ] = Path("/dev/shm"),
) -> None:
    """Train a small network by DistributedDataParallel, and print the last loss."""
    run = os.environ["TORCHELASTIC_RUN_ID"]
    if run == "none":
        raise typer.BadParameter(
            "the job has no name, which its snapshots need: give torchrun --standalone, or --rdzv-id"
        )
    dist.init_process_group("xvcomm")
    rank = dist.get_rank()
    place = snapshots / f"torch-elastic-{os.getuid()}-{run}-{rank}"
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        shutil.rmtree(place, ignore_errors=True)  # of an earlier job of this name, which has failed
    kept = Snapshots(place)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    begun, state = resume(kept, steps)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if rank == 0:
            print(f"goes on after step {begun}", flush=True)
    loss = torch.zeros(())
    for step in range(begun + 1, steps + 1):
        x, y = batch(step, rank)
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    dist.all_reduce(loss := loss.detach(), dist.ReduceOp.AVG)
    if rank == 0:
        print(f"loss {loss.item():.9f}", flush=True)
    dist.destroy_process_group()
    shutil.rmtree(place)


if __name__ == "__main__":
    typer.run(main)
