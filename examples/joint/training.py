"""The loop: variants take turns, each with its libraries, its layers and its slowness, and every step is recorded."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from llama.data import Batches, corpus
from llama.layout import cut
from torch import Tensor

from joint.balance import divide, measure, settle
from joint.links import COMMS, Links, Place, connect
from joint.model import Decoder
from joint.settings import Phase, Settings, Variant
from joint.shapes import SHAPES
from joint.stage import Optimizer, Stage
from xvcomm import pipeline

Record = Callable[[dict[str, Any]], None]
CLIP = 1.0
"""Largest norm of the gradients."""


class Text:
    """The text of all steps, byte by byte: a function of seed, step, replica and micro-batch."""

    def __init__(self, phase: Phase, replicas: int, seed: int) -> None:
        self._shape = replicas, phase.micro_batches, phase.sequences, phase.context + 1
        self._batches = Batches(corpus(), replicas * phase.micro_batches * phase.sequences, phase.context, seed)

    def windows(self, step: int, replica: int) -> Tensor:
        """Those of a replica's micro-batches, int64 of shape (micro-batches, sequences, context + 1)."""
        return torch.from_numpy(self._batches.step(step).reshape(self._shape)[replica])


class Trainer:
    """One stage that trains: its parameters, its optimizer, and how many steps they have done.

    Attributes:
        number: of the step that comes next, from 1.
    """

    def __init__(self, settings: Settings, phase: Phase, place: Place, layers: tuple[int, ...], slow: float) -> None:
        self._phase, self._place = phase, place
        shape = SHAPES[settings.model]
        part = cut(shape.layers, place.stages, layers)[place.stage]
        decoder = Decoder(shape, part, phase.context, settings.checkpointing)
        decoder.initialise(place.device, getattr(torch, settings.dtype), settings.seed)
        decoder.slow_down(slow)
        self._stage = Stage(decoder, phase.sequences, phase.context, phase.micro_batches * place.replicas)
        self._rule = Optimizer(decoder.units(), getattr(torch, settings.state), settings.lr, settings.warmup)
        self._schedule = pipeline.build("1f1b", place.stages, phase.micro_batches, 1)
        self._text = Text(phase, place.replicas, settings.seed)
        self._pipes: dict[int, pipeline.Pipeline] = {}
        self.number = 1

    def windows(self) -> Tensor:
        """This replica's text of the next step, on its device."""
        return self._text.windows(self.number, self._place.replica).to(self._place.device)

    def step(self, links: Links, windows: Tensor) -> float:
        """One step of the optimizer; returns the sum of this rank's losses, 0 without the last stage."""
        if id(links) not in self._pipes:
            self._pipes[id(links)] = pipeline.Pipeline(self._stage, links.peers, self._schedule)
        self._stage.begin(windows)
        losses = self._pipes[id(links)].run()
        self._stage.add_up(links)
        norm = sum(row[0] for row in gather(self._place, self._stage.square())[:: self._place.replicas]) ** 0.5
        if norm > CLIP:
            self._stage.gradients.mul_(CLIP / norm)
        self._rule.step(self.number)
        self.number += 1
        return float(torch.stack(losses).sum()) if losses else 0.0

    def release(self) -> None:
        """Give the memory back."""
        del self._rule
        self._pipes.clear()
        self._stage.release()


class Training:
    """A job on this rank.

    Args:
        settings: of the job.
        place: of this rank.
        record: takes each record; the first rank's are those that count.
    """

    def __init__(self, settings: Settings, place: Place, record: Record) -> None:
        self._settings, self._place, self._record = settings, place, record
        self._shape = SHAPES[settings.model]
        self._links: dict[str, Links] = {}
        self._paces: dict[tuple[str, str], list[tuple[float, float]]] = {}
        self._trainer: tuple[Any, Trainer] | None = None
        self._begun, self._over = time.perf_counter(), False
        self.variant = ""

    def run(self) -> None:
        """Run all phases. Every rank must call it."""
        self._record(self._header())
        for phase in self._settings.phases:
            spent = dict.fromkeys((variant.name for variant in phase.variants), 0.0)
            for turn in range(phase.turns):
                for place, variant in enumerate(phase.variants):
                    left = phase.seconds - spent[variant.name]
                    if left > 0 and not self._over:
                        share = self._share(len(phase.variants) - place) if phase.fresh else left
                        spent[variant.name] += self._turn(phase, variant, turn, min(left, share))
            self._drop()
        self._record({"event": "end"})

    def close(self) -> None:
        """End the use of all libraries."""
        self._drop()
        while self._links:
            self._links.popitem()[1].close()

    def _share(self, variants: int) -> float:
        """Seconds for each of so many variants until the budget is over, on the first rank's clock."""
        left = self._settings.budget - gather(self._place, time.perf_counter() - self._begun)[0][0]
        return left / variants if self._settings.budget else math.inf

    def _header(self) -> dict[str, Any]:
        settings, place = self._settings, self._place
        gpu = place.device.type == "cuda"
        return {
            "event": "job", "model": settings.model, "parameters": self._shape.parameters, "stages": place.stages,
            "replicas": place.replicas, "device": torch.cuda.get_device_name() if gpu else "host memory",
            "islands": list(settings.islands), "rehearsal": bool(settings.islands), "torch": torch.__version__,
            "dtype": settings.dtype, "state": settings.state, "checkpointing": settings.checkpointing,
            "deterministic": settings.deterministic, "lr": settings.lr, "seed": settings.seed,
        }  # fmt: skip

    def _turn(self, phase: Phase, variant: Variant, turn: int, seconds: float) -> float:
        """A variant's iterations; returns the seconds that they took. At least one is measured."""
        self.variant = f"{phase.name}/{variant.name}"
        self._record({"event": "begin", "phase": phase.name, "variant": variant.name, "turn": turn})
        begun, place = time.perf_counter(), self._place
        trainer, layers, pace = self._ready(phase, variant)
        links = self._connected(variant.comm)
        said = {
            "event": "variant", "phase": phase.name, "variant": variant.name, "comm": variant.comm,
            "backends": list(links.backends), "layers": list(layers), "pace": pace, "slow": variant.slow,
            "tokens": self._tokens(phase), "batch": [phase.context, phase.sequences, phase.micro_batches],
            "text": COMMS[variant.comm].text, "prepared_seconds": round(time.perf_counter() - begun, 3),
        }  # fmt: skip
        if turn == 0:
            self._record(said)
        if place.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        warmup, spent = (phase.warmup if turn == 0 else 0), 0.0
        for iteration in range(warmup + phase.iterations):
            number, windows = trainer.number, trainer.windows()
            settle(place.device)
            gather(place)
            begun = time.perf_counter()
            mine = trainer.step(links, windows)
            settle(place.device)
            now = time.perf_counter()
            rows = gather(place, mine, now - begun, peak_memory(place.device), now - self._begun)
            losses, times, peaks, clocks = zip(*rows, strict=True)
            loss = sum(losses) / (phase.micro_batches * place.replicas)
            spent += max(times)
            measured = iteration >= warmup
            self._over = 0 < self._settings.budget < clocks[0]
            self._record(
                {"event": "step", "phase": phase.name, "variant": variant.name, "turn": turn, "step": number,
                 "warmup": not measured, "loss": loss, **self._speed(phase, max(times)), "peak_memory_gib": max(peaks)}
            )  # fmt: skip
            if self._over or (measured and spent >= seconds):
                break
        return spent

    def _tokens(self, phase: Phase) -> int:
        """Of a step, over all replicas."""
        return self._place.replicas * phase.micro_batches * phase.sequences * phase.context

    def _speed(self, phase: Phase, seconds: float) -> dict[str, float]:
        each = self._tokens(phase) / seconds / (self._place.stages * self._place.replicas)
        return {
            "seconds": seconds,
            "tokens_per_second_per_gpu": each,
            "tflops_per_gpu": each * self._shape.flops_per_token(phase.context) / 1e12,
        }

    def _ready(self, phase: Phase, variant: Variant) -> tuple[Trainer, tuple[int, ...], list[tuple[float, float]]]:
        """The trainer of a variant: the present one if it differs in the libraries only."""
        slow = self._slowness(variant.slow)
        pace: list[tuple[float, float]] = []
        if variant.layers == "balanced":
            pace = self._pace(phase, variant.slow, slow)
        layers = divide(variant.layers, self._shape.layers, pace or [(1.0, 0.0)] * self._place.stages)
        key = phase.name, layers, variant.slow, variant.name if phase.fresh else ""
        if self._trainer is None or self._trainer[0] != key:
            self._drop()
            self._trainer = key, Trainer(self._settings, phase, self._place, layers, slow)
        return self._trainer[1], layers, pace

    def _pace(self, phase: Phase, slow: str, factor: float) -> list[tuple[float, float]]:
        if (phase.name, slow) not in self._paces:
            self._drop()
            self._paces[phase.name, slow] = measure(self._settings, phase, self._place, factor)
        return self._paces[phase.name, slow]

    def _slowness(self, slow: str) -> float:
        """How many times its layers' arithmetic this rank does."""
        island, _, factor = slow.partition(":")
        names = self._settings.islands or tuple(map(str, range(self._place.stages)))
        return float(factor) if slow and names[self._place.stage] == island else 1.0

    def _connected(self, comm: str) -> Links:
        if comm not in self._links:
            self._links[comm] = connect(comm, self._place)
        return self._links[comm]

    def _drop(self) -> None:
        if self._trainer is not None:
            self._trainer[1].release()
            self._trainer = None


def gather(place: Place, *numbers: float) -> list[tuple[float, ...]]:
    """Numbers of every rank; without any, wait until all ranks are here."""
    mine = torch.tensor(numbers or (0.0,), dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(place.control))]
    dist.all_gather(rows, mine, group=place.control)
    return [tuple(row.tolist()) for row in rows]


def peak_memory(device: torch.device) -> float:
    """GiB: what torch had allocated at most on a GPU since its last reset, or this process in host memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def failure(training: Training | None, rank: int, error: BaseException) -> dict[str, Any]:
    """The record of an error that ends this rank."""
    text = f"{type(error).__name__}: {error}"
    variant = "" if training is None else training.variant
    return {"event": "error", "rank": rank, "variant": variant, "error": text[:2000]}
