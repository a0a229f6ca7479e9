"""Training speed of LLaMA models of about one and eight billion parameters over two islands: xvcomm beside NCCL and Gloo.

    python benchmarks/torch_train.py --out docs/figures

runs DDP, FSDP2 and a pipeline (1F1B) on all GPUs of this host, once for each communication library, each in a job of its own:
xvcomm with the GPUs as one island, xvcomm with half of them labelled as another island or another host, between which TCP
carries (rehearsals), NCCL, NCCL without P2P, Gloo. The pipeline has a stage on each half of the GPUs, which DDP replicates
there. The larger model is trained by the pipeline only, over two islands, over two hosts and with NCCL. The text is random
tokens: only speed and the first losses matter. Writes torch-trainN.md and .json for N ranks; modes that are not measured in
this run keep their entries there and are not judged. Exits with code 1 if a bar is not met.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from host import Bar
from torch import Tensor, nn
from torch.nn import functional as F

from xvcomm.cli.run import launch


@dataclass(frozen=True, slots=True)
class Way:
    """How the ranks communicate.

    Attributes:
        backend: of torch.distributed.
        islands: whether the second half of the ranks is labelled as another island.
        hosts: whether it is labelled as on another host too.
        environment: additional variables of all ranks.
    """

    backend: str
    islands: bool = False
    hosts: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


ISLANDS, HOSTS = "xvcomm, two islands", "xvcomm, two hosts"
WAYS = {
    "xvcomm, one island": Way("xvcomm"),
    ISLANDS: Way("xvcomm", islands=True),
    HOSTS: Way("xvcomm", islands=True, hosts=True),
    "nccl": Way("nccl"),
    "nccl without P2P": Way("nccl", environment={"NCCL_P2P_DISABLE": "1"}),
    "gloo": Way("gloo"),
}
SEED = 1
STAGES = 2
"""Stages of the pipeline."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model and of a step."""

    dim: int = 2048
    layers: int = 16
    heads: int = 32
    hidden: int = 8192
    vocabulary: int = 16384
    tokens: int = 2048
    samples: int = 8

    def parameters(self) -> int:
        """Number of parameters."""
        return self.layers * (4 * self.dim**2 + 3 * self.dim * self.hidden) + 2 * self.vocabulary * self.dim


LARGE = "pp-8b"
SHAPES = dict.fromkeys(("ddp", "fsdp2", "pp"), Shape()) | {LARGE: Shape(dim=4096, layers=32, hidden=14336)}
"""The model that is trained in each mode."""

LARGE_WAYS = (ISLANDS, HOSTS, "nccl", "nccl without P2P")


class Block(nn.Module):
    """Attention and SwiGLU, each with an RMSNorm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.first, self.second = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, tokens, dim) to the same shape."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def model(shape: Shape, first: int, stop: int) -> nn.Sequential:
    """Layers `first` to `stop` - 1 in bfloat16 on the GPU, with embedding and head at the ends of the whole model."""
    parts: list[nn.Module] = []
    with torch.device("cuda"):  # where random numbers for eight billion parameters take no time
        for layer in range(shape.layers):
            torch.manual_seed(SEED + layer)
            if layer == 0 and first == 0:
                parts.append(nn.Embedding(shape.vocabulary, shape.dim))
            if first <= layer < stop:
                parts.append(Block(shape))
            if layer == stop - 1 == shape.layers - 1:
                parts += [nn.RMSNorm(shape.dim), nn.Linear(shape.dim, shape.vocabulary, bias=False)]
    return nn.Sequential(*(part.to(torch.bfloat16) for part in parts))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Replicated:
    """DDP or FSDP2: every rank runs its samples through all layers."""

    def __init__(self, shape: Shape, mode: str) -> None:
        net = model(shape, 0, shape.layers)
        if mode == "ddp":
            self.net: nn.Module = nn.parallel.DistributedDataParallel(net, device_ids=[torch.cuda.current_device()])
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cuda", (dist.get_world_size(),))
            for part in net:
                if isinstance(part, Block):
                    fully_shard(part, mesh=mesh)
            self.net = fully_shard(net, mesh=mesh)
        self.parameters = list(self.net.parameters())

    def step(self, x: Tensor, y: Tensor) -> float | Tensor:
        """Forward and backward; returns this rank's loss."""
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        loss = loss_of(self.net(x[mine]), y[mine])
        loss.backward()
        return loss.detach()


class Piped:
    """A 1F1B pipeline of two stages, one on each half of the ranks, which replicate it; micro-batches are of one sample."""

    def __init__(self, shape: Shape, mode: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self.copies = dist.get_world_size() // STAGES
        number, self.copy = divmod(dist.get_rank(), self.copies)
        mesh = init_device_mesh("cuda", (STAGES, self.copies), mesh_dim_names=("pp", "dp"))
        share = shape.layers // STAGES
        net: nn.Module = model(shape, number * share, (number + 1) * share)
        if self.copies > 1:
            devices, group = [torch.cuda.current_device()], mesh.get_group("dp")
            net = nn.parallel.DistributedDataParallel(net, devices, process_group=group, gradient_as_bucket_view=True)
        stage = PipelineStage(net, number, STAGES, torch.device("cuda"), group=mesh.get_group("pp"))
        self.schedule = Schedule1F1B(stage, shape.samples // self.copies, loss_fn=loss_of)
        self.first, self.last = number == 0, number == STAGES - 1
        self.parameters = list(net.parameters())

    def step(self, x: Tensor, y: Tensor) -> float | Tensor:
        """Run all micro-batches; ranks of the last stage return the mean loss of theirs."""
        mine = slice(self.copy, None, self.copies)
        losses: list[Tensor] = []
        inputs = (x[mine],) if self.first else ()
        more: dict[str, Any] = {"target": y[mine], "losses": losses} if self.last else {}
        self.schedule.step(*inputs, **more)
        return torch.stack(losses).mean() if losses else math.nan


def rank_main(way: Way, mode: str, steps: int, shape: Shape, file: str) -> None:
    """Main function of each rank; the last one writes speed and losses to `file`."""
    warnings.simplefilter("ignore")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if way.hosts:
        os.environ["XVCOMM_HOST"] = os.environ["XVCOMM_ISLAND"]
    dist.init_process_group(way.backend)
    trainer = (Piped if mode.startswith("pp") else Replicated)(shape, mode)
    optimizer = torch.optim.AdamW(trainer.parameters, lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(SEED)
    losses, seconds = [], []
    for _ in range(steps):
        text = torch.randint(shape.vocabulary, (shape.samples, shape.tokens + 1), generator=generator).cuda()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = trainer.step(text[:, :-1], text[:, 1:])
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        losses.append(float(loss))
    if dist.get_rank() == dist.get_world_size() - 1:
        typical = statistics.median(seconds[2:])
        Path(file).write_text(json.dumps([shape.samples * shape.tokens / typical, losses]))
    dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Figure:
    """One mode with one communication library.

    Attributes:
        speed: tokens per second over all ranks.
        losses: of the last rank, step by step.
        rehearsal: whether the islands were only labels.
        date: when it was measured.
        gpu: on which GPUs.
        failed: whether the job ended with an error (Gloo cannot send tensors on GPUs).
    """

    way: str
    mode: str
    ranks: int
    speed: float
    losses: list[float]
    rehearsal: bool
    date: str
    gpu: str
    failed: bool = False


def measure(way: str, mode: str, ranks: int, steps: int) -> Figure:
    """Run one job."""
    chosen, date, gpu = WAYS[way], f"{datetime.now(UTC):%Y-%m-%d}", torch.cuda.get_device_name()
    islands = chosen.islands
    labels = [("cuda" if r < ranks // 2 else "rocm") if islands else "" for r in range(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "result"))
        argv = (sys.executable, __file__, "--rank", way, mode, str(steps), json.dumps(asdict(SHAPES[mode])), file)
        if launch(argv, labels, extra={**chosen.environment, "XVCOMM_DEVICE": ""}):
            return Figure(way, mode, ranks, 0.0, [], islands, date, gpu, failed=True)
        speed, losses = json.loads(Path(file).read_text())
    return Figure(way, mode, ranks, speed, losses, islands, date, gpu)


def bars(figures: Sequence[Figure]) -> list[Bar]:
    """The bars of the larger pipeline, if both sides were measured. A failed xvcomm job has no speed and misses the bar."""
    speed = {figure.way: figure.speed for figure in figures if figure.mode == LARGE}
    if not speed.get("nccl"):
        return []
    what = "pipeline of 8B over two {}, {} ranks, part of NCCL's tokens a second"
    return [
        Bar(what.format(name, figures[0].ranks), speed[way] / speed["nccl"], bound)
        for way, name, bound in ((ISLANDS, "islands", 0.99), (HOSTS, "hosts", 0.97)) if way in speed
    ]  # fmt: skip


def verdict(figures: Sequence[Figure]) -> int:
    """Print the bars; returns the exit code: 1 if one is not met or a job other than Gloo's failed."""
    reached = bars(figures)
    for bar in reached:
        print("{3:>8}: {0}: {2} ({1})".format(*bar.cells()))
    failed = any(figure.failed for figure in figures if figure.way != "gloo")
    return 1 if failed or not all(bar.met for bar in reached) else 0


def markdown(figures: Sequence[Figure]) -> str:
    """The page."""
    ranks, shape, large = figures[0].ranks, SHAPES["pp"], SHAPES[LARGE]
    judged = [f"| {' | '.join(bar.cells())} |" for bar in bars(figures)]
    if judged:
        judged = ["| bar | bound | measured | |", "| --- | --- | --- | --- |", *judged, ""]
    lines = [
        "# Training over two islands: figures",
        "",
        f"{ranks} GPUs. torch {torch.__version__}. A LLaMA of "
        f"{shape.parameters() / 1e9:.2f} billion parameters (8B: {large.parameters() / 1e9:.2f}), bfloat16, AdamW; "
        f"{shape.samples} samples of {shape.tokens} tokens a step. The pipeline has {STAGES} stages, "
        f"each on {ranks // STAGES} GPUs, and micro-batches of a sample. Tokens a second, medians. Islands and hosts are "
        "labels: a rehearsal.",
        "",
        *judged,
        "| | GPUs, date | "
        + " | ".join(WAYS)
        + " | two islands, part of NCCL | two islands, times NCCL without P2P | times Gloo |",
        "| --- " * (len(WAYS) + 5) + "|",
    ]
    for mode in dict.fromkeys(f.mode for f in figures):
        speed = {f.way: f.speed for f in figures if f.mode == mode}
        mixed = speed[ISLANDS]
        cells = [
            "not measured" if way not in speed else f"{speed[way]:,.0f}" if speed[way] else "fails" for way in WAYS
        ]
        for other in ("nccl", "nccl without P2P", "gloo"):
            cells.append(f"{mixed / speed[other]:.2f}" if speed.get(other) else "")
        measured = max(f"{f.gpu}, {f.date}" for f in figures if f.mode == mode)
        lines.append(f"| {mode} | {measured} | {' | '.join(cells)} |")
    apart = [
        abs(a - b) / abs(b)
        for f in figures for other in figures
        if (f.mode, other.way) == (other.mode, "nccl") and not (f.failed or other.failed)
        for a, b in zip(f.losses, other.losses, strict=True)
    ]  # fmt: skip
    worst = max(apart, default=math.nan)
    return "\n".join(
        [*lines, "", f"Losses differ from NCCL's by at most {worst:.1e}, relative, in any step of any job.", ""]
    )


def main() -> int:
    """Measure, write the report and check the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="folder for the page and its figures")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--modes", default=",".join(SHAPES))
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        way, mode, steps, shape, file = arguments.rank
        rank_main(WAYS[way], mode, int(steps), Shape(**json.loads(shape)), file)
        return 0
    ranks = torch.cuda.device_count()
    if ranks == 0 or ranks % STAGES:
        sys.exit(f"each of {STAGES} stages needs as many GPUs: set CUDA_VISIBLE_DEVICES to an even number of them")
    arguments.out.mkdir(parents=True, exist_ok=True)
    page = arguments.out / f"torch-train{ranks}.md"
    record, modes = page.with_suffix(".json"), arguments.modes.split(",")
    saved = [Figure(**each) for each in json.loads(record.read_text())] if record.exists() else []
    figures = [figure for figure in saved if figure.mode not in modes]
    for mode in modes:
        for way in LARGE_WAYS if mode == LARGE else WAYS:
            figures.append(measure(way, mode, ranks, arguments.steps))
            print(f"{mode:6s} {way:22s} {figures[-1].speed:10,.0f} tokens/s  {figures[-1].losses}", flush=True)
        page.write_text(markdown(figures))
        record.write_text(json.dumps([asdict(f) for f in figures], indent=1) + "\n")
    return verdict([figure for figure in figures if figure.mode in modes])


if __name__ == "__main__":
    sys.exit(main())
