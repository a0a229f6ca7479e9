"""The decoder as a `torch.nn.Module`, for scripts that use PyTorch's own parallelism."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llama.config import NORM_EPS, Model, Part, initial_parameters, rotary_tables


class Decoder(nn.Module):
    """The whole model or one part of it.

    Takes tokens, int64 of shape (batch, context), if the part embeds, otherwise activations (batch, context, dim); returns
    logits (batch, context, 256) if it predicts, otherwise activations.
    """

    def __init__(self, model: Model, part: Part, seed: int) -> None:
        super().__init__()
        initial = {name: nn.Parameter(torch.from_numpy(p)) for name, p in initial_parameters(model, part, seed).items()}
        self.embedding = initial.get("embedding")
        self.blocks = nn.ModuleList(Block(model, initial, layer) for layer in range(part.first, part.stop))
        self.norm, self.out = initial.get("head.norm"), initial.get("head.out")

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        if self.embedding is not None:
            x = F.embedding(x, self.embedding)
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None else _norm(x, self.norm) @ self.out


class Block(nn.Module):
    """Attention and SwiGLU, each with a norm and a residual connection."""

    def __init__(self, model: Model, initial: dict[str, nn.Parameter], layer: int) -> None:
        super().__init__()
        self._width = model.head_dim
        for name, parameter in initial.items():
            if name.startswith(f"{layer}."):
                self.register_parameter(_attribute(name), parameter)
        cos, sin = rotary_tables(model)
        self.register_buffer("cos", torch.from_numpy(cos), persistent=False)
        self.register_buffer("sin", torch.from_numpy(sin), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Activations (batch, context, dim)."""
        normed = _norm(x, self.attention_norm)
        q, k, v = (self._heads(normed @ w) for w in (self.attention_query, self.attention_key, self.attention_value))
        mixed = F.scaled_dot_product_attention(self._rotated(q), self._rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + mixed.transpose(1, 2).flatten(2) @ self.attention_out
        normed = _norm(x, self.mlp_norm)
        return x + (F.silu(normed @ self.mlp_gate) * (normed @ self.mlp_up)) @ self.mlp_down

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._width)).transpose(1, 2)

    def _rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), -1)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, NORM_EPS)


def _attribute(name: str) -> str:
    """Attribute name in its block of a parameter such as `7.mlp.up`."""
    return name.partition(".")[2].replace(".", "_")
