"""Trains a small language model with PyTorch only; a command-line option selects the communication backend.

    xvcomm run -n 4 --islands cuda:2,rocm:2 -- examples/torch_ddp.py --mode pp-dp --check
    torchrun --nproc-per-node 4 examples/torch_ddp.py --islands cuda:2,rocm:2 --mode ddp --check
    torchrun --nproc-per-node 4 examples/torch_ddp.py --backend gloo --mode fsdp2

The text is the source code of Python's standard library, byte by byte. Parameters and text do not depend on the layout, so
`--check` can train the same model in one process and compare the losses.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from llama.config import AdamW, Model, Part
from llama.data import Batches, corpus
from llama.layout import cut
from llama.torch_module import Decoder, loss_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

MODES = ("ddp", "fsdp2", "pp", "pp-dp")
TOLERANCE = 1e-6


def replicated(model: torch.nn.Module, windows: Tensor) -> float:
    """Forward and backward over this replica's micro-batches, with gradients reduced after the last; returns the mean loss."""
    total = 0.0
    for i, window in enumerate(windows):
        last = i == len(windows) - 1
        with model.no_sync() if isinstance(model, DistributedDataParallel) and not last else contextlib.nullcontext():
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            loss = loss_of(model(window[:, :-1]), window[:, 1:]) / len(windows)
            loss.backward()
        total += loss.item()
    return total


class Replicas:
    """Every rank runs the whole model: replicated by DDP or sharded by FSDP2."""

    def __init__(self, model: Model, args: argparse.Namespace, device: torch.device, mesh: DeviceMesh) -> None:
        self.replica = mesh.get_rank()
        decoder = Decoder(model, Part(0, model.layers, True, True), args.seed).to(device)
        self.module: Any = decoder
        if args.mode == "ddp":
            self.module = DistributedDataParallel(decoder, device_ids=[device] if device.type == "cuda" else None)
        else:
            for block in decoder.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(decoder, mesh=mesh)

    def step(self, windows: Tensor) -> float:
        """Compute the gradients of this replica's windows, (micro-batches, sequences, context + 1); returns its mean loss."""
        return replicated(self.module, windows)


class Stages:
    """Pipeline stages across ranks; replicas of a stage are joined by DDP."""

    def __init__(self, model: Model, args: argparse.Namespace, device: torch.device, mesh: DeviceMesh) -> None:
        depth, place = mesh["pp"].size(), mesh.get_local_rank("pp")
        self.replica = mesh.get_local_rank("dp")
        self.first, self.last = place == 0, place == depth - 1
        self.module: Any = Decoder(model, cut(model.layers, depth)[place], args.seed).to(device)
        if mesh["dp"].size() > 1:
            self.module = DistributedDataParallel(self.module, process_group=mesh.get_group("dp"))
        stage = PipelineStage(self.module, place, depth, device, group=mesh.get_group("pp"))
        self.schedule = Schedule1F1B(stage, args.micro_batches, loss_fn=loss_of)

    def step(self, windows: Tensor) -> float:
        """As `Replicas.step`; returns 0 on ranks without the last stage."""
        flat = windows.flatten(0, 1)
        losses: list[Tensor] = []
        inputs = (flat[:, :-1],) if self.first else ()
        targets = {"target": flat[:, 1:], "losses": losses} if self.last else {}
        self.schedule.step(*inputs, **targets)
        return torch.stack(losses).mean().item() if losses else 0.0


def layout(mode: str, size: int) -> tuple[int, int]:
    """Number of pipeline stages and of replicas."""
    if mode == "pp":
        return size, 1
    if mode == "pp-dp":
        if size % 2:
            sys.exit(f"error: --mode pp-dp makes two stages; {size} ranks do not divide by 2")
        return 2, size // 2
    return 1, size


def optimizer_of(module: torch.nn.Module, settings: AdamW) -> torch.optim.Optimizer:
    """AdamW with the settings of the other examples."""
    return torch.optim.AdamW(
        module.parameters(), settings.lr, settings.betas, settings.eps, weight_decay=settings.weight_decay
    )


def batches(args: argparse.Namespace, replicas: int, device: torch.device) -> Iterator[Tensor]:
    """The windows of each step, int64 of shape (replicas, micro-batches, sequences, context + 1)."""
    text = Batches(corpus(), replicas * args.micro_batches * args.sequences, args.context, args.seed)
    for step in range(1, args.steps + 1):
        yield torch.from_numpy(text.step(step)).to(device).unflatten(0, (replicas, args.micro_batches, args.sequences))


def train(model: Model, args: argparse.Namespace, device: torch.device, log: TextIO | None) -> list[float]:
    """Train over all ranks; returns the mean loss of every step, the same on every rank."""
    stages, replicas = layout(args.mode, dist.get_world_size())
    shape, names = ((stages, replicas), ("pp", "dp")) if stages > 1 else ((replicas,), ("dp",))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    worker = (Stages if stages > 1 else Replicas)(model, args, device, mesh)
    rule = optimizer_of(worker.module, AdamW(args.lr))
    losses = []
    for step, windows in enumerate(batches(args, replicas, device), 1):
        begun = time.perf_counter()
        rule.zero_grad()
        mine = torch.tensor(worker.step(windows[worker.replica]) / replicas, dtype=torch.float64, device=device)
        rule.step()
        dist.all_reduce(mine)
        losses.append(mine.item())
        if log is not None:
            record = {"step": step, "loss": losses[-1], "seconds": round(time.perf_counter() - begun, 4)}
            print(json.dumps(record), file=log, flush=True)
    return losses


def train_alone(model: Model, args: argparse.Namespace, device: torch.device, replicas: int) -> list[float]:
    """Train the same model on the same text in this process, without communication."""
    decoder = Decoder(model, Part(0, model.layers, True, True), args.seed).to(device)
    rule = optimizer_of(decoder, AdamW(args.lr))
    losses = []
    for windows in batches(args, replicas, device):
        rule.zero_grad()
        losses.append(replicated(decoder, windows.flatten(0, 1)))
        rule.step()
    return losses


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="xvcomm", help="what init_process_group gets")
    parser.add_argument("--mode", choices=MODES, default="ddp")
    parser.add_argument("--islands", help="label the ranks, for instance cuda:2,rocm:2: a rehearsal")
    parser.add_argument("--check", action="store_true", help="train in one process too; fail if losses differ")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/torch_ddp.jsonl"), help="file for the losses, JSON lines"
    )
    sizes = {
        "layers": 4, "dim": 64, "heads": 4, "kv-heads": 2, "hidden": 128, "context": 64, "steps": 20, "micro-batches": 4,
        "sequences": 2, "seed": 0,
    }  # fmt: skip
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


def label(islands: str) -> str:
    """This rank's island label: `cuda:2,rocm:2` means cuda for ranks 0 and 1 and rocm for 2 and 3."""
    labels = [
        name for part in islands.split(",") for name, _, count in [part.partition(":")] for _ in range(int(count or 1))
    ]
    return labels[int(os.environ["RANK"])]


def main() -> None:
    """Train; rank 0 also logs and compares."""
    args = arguments()
    if args.islands:
        os.environ.setdefault("XVCOMM_ISLAND", label(args.islands))
    model = Model(args.layers, args.dim, args.heads, args.kv_heads, args.hidden, args.context)
    device = torch.device("cpu")
    if torch.cuda.is_available() and args.backend != "gloo" and os.environ.get("XVCOMM_DEVICE") != "host":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    dist.init_process_group(args.backend)
    rank, replicas = dist.get_rank(), layout(args.mode, dist.get_world_size())[1]
    header = {
        "backend": dist.get_backend(), "mode": args.mode, "ranks": dist.get_world_size(), "device": device.type,
        "replicas": replicas, "rehearsal": "XVCOMM_ISLAND" in os.environ, "model": asdict(model),
        "parameters": model.parameters, "lr": args.lr, "steps": args.steps, "seed": args.seed,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        log = None
        if rank == 0:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(args.out.open("w", encoding="utf-8"))
            print(json.dumps(header), file=log, flush=True)
        losses = train(model, args, device, log)
        dist.destroy_process_group()
        if log is None:
            return
        print(
            f"{args.mode} over {header['ranks']} ranks on {header['backend']}: loss {losses[0]:.6f} -> {losses[-1]:.6f}"
        )
        if args.check:
            alone = train_alone(model, args, device, replicas)
            worst = max(abs(a - b) / abs(b) for a, b in zip(losses, alone, strict=True))
            passed = worst <= TOLERANCE
            print(json.dumps({"check": {"worst_relative_difference": worst, "passed": passed}}), file=log)
            print(f"one process: {alone[0]:.6f} -> {alone[-1]:.6f}; worst relative difference {worst:.1e}")
            sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
