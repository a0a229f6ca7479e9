"""Ray Train over NVIDIA and AMD GPUs: torch's DDP on the backend xvcomm.

    python train.py --workers nvidia=8 amd=8 --steps 1000 --storage /shared/runs

Start each node's Ray from the environment of its vendor, with a label: `ray start --address=... --labels vendor=amd`. Its workers
run in that environment. xvcomm, Ray and Python must be of the same versions on all nodes.
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model


def loop(config: dict[str, Any]) -> None:
    """What each worker does: your training, with a checkpoint that it can go on from. Here it learns a line."""
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    first, saved = 0, ray.train.get_checkpoint()
    if saved:
        with saved.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        first = state["step"]
    model = prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    device = next(model.parameters()).device
    mine = data[rank::size].to(device)
    wanted = mine.sum(1, keepdim=True)
    for step in range(first, config["steps"]):
        loss = torch.nn.functional.mse_loss(model(mine), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        metrics = {"step": step, "loss": mean.item() / size}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                state = {"model": getattr(model, "module", model).state_dict(), "step": step + 1}
                torch.save(state, Path(folder, "state.pt"))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=checkpoint)


def trainer(
    function: Any, workers: dict[str, int], config: dict[str, Any], storage: str, gpus: bool = True
) -> TorchTrainer:
    """A trainer with so many workers on the nodes of each label `vendor`."""
    labels = [{"vendor": vendor} for vendor, count in workers.items() for _ in range(count)]
    return TorchTrainer(
        function,
        train_loop_config=config,
        torch_config=TorchConfig(backend="xvcomm"),
        scaling_config=ray.train.ScalingConfig(num_workers=len(labels), use_gpu=gpus, label_selector=labels),
        run_config=ray.train.RunConfig(
            storage_path=storage,
            # After the loss of a worker Ray starts all of them again, from the last checkpoint.
            failure_config=ray.train.FailureConfig(max_failures=3),
            # The connections between nodes prove it; without it, everyone who reaches torch's store can join.
            worker_runtime_env={"env_vars": {"XVCOMM_SECRET": secrets.token_hex(16)}},
        ),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", nargs="+", default=["nvidia=8", "amd=8"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--storage", default="/tmp/xvcomm-runs", help="a folder that all nodes share")
    args = parser.parse_args()
    counts = {vendor: int(count) for vendor, _, count in (text.partition("=") for text in args.workers)}
    print(trainer(loop, counts, {"steps": args.steps}, args.storage).fit().metrics)
