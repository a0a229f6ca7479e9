"""Sizes of the two models as published, and what training them costs in arithmetic and memory.

Memory of a rank of two stages, LLaMA-8B, 16 layers and 525 million parameters of embedding or head, 4.02 billion in all:

| | `--state bfloat16` | `--state float32` |
| --- | --: | --: |
| parameters and gradients, bfloat16 | 16.1 GB | 16.1 GB |
| AdamW: two moments; with float32 a copy of the parameters too | 16.1 GB | 48.2 GB |
| inputs of 16 layers for two micro-batches of 4096 tokens | 1.1 GB | 1.1 GB |
| one layer that is computed again, 1024 tokens of logits, gradient of the head; or the optimizer's, for one layer | 5 GB | 5 GB |
| in all | 38 GB | 70 GB |

With 17 layers it is 1.8 and 3.5 GB more; Qwen2-7B with 16 of its layers and the head has 4.27 billion: 40 and 75 GB. A GPU "of
80 GB" has 85 GB, 79 GiB, of which CUDA, NCCL and xvcomm take 2 to 3.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder.

    Attributes:
        layers: decoder blocks.
        dim: width of the residual stream.
        heads, kv_heads: of attention.
        hidden: width inside the SwiGLU.
        vocabulary: tokens; embedding and head are two matrices.
        theta: base of the rotary embedding.
        eps: of the norms.
        bias: whether query, key and value have one.
    """

    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    theta: float
    eps: float
    bias: bool

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads

    @property
    def block_matrices(self) -> int:
        """Elements of the matrices of one block."""
        kv = self.kv_heads * self.head_dim
        return 2 * self.dim * (self.dim + kv) + 3 * self.dim * self.hidden

    @property
    def block_parameters(self) -> int:
        """Parameters of one block."""
        return self.block_matrices + 2 * self.dim + self.bias * (self.dim + 2 * self.kv_heads * self.head_dim)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.layers * self.block_parameters + 2 * self.vocabulary * self.dim + self.dim

    def flops_per_token(self, context: int) -> float:
        """Floating-point operations of the model for one token, forward and backward.

        6 x the elements of all matrices but the embedding, and 6 x layers x context x dim for attention, of which the
        causal mask leaves a half. What is computed again for activation checkpointing does not count.
        """
        matrices = self.layers * self.block_matrices + self.vocabulary * self.dim
        return 6.0 * matrices + 6.0 * self.layers * context * self.dim


SHAPES = {
    "llama-8b": Shape(32, 4096, 32, 8, 14336, 128256, 500_000.0, 1e-5, bias=False),
    "qwen2-7b": Shape(28, 3584, 28, 4, 18944, 152064, 1_000_000.0, 1e-6, bias=True),
    "tiny-llama": Shape(4, 32, 4, 2, 48, 320, 500_000.0, 1e-5, bias=False),
    "tiny-qwen2": Shape(4, 28, 7, 1, 56, 384, 1_000_000.0, 1e-6, bias=True),
}
"""LLaMA-3-8B and Qwen2-7B by the `config.json` of their publishers, and two for tests."""
