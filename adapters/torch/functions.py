"""Differentiable collectives and messages, for plain tensors and a `Communicator`.

    y = functions.all_reduce(x, comm)
    functions.all_gather(y, comm).square().sum().backward()

Each returns new tensors and leaves its input unchanged. The backward pass is the transposed operation, which all ranks must run
as they ran the forward one. The differentiated quantity is the sum of all ranks' losses, as in `torch.distributed.nn`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from xvcomm.adapters.torch.errors import mapped
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import DTypeError
from xvcomm.types.dtype import ReduceOp, Reduction, reduction

Op = str | ReduceOp | Reduction
_LINEAR = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)


def all_reduce(x: Tensor, comm: Communicator, op: Op = "sum") -> Tensor:
    """Reduce elementwise over all ranks; its own transpose.

    Args:
        x: any shape.
        op: for gradients a sum: `"sum"`, `"avg"` or `premul_sum`.

    Raises:
        DTypeError: a gradient of another reduction is required.
    """
    how = _linear(op, x)

    def transposed(dy: Tensor) -> Tensor:
        if how.op is ReduceOp.PREMUL_SUM:
            return all_reduce(dy, comm) * how.factor
        return all_reduce(dy, comm, how)

    return _apply(x, lambda x: comm.all_reduce(x.clone(), how), transposed)


def reduce(x: Tensor, comm: Communicator, root: int = 0, op: Op = "sum") -> Tensor:
    """Reduce to the root; zeros elsewhere. The transpose is `broadcast`. Arguments as in `all_reduce`."""
    how = _linear(op, x)
    factor = {ReduceOp.AVG: 1 / comm.size, ReduceOp.PREMUL_SUM: how.factor}.get(how.op, 1)

    def run(x: Tensor) -> Any:
        out = comm.reduce(x.clone(), root, how)
        return out if comm.rank == root else torch.zeros_like(x)

    return _apply(x, run, lambda dy: broadcast(dy, comm, root) * factor)


def broadcast(x: Tensor, comm: Communicator, root: int = 0) -> Tensor:
    """Copy the root's tensor to all ranks; the transpose is the sum at the root.

    Args:
        x: the tensor on the root; elsewhere one of its shape and dtype, whose gradient is zero.
        comm: the communicator.
        root: rank that sends.
    """
    return _apply(x, lambda x: comm.broadcast(x.clone(), root), lambda dy: reduce(dy, comm, root))


def all_gather(x: Tensor, comm: Communicator, counts: Sequence[int] | None = None) -> Tensor:
    """Concatenate the blocks of all ranks along axis 0; the transpose is `reduce_scatter`.

    Args:
        counts: rows per rank, if they differ.
    """
    shape = x.shape
    return _apply(
        x, lambda x: comm.all_gather(x, counts=counts), lambda dy: reduce_scatter(dy, comm, counts).view(shape)
    )


def reduce_scatter(x: Tensor, comm: Communicator, counts: Sequence[int] | None = None) -> Tensor:
    """Sum over all ranks, and return this rank's rows; the transpose is `all_gather`. `counts` are rows per rank."""
    return _apply(x, lambda x: comm.reduce_scatter(x, counts=counts), lambda dy: all_gather(dy, comm, counts))


def gather(x: Tensor, comm: Communicator, root: int = 0, counts: Sequence[int] | None = None) -> Tensor:
    """Concatenate all blocks along axis 0 on the root; zeros of that shape elsewhere. The transpose is `scatter`.

    Arguments as in `all_gather`.
    """
    shape = x.shape

    def run(x: Tensor) -> Any:
        out = comm.gather(x, root, counts=counts)
        if out is not None:
            return out
        rows = sum(counts) if counts is not None else comm.size * (shape[0] if shape else 1)
        return x.new_zeros(rows, *shape[1:])

    return _apply(x, run, lambda dy: scatter(dy, comm, root, counts).view(shape))


def scatter(x: Tensor, comm: Communicator, root: int = 0, counts: Sequence[int] | None = None) -> Tensor:
    """Return this rank's rows of the root's tensor; the transpose is `gather`. `counts` are rows per rank.

    Args:
        x: all rows on the root; elsewhere a tensor of its shape and dtype, whose gradient is zero.
    """
    return _apply(x, lambda x: comm.scatter(x, root, counts=counts), lambda dy: gather(dy, comm, root, counts))


def all_to_all(
    x: Tensor, comm: Communicator, send_counts: Sequence[int] | None = None, recv_counts: Sequence[int] | None = None
) -> Tensor:
    """Exchange rows with each rank; the transpose sends them back. Counts are rows, by default equal."""
    return _apply(
        x, lambda x: comm.all_to_all(x, send_counts=send_counts, recv_counts=recv_counts),
        lambda dy: all_to_all(dy, comm, recv_counts, send_counts),
    )  # fmt: skip


def send(x: Tensor, comm: Communicator, dst: int, tag: int = 0) -> Tensor:
    """Send a tensor; the backward pass receives its gradient from `dst`.

    Returns:
        A scalar zero that must become part of what is differentiated here (add it to a loss, or call its `backward`), so that
        autograd runs the backward pass.
    """
    shape, dtype, device = x.shape, x.dtype, x.device

    def run(x: Tensor) -> Tensor:
        comm.send(x, dst, tag)
        return x.new_zeros(())

    return _apply(x, run, lambda dy: recv(torch.empty(shape, dtype=dtype, device=device), comm, dst, tag))


def recv(like: Tensor, comm: Communicator, src: int, tag: int = 0) -> Tensor:
    """Receive a tensor of the shape and dtype of `like`; the backward pass sends its gradient to `src`.

    Args:
        like: must require a gradient if one is to be sent; its own gradient is zero.
    """

    def transposed(dy: Tensor) -> Tensor:
        with mapped():
            comm.send(_dense(dy), src, tag)
        return torch.zeros_like(dy)

    return _apply(like, lambda like: comm.recv(torch.empty_like(like), src, tag), transposed)


def _linear(op: Op, x: Tensor) -> Reduction:
    how = reduction(op)
    if how.op not in _LINEAR and x.requires_grad and torch.is_grad_enabled():
        raise DTypeError(f"{how.op} is not differentiable: use sum or avg, or pass x.detach()")
    return how


def _dense(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().contiguous()


def _apply(x: Tensor, run: Callable[[Tensor], Any], transposed: Callable[[Tensor], Tensor]) -> Tensor:
    """Run an operation on the memory of a tensor, and in the backward pass the transposed one on the gradient.

    Neither may keep the tensor itself.
    """
    result: Tensor = _Function.apply(x, run, transposed)
    return result


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, run: Callable[[Tensor], Any], transposed: Callable[[Tensor], Tensor]) -> Any:
        with mapped():
            return run(_dense(x))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.transposed = inputs[2]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.transposed(dy), None, None
