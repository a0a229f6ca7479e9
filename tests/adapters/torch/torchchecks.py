"""Helpers of the torch tests: tensors of every dtype, and reference results computed in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

FLOATS = ("float64", "float32", "float16", "bfloat16")
FLOATS8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
COMPLEX = ("complex64", "complex128")
DTYPES = (*FLOATS, *FLOATS8, *SIGNED, *UNSIGNED, *COMPLEX, "bool")
# Reduced by gloo, which refuses the others.
GLOO_REDUCES = ("float64", "float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64")


def me() -> int:
    """Rank in the default group."""
    return dist.get_rank()


def size() -> int:
    """Size of the default group."""
    return dist.get_world_size()


def small(dtype: str, shape: Sequence[int], rank: int, *, top: int = 2) -> torch.Tensor:
    """Whole numbers from 0 to `top` that depend on position and rank; their sums are exact in every dtype."""
    numbers = (np.arange(int(np.prod(shape))) * 7 + rank * 3) % (top + 1)
    if dtype in COMPLEX:
        numbers = numbers + 1j * ((numbers + rank) % (top + 1))
    return torch.from_numpy(numbers.reshape(tuple(shape))).to(getattr(torch, dtype))


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in a dtype with exact arithmetic: complex128, float64 or int64."""
    kind = torch.complex128 if tensor.is_complex() else torch.float64 if tensor.is_floating_point() else torch.int64
    return tensor.to(kind)


def combined(op: str, tensors: Sequence[torch.Tensor], factor: float = 1.0) -> torch.Tensor:
    """The reduction of all ranks' tensors computed in one process, in their dtype."""
    dtype = tensors[0].dtype
    parts = [wide(t) for t in tensors]
    found = parts[0] * factor if op == "PREMUL_SUM" else parts[0]
    for part in parts[1:]:
        found = _PAIRS[op](found, part * factor if op == "PREMUL_SUM" else part)
    if op == "AVG":
        found = found // len(parts) if found.dtype == torch.int64 else found / len(parts)
    return found != 0 if dtype == torch.bool else found.to(dtype)


_PAIRS = {
    "SUM": torch.add, "AVG": torch.add, "PREMUL_SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
    "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip


def reduction(op: str, factor: float = 1.0) -> Any:
    """The `ReduceOp` with this name."""
    return dist._make_nccl_premul_sum(factor) if op == "PREMUL_SUM" else getattr(dist.ReduceOp, op)


def same(found: torch.Tensor, expected: Any) -> None:
    """Check dtype, shape and bits, on any device; the expected value may be numbers."""
    expected = torch.as_tensor(expected).to(found.dtype) if not isinstance(expected, torch.Tensor) else expected
    assert found.dtype == expected.dtype and found.shape == expected.shape, (found, expected)
    assert raw(found) == raw(expected), (found, expected)


def close(found: torch.Tensor, expected: torch.Tensor, relative: float = 1e-6) -> None:
    """Check equality up to the order of additions, on any device."""
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=relative, atol=1e-7)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, with -0.0 as 0.0."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.is_floating_point() and tensor.element_size() > 1:
        tensor = tensor + 0.0
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def noise(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers of a rank, the same in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank)).to(dtype)


def perceptron() -> nn.Sequential:
    """A small network, the same in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    """Loss of a rank's batch in a step, on the model's device."""
    place = next(model.parameters()).device
    found: torch.Tensor = model(noise(rank + 1000 * step, 5, 8).to(place)).pow(2).mean()
    return found


def mean_gradients(ranks: int | None = None) -> list[torch.Tensor]:
    """Gradients of the perceptron over all ranks' batches, computed in one process."""
    model = perceptron()
    count = ranks or size()
    for rank in range(count):
        (loss_of(model, rank) / count).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def trained_alone(steps: int, optimizer: Any, ranks: int | None = None, **options: Any) -> nn.Sequential:
    """The perceptron after several steps on the mean of all ranks' losses, in one process."""
    model = perceptron()
    count = ranks or size()
    rule = optimizer(model.parameters(), **options)
    for step in range(steps):
        rule.zero_grad()
        sum(loss_of(model, rank, step) / count for rank in range(count)).backward()  # type: ignore[union-attr]
        rule.step()
    return model
