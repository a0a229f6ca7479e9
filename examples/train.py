"""Trains a small language model over islands: pipeline stages across islands, replicas within an island.

    xvcomm run -n 4 --islands cuda:2,rocm:2 -- examples/train.py --check
    torchrun --nproc-per-node 4 examples/train.py --islands cuda:2,rocm:2 --check
    mpirun -n 4 python examples/train.py --islands cuda:2,rocm:2 --framework torch,jax
    xvcomm run -n 4 --survive --max-restarts 3 -- examples/train.py --elastic

The text is the source code of Python's standard library, byte by byte. Every parameter is drawn from the seed and its own
name, so that all layouts, schedules and frameworks train the same model; `--check` verifies this against one process.
With `--elastic` every rank has the whole model, and training goes on when ranks are killed and come back.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from llama import report
from llama.config import AdamW, Model, Part
from llama.data import Batches, corpus
from llama.elastic import Elastic
from llama.layout import Layout, cut, numbers
from llama.stage import Framework, Stage, framework, mean_loss
from rich.console import Console

import xvcomm
from xvcomm import pipeline
from xvcomm.comm.communicator import Communicator
from xvcomm.config import Config
from xvcomm.errors import ArgumentError, XvcommError
from xvcomm.rendezvous.environment import discover
from xvcomm.types.topology import Topology, parse_islands

TOLERANCE = 1e-5
ScheduleName = StrEnum("ScheduleName", {name: name for name in pipeline.SCHEDULES})


@dataclass(frozen=True, slots=True)
class Job:
    """Training settings, the same on every rank.

    Attributes:
        frameworks: one for all ranks, or one per island.
        micro_batches: per step and replica.
        sequences: per micro-batch.
        chunks: virtual stages per rank.
        layers_per_stage: one number per virtual stage; None distributes the layers evenly.
    """

    model: Model
    optimizer: AdamW
    frameworks: tuple[str, ...]
    schedule: str
    micro_batches: int
    sequences: int
    chunks: int
    layers_per_stage: list[int] | None
    steps: int
    seed: int

    def framework(self, topology: Topology, rank: int) -> type[Framework]:
        """The framework of a rank."""
        if len(self.frameworks) not in (1, len(topology.islands)):
            raise ArgumentError(
                f"--framework {','.join(self.frameworks)}: expected one, or one for each of {len(topology.islands)} islands"
            )
        return framework(self.frameworks[topology.island_of(rank).index % len(self.frameworks)])

    def batches(self, replicas: int) -> Batches:
        """The windows of all replicas, step by step."""
        return Batches(corpus(), replicas * self.micro_batches * self.sequences, self.model.context, self.seed)

    def stage(self, kind: type[Framework], part: Part, micro_batches: int) -> Stage:
        """Create one virtual stage."""
        return Stage(kind(self.model, part, self.seed, self.optimizer), self.model, micro_batches, self.sequences)


def train(comm: Communicator, layout: Layout, job: Job, meter: report.Meter | None) -> list[float]:
    """Train over all ranks; returns the loss of every step, the same on every rank."""
    position, replica = layout.place(comm.rank)
    schedule = pipeline.build(job.schedule, layout.pp, job.micro_batches, job.chunks)
    parts = cut(job.model.layers, schedule.depth, job.layers_per_stage)
    kind = job.framework(comm.topology, comm.rank)
    kind.settle(comm.device, comm.device_index)
    mine = [parts[schedule.stage(position, chunk)] for chunk in range(job.chunks)]
    stages = [job.stage(kind, part, job.micro_batches) for part in mine]
    one_pipeline, one_stage = comm.split(replica, key=position), comm.split(position, key=replica)
    pipe = pipeline.Pipeline(stages, one_pipeline, schedule)
    batches = job.batches(layout.dp)
    losses = []
    for step in range(1, job.steps + 1):
        begun = perf_counter()
        windows = batches.step(step).reshape(layout.dp, job.micro_batches, job.sequences, -1)[replica]
        for stage in stages:
            stage.begin(windows)
        found = pipe.run()
        for stage in stages:
            stage.average_gradients(one_stage)
            stage.update(step)
        losses.append(mean_loss(comm, found, layout.dp * job.micro_batches))
        if meter is not None:
            meter.step(step, losses[-1], perf_counter() - begun)
    return losses


def train_alone(kind: type[Framework], replicas: int, job: Job, meter: report.Meter) -> list[float]:
    """Train the same model on the same text in this process: one stage, no communication."""
    count = replicas * job.micro_batches
    stage = job.stage(kind, Part(0, job.model.layers, embeds=True, predicts=True), count)
    batches = job.batches(replicas)
    losses = []
    for step in range(1, job.steps + 1):
        begun = perf_counter()
        stage.begin(batches.step(step).reshape(count, job.sequences, -1))
        total = 0.0
        for micro_batch in range(count):
            total += float(stage.forward(None, micro_batch))
            stage.backward(None, micro_batch)
        stage.update(step)
        losses.append(total / count)
        meter.step(step, losses[-1], perf_counter() - begun)
    return losses


def train_elastically(comm: Communicator, job: Job, out: Path) -> None:
    """Train the whole model on every rank, whichever are left; the first one writes the log at the end."""
    kind, replicas = job.framework(comm.topology, comm.rank), discover(os.environ, Config.from_env()).size
    kind.settle(comm.device, comm.device_index)
    part = kind(job.model, Part(0, job.model.layers, embeds=True, predicts=True), job.seed, job.optimizer)
    stage = Stage(part, job.model, job.micro_batches, job.sequences)
    training = Elastic(comm, part, stage, job.batches(replicas), replicas, job.micro_batches)
    progress = training.run(job.steps)
    if training.comm.rank == 0:
        header = {"elastic": True, "dp": replicas, "steps": job.steps, "model": asdict(job.model), "seed": job.seed}
        with report.Log(out / "log.jsonl", header) as log:
            for step, (loss, ranks) in enumerate(zip(progress.losses, progress.ranks, strict=True), 1):
                log.write({"step": step, "loss": loss, "ranks": ranks})
        lost = sum(replicas - len(ranks) for ranks in progress.ranks)
        Console().print(f"loss {progress.losses[-1]:.4f}, shares of samples lost: {lost}; log: {out / 'log.jsonl'}")


def lead(comm: Communicator, layout: Layout, job: Job, rehearsal: bool, check: bool, out: Path) -> bool:
    """Rank 0 only: train, print, log, check and plot; returns whether the check passed."""
    console = Console()
    header = describe(comm.topology, layout, job, rehearsal)
    report.show_header(console, header)
    tokens = header["tokens_per_step"]
    reference, passed = None, True
    with report.Log(out / "log.jsonl", header) as log:
        with report.Meter(console, "training", job.steps, tokens, log) as meter:
            losses = train(comm, layout, job, meter)
        if check:
            kind = job.framework(comm.topology, layout.stages[-1][0])
            comm.close()
            kind.settle(comm.device, comm.device_index)
            with report.Meter(console, "one process", job.steps, tokens) as meter:
                reference = train_alone(kind, layout.dp, job, meter)
            worst = report.compare(console, losses, reference, TOLERANCE)
            passed = worst <= TOLERANCE
            log.write({"check": {"worst_relative_difference": worst, "tolerance": TOLERANCE, "passed": passed}})
    console.print(f"log: {out / 'log.jsonl'}\nplot: {report.plot(out / 'loss.png', header, losses, reference)}")
    return passed


def describe(topology: Topology, layout: Layout, job: Job, rehearsal: bool) -> dict[str, Any]:
    """Description of the run for the log's header, the terminal and the plot."""
    return {
        "rehearsal": rehearsal,
        "islands": [f"{island.label} x {island.size}" for island in topology.islands],
        "ranks": [topology.island_of(rank).label for rank in range(topology.size)],
        "pp": layout.pp,
        "dp": layout.dp,
        "stages": [list(ranks) for ranks in layout.stages],
        "framework": list(job.frameworks),
        "schedule": job.schedule,
        "chunks": job.chunks,
        "layers_per_stage": [
            p.stop - p.first for p in cut(job.model.layers, layout.pp * job.chunks, job.layers_per_stage)
        ],
        "micro_batches": job.micro_batches,
        "tokens_per_step": layout.dp * job.micro_batches * job.sequences * job.model.context,
        "steps": job.steps,
        "model": asdict(job.model),
        "parameters": job.model.parameters,
        "optimizer": asdict(job.optimizer),
        "seed": job.seed,
    }


def island_label(islands: str | None) -> str | None:
    """This rank's label in `--islands`; None without that option, or if the launcher gave a label."""
    config = Config.from_env()
    if islands is None or config.island is not None:
        return None
    labels, me = parse_islands(islands), discover(os.environ, config)
    if len(labels) != me.size:
        raise ArgumentError(
            f"--islands {islands} labels {len(labels)} ranks, the job has {me.size}: change one of them"
        )
    return labels[me.rank]


def _layout(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Layout", **more)


def _model(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Model", min=1)


def _training(text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel="Training", **more)


def main(
    names: Annotated[
        str, _layout("numpy, torch or jax; one an island mixes them: torch,jax.", "--framework")
    ] = "numpy",
    islands: Annotated[
        str | None, _layout("Label the ranks: cuda:2,rocm:2. `xvcomm run --islands` comes first.")
    ] = None,
    pp: Annotated[int | None, _layout("Pipeline stages; left out: one an island.", min=1)] = None,
    dp: Annotated[int | None, _layout("Replicas; left out: ranks / stages.", min=1)] = None,
    schedule: Annotated[ScheduleName, _layout("Pipeline schedule.")] = ScheduleName["1f1b"],
    chunks: Annotated[int | None, _layout("Virtual stages a rank; left out: 2 if interleaved, else 1.", min=1)] = None,
    layers_per_stage: Annotated[str | None, _layout("Layers of each virtual stage: 15,17. Left out: even.")] = None,
    layers: Annotated[int, _model("Decoder blocks.")] = 8,
    dim: Annotated[int, _model("Width of the residual stream.")] = 96,
    heads: Annotated[int, _model("Query heads.")] = 6,
    kv_heads: Annotated[int, _model("Key and value heads; each serves heads / kv-heads query heads.")] = 2,
    hidden: Annotated[int, _model("Width inside the SwiGLU.")] = 256,
    context: Annotated[int, _model("Tokens a sequence.")] = 128,
    steps: Annotated[int, _training("Optimiser steps.", min=1)] = 100,
    micro_batches: Annotated[int, _training("Micro-batches a step and replica.", min=1)] = 4,
    sequences: Annotated[int, _training("Sequences a micro-batch.", min=1)] = 2,
    lr: Annotated[float, _training("Learning rate of AdamW.", min=0)] = 1e-3,
    seed: Annotated[int, _training("Seed of parameters and text windows.", min=0)] = 0,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Whole model on every rank; go on when ranks are lost, and with new ones.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Train in one process too; fail if losses differ.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the log and the plot.")] = Path("runs/train"),
) -> None:
    """Train a small LLaMA-style decoder on Python's standard library, over any mix of islands."""
    chunks = chunks or (2 if schedule == "interleaved" else 1)
    try:
        if elastic and (check or (pp or 1) > 1):
            raise ArgumentError("--elastic has one stage and no --check: drop --pp and --check")
        job = Job(
            Model(layers, dim, heads, kv_heads, hidden, context), AdamW(lr), tuple(names.split(",")), schedule.value,
            micro_batches, sequences, chunks, numbers(layers_per_stage), steps, seed,
        )  # fmt: skip
        label = island_label(islands)
        with xvcomm.init(island=label) as comm:
            if elastic:
                train_elastically(comm, job, out)
                return
            layout = Layout.over(comm.topology, pp, dp)
            if comm.rank != 0:
                train(comm, layout, job, None)
                return
            rehearsal = label is not None or Config.from_env().island is not None
            passed = lead(comm, layout, job, rehearsal, check, out)
    except XvcommError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    raise typer.Exit(0 if passed else 1)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
