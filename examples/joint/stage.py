"""One pipeline stage: its part of the model as `xvcomm.pipeline` drives it, its gradients in one array, and its optimizer."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

from joint.links import Links
from joint.model import Decoder

PIECE = 1 << 27
"""Elements of the gradients that are reduced in one call."""


class Stage:
    """See `xvcomm.pipeline.Stage` for what has no text here."""

    def __init__(self, decoder: Decoder, sequences: int, context: int, micro_batches: int) -> None:
        """Wrap an initialised part.

        Args:
            decoder: what to compute.
            sequences: of a micro-batch.
            context: tokens of a sequence.
            micro_batches: of a step, of all replicas; the gradients are the mean over them.
        """
        self.decoder = decoder
        first = next(decoder.parameters())
        self._device, self._share = first.device, 1 / micro_batches
        spec = ((sequences, context, decoder.shape.dim), str(first.dtype).rpartition(".")[2])
        self.input_spec = None if decoder.part.embeds else spec
        self.output_spec = None if decoder.part.predicts else spec
        self.gradients = torch.zeros(
            sum(p.numel() for p in decoder.parameters()), dtype=first.dtype, device=self._device
        )
        start = 0
        for parameter in decoder.parameters():
            parameter.grad = self.gradients[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        self._saved: dict[int, tuple[Tensor | None, Tensor]] = {}

    def begin(self, windows: Tensor) -> None:
        """Take the text of one step, (micro-batches, sequences, context + 1), and clear the gradients."""
        self._windows = windows
        self.gradients.zero_()

    def forward(self, x: Tensor | None, micro_batch: int) -> Tensor:
        window, part = self._windows[micro_batch], self.decoder.part
        if x is not None:
            x = x.detach().requires_grad_()
        taken = window[:, :-1] if part.embeds else x
        y = self.decoder(taken, window[:, 1:] if part.predicts else None)
        self._saved[micro_batch] = x, y
        return y.detach()

    def backward(self, dy: Tensor | None, micro_batch: int) -> Tensor | None:
        x, y = self._saved.pop(micro_batch)
        if dy is None:
            dy = torch.full_like(y, self._share)
        y.backward(dy)
        return None if x is None else x.grad

    def empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)

    def add_up(self, links: Links) -> None:
        """Sum the gradients over the replicas."""
        for piece in self.gradients.split(PIECE):
            links.add_up(piece)

    def square(self) -> float:
        """Sum of the squares of the gradients. The host waits for it."""
        pieces = [
            torch.linalg.vector_norm(piece, dtype=torch.float32).double() ** 2 for piece in self.gradients.split(PIECE)
        ]
        return float(torch.stack(pieces).sum())

    def release(self) -> None:
        """Give the memory back."""
        del self.gradients, self.decoder
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class Optimizer:
    """AdamW, unit by unit. With its state in float32 beside parameters in bfloat16 it keeps those in float32 too.

    Args:
        units: groups of parameters; only one group's gradients exist in float32 at a time.
        state: dtype of the moments.
        lr: learning rate after `warmup` steps, to which it rises evenly.
    """

    def __init__(self, units: list[list[nn.Parameter]], state: torch.dtype, lr: float, warmup: int) -> None:
        self._lr, self._warmup = lr, warmup
        self._units: list[tuple[list[nn.Parameter], list[nn.Parameter] | None, Any]] = []
        for unit in units:
            copies = None if unit[0].dtype == state else [nn.Parameter(p.detach().to(state)) for p in unit]
            fused = unit[0].is_cuda
            rule = torch.optim.AdamW(copies or unit, lr, (0.9, 0.95), 1e-8, weight_decay=0.1, fused=fused)
            self._units.append((unit, copies, rule))

    @torch.no_grad()
    def step(self, number: int) -> None:
        """Change the parameters by their gradients; `number` counts from 1."""
        for unit, copies, rule in self._units:
            rule.param_groups[0]["lr"] = self._lr * min(1.0, number / self._warmup)
            if copies is None:
                rule.step()
                continue
            for parameter, copy in zip(unit, copies, strict=True):
                copy.grad = parameter.grad.to(copy.dtype)
            rule.step()
            torch._foreach_copy_(unit, copies)
            rule.zero_grad()
