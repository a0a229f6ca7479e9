"""How many layers each stage gets: by the measured speed of its island."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from llama.config import Part

from joint.links import Place
from joint.model import Decoder
from joint.settings import Phase, Settings
from joint.shapes import SHAPES
from xvcomm.pipeline.balance import split_layers

REPEATS = 5


def divide(layers: str, total: int, pace: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """Layers of each stage.

    Args:
        layers: see `Variant.layers`.
        total: of the model.
        pace: of each stage, seconds of a layer and of the head; used by "balanced" only.
    """
    if layers == "even":
        return split_layers(total, [1.0] * len(pace))
    if layers != "balanced":
        return tuple(map(int, layers.split(",")))
    layer, head = pace[-1]
    return split_layers([1.0] * (total - 1) + [1.0 + head / layer], [1 / each for each, _ in pace])


def measure(settings: Settings, phase: Phase, place: Place, slow: float) -> list[tuple[float, float]]:
    """Seconds of a layer and of the head for one micro-batch on the slowest rank of each stage, forward and backward."""
    shape = SHAPES[settings.model]
    seconds = []
    for part in (Part(0, 1, embeds=False, predicts=False), Part(0, 0, embeds=False, predicts=True)):
        decoder = Decoder(shape, part, phase.context, settings.checkpointing)
        decoder.initialise(place.device, getattr(torch, settings.dtype), settings.seed)
        decoder.slow_down(slow)
        size = (phase.sequences, phase.context)
        x = torch.randn(*size, shape.dim, device=place.device, dtype=getattr(torch, settings.dtype), requires_grad=True)
        targets = torch.zeros(size, dtype=torch.int64, device=place.device)

        def once(decoder: Decoder = decoder, x: torch.Tensor = x, targets: torch.Tensor = targets) -> None:
            y = decoder(x, targets)
            y.backward(torch.ones_like(y))

        seconds.append(_typical(once, place.device))
    everywhere: list[tuple[float, float]] = [(0.0, 0.0)] * dist.get_world_size(place.control)
    dist.all_gather_object(everywhere, tuple(seconds), group=place.control)
    rows = [everywhere[stage * place.replicas :][: place.replicas] for stage in range(place.stages)]
    return [(max(layer for layer, _ in row), max(head for _, head in row)) for row in rows]


def _typical(function: Callable[[], None], device: torch.device) -> float:
    """Median of the seconds that a call takes."""
    times = []
    for _ in range(REPEATS + 1):
        settle(device)
        begun = time.perf_counter()
        function()
        settle(device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def settle(device: torch.device) -> None:
    """Wait until a GPU has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
