"""Sizes of the decoder, its initial parameters, and the optimizer: the same for every framework and layout."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from xvcomm.errors import ArgumentError

VOCAB = 256
ROPE_THETA = 10_000.0
NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of the decoder.

    Attributes:
        layers: decoder blocks.
        dim: width of the residual stream.
        heads: query heads; each is `dim / heads` wide.
        kv_heads: key/value heads; each serves `heads / kv_heads` query heads.
        hidden: width inside the SwiGLU.
        context: tokens per sequence.
    """

    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    context: int

    def __post_init__(self) -> None:
        for name in ("layers", "dim", "heads", "kv_heads", "hidden", "context"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}: must be at least 1")
        if self.dim % self.heads or self.head_dim % 2:
            raise ArgumentError(
                f"dim {self.dim} over {self.heads} heads: dim must be an even multiple of heads (rotary turns pairs)"
            )
        if self.heads % self.kv_heads:
            raise ArgumentError(f"{self.heads} heads over {self.kv_heads} key-value heads: must divide evenly")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        shapes = embedding_shapes(self) | head_shapes(self)
        return sum(map(_size, shapes.values())) + self.layers * sum(map(_size, block_shapes(self).values()))


@dataclass(frozen=True, slots=True)
class Part:
    """What one pipeline stage, or one chunk of an interleaved stage, computes.

    Attributes:
        first, stop: range of its decoder blocks.
        embeds: whether it starts with the embedding and so takes tokens.
        predicts: whether it ends with the output head and so returns the loss.
    """

    first: int
    stop: int
    embeds: bool
    predicts: bool


def block_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Shapes of one block's parameters; inputs are multiplied from the left (`x @ w`)."""
    kv_dim = model.kv_heads * model.head_dim
    return {
        "attention.norm": (model.dim,),
        "attention.query": (model.dim, model.dim),
        "attention.key": (model.dim, kv_dim),
        "attention.value": (model.dim, kv_dim),
        "attention.out": (model.dim, model.dim),
        "mlp.norm": (model.dim,),
        "mlp.gate": (model.dim, model.hidden),
        "mlp.up": (model.dim, model.hidden),
        "mlp.down": (model.hidden, model.dim),
    }


def embedding_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Shape of the embedding table."""
    return {"embedding": (VOCAB, model.dim)}


def head_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Shapes of the last norm and the output projection."""
    return {"head.norm": (model.dim,), "head.out": (model.dim, VOCAB)}


def part_shapes(model: Model, part: Part) -> dict[str, tuple[int, ...]]:
    """Shapes of a part's parameters; blocks are numbered over the whole model: `7.mlp.up`."""
    shapes = embedding_shapes(model) if part.embeds else {}
    for layer in range(part.first, part.stop):
        shapes |= {f"{layer}.{name}": shape for name, shape in block_shapes(model).items()}
    return shapes | head_shapes(model) if part.predicts else shapes


def initial_parameters(model: Model, part: Part, seed: int) -> dict[str, np.ndarray]:
    """Initial float32 parameters of a part. Each is drawn from `seed` and its own name, independent of the layout."""
    return {name: draw(model, name, shape, seed) for name, shape in part_shapes(model, part).items()}


def rotary_tables(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of the rotary embedding, float32 of shape (context, head_dim / 2).

    Source: Su et al., RoFormer, arXiv:2104.09864, section 3.2.2.
    """
    frequency = ROPE_THETA ** (-np.arange(0, model.head_dim, 2) / model.head_dim)
    angle = np.arange(model.context)[:, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


@dataclass(frozen=True, slots=True)
class AdamW:
    """Hyperparameters of AdamW, the same in every framework.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101, algorithm 2.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def update(self, parameter: Any, gradient: Any, mean: Any, square: Any, step: int) -> tuple[Any, Any, Any]:
        """One step for arrays of any type; returns (parameter, mean, square). `step` counts from 1."""
        first, second = self.betas
        mean = first * mean + (1 - first) * gradient
        square = second * square + (1 - second) * gradient * gradient
        denominator = (square / (1 - second**step)) ** 0.5 + self.eps
        decayed = parameter * (1 - self.lr * self.weight_decay)
        return decayed - (self.lr / (1 - first**step)) * mean / denominator, mean, square


def draw(model: Model, name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    deviation = 0.1 if name == "embedding" else shape[0] ** -0.5
    if name.endswith((".attention.out", ".down")):
        deviation /= (2 * model.layers) ** 0.5
    return random.normal(0.0, deviation, shape).astype(np.float32)


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))
