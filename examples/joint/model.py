"""The decoder as torch modules: a part of it for one pipeline stage, with activation checkpointing."""

from __future__ import annotations

import math

import torch
from llama.config import Part
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from joint.shapes import Shape

LOSS_TOKENS = 1024
"""Tokens whose logits exist in float32 at a time."""

DEVIATION = 0.02


class Block(nn.Module):
    """Attention with grouped queries and SwiGLU, each with an RMSNorm and a residual connection.

    Attributes:
        burnt: rows of further products in each forward pass, which slow this rank down and change nothing.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim, kv = shape.head_dim, shape.kv_heads * shape.head_dim
        self.burnt = 0
        self.first, self.second = nn.RMSNorm(shape.dim, eps=shape.eps), nn.RMSNorm(shape.dim, eps=shape.eps)
        self.query = nn.Linear(shape.dim, shape.dim, bias=shape.bias)
        self.key = nn.Linear(shape.dim, kv, bias=shape.bias)
        self.value = nn.Linear(shape.dim, kv, bias=shape.bias)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (sequences, tokens, dim) to the same shape; `cos` and `sin` are (tokens, head_dim)."""
        if self.burnt:
            self._burn(x.detach())
        y = self.first(x)
        q, k, v = (self._heads(f(y)) for f in (self.query, self.key, self.value))
        q, k = (t * cos + _turned(t) * sin for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _burn(self, x: Tensor) -> None:
        with torch.no_grad():
            left = self.burnt
            while left > 0:
                F.linear(x, self.gate.weight[:left])
                left -= self.gate.out_features


class Head(nn.Module):
    """The last norm and the projection to logits; gives the mean cross-entropy."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.dim, eps=shape.eps)
        self.logits = nn.Linear(shape.dim, shape.vocabulary, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Loss in nats of activations (sequences, tokens, dim). Logits are made in pieces, and again for backward."""
        flat, wanted = self.norm(x).flatten(0, 1), targets.flatten()
        pieces = zip(flat.split(LOSS_TOKENS), wanted.split(LOSS_TOKENS), strict=True)
        sums = [again(self._sum, piece, target) for piece, target in pieces]
        return torch.stack(sums).sum() / len(wanted)

    def _sum(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x).float(), targets, reduction="sum")


class Decoder(nn.Module):
    """One part of the model. Takes tokens (sequences, tokens) if the part embeds, else activations.

    It is created on the device "meta"; `initialise` gives it memory and values.
    """

    def __init__(self, shape: Shape, part: Part, context: int, checkpointing: bool = True) -> None:
        super().__init__()
        self.shape, self.part = shape, part
        self._context, self._checkpointing = context, checkpointing
        with torch.device("meta"):
            self.embedding = nn.Embedding(shape.vocabulary, shape.dim) if part.embeds else None
            self.blocks = nn.ModuleList(Block(shape) for _ in range(part.first, part.stop))
            self.head = Head(shape) if part.predicts else None

    def initialise(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        """Fill the parameters where they lie: the values of each layer depend on seed and layer, not on the part."""
        self.to(dtype).to_empty(device=device)
        if self.embedding is not None:
            self._fill(self.embedding, seed, 0)
        for layer, block in enumerate(self.blocks, self.part.first):
            self._fill(block, seed, layer + 1)
        if self.head is not None:
            self._fill(self.head, seed, self.shape.layers + 1)
        self._cos, self._sin = (table.to(device, dtype) for table in rotary_tables(self.shape, self._context))

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Activations (sequences, tokens, dim), or the mean loss if the part predicts `targets`."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = again(block, x, self._cos, self._sin) if self._checkpointing else block(x, self._cos, self._sin)
        return x if self.head is None else self.head(x, targets)

    def slow_down(self, factor: float) -> None:
        """Let each block take `factor` times its arithmetic, in matrix products whose result nothing uses."""
        passes, passes_forward = (4, 2) if self._checkpointing else (3, 1)
        rows = (factor - 1) * passes / passes_forward * self.shape.block_matrices / self.shape.dim
        for block in self.blocks:
            block.burnt = round(rows)

    def units(self) -> list[list[nn.Parameter]]:
        """The parameters, in groups that the optimizer handles one after the other."""
        modules = [module for module in (self.embedding, *self.blocks, self.head) if module is not None]
        return [list(module.parameters()) for module in modules]

    @torch.no_grad()
    def _fill(self, module: nn.Module, seed: int, number: int) -> None:
        device = next(module.parameters()).device
        generator = torch.Generator(device).manual_seed(seed * 1_000_003 + number)
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            smaller = name.startswith(("out.", "down."))
            deviation = DEVIATION / math.sqrt(2 * self.shape.layers) if smaller else DEVIATION
            parameter.normal_(0.0, deviation, generator=generator)


def again(function: nn.Module, *arguments: Tensor) -> Tensor:
    """Call a function whose intermediate results are computed again for backward."""
    result: Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return result


def rotary_tables(shape: Shape, context: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, float32 of shape (context, head_dim)."""
    frequency = shape.theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
    angle = torch.outer(torch.arange(context, dtype=torch.float64), frequency).repeat(1, 2)
    return angle.cos().float(), angle.sin().float()


def _turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)
