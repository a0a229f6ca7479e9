"""Differentiable collectives and messages, for plain tensors and a `Communicator`.

    y = functions.all_reduce(x, comm)
    functions.all_gather(y, comm).square().sum().backward()

Each returns new tensors and leaves its input unchanged. The backward pass is the transposed operation, which all ranks must run
as they ran the forward one. The differentiated quantity is the sum of all ranks' losses, as in `torch.distributed.nn`.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    return _AllReduce.apply(x, comm, _linear(op, x))


def reduce(x: Tensor, comm: Communicator, root: int = 0, op: Op = "sum") -> Tensor:
    """Reduce to the root; zeros elsewhere. The transpose is `broadcast`. Arguments as in `all_reduce`."""
    return _Reduce.apply(x, comm, root, _linear(op, x))


def broadcast(x: Tensor, comm: Communicator, root: int = 0) -> Tensor:
    """Copy the root's tensor to all ranks; the transpose is the sum at the root.

    Args:
        x: the tensor on the root; elsewhere one of its shape and dtype, whose gradient is zero.
        comm: the communicator.
        root: rank that sends.
    """
    return _Broadcast.apply(x, comm, root)


def all_gather(x: Tensor, comm: Communicator, counts: Sequence[int] | None = None) -> Tensor:
    """Concatenate the blocks of all ranks along axis 0; the transpose is `reduce_scatter`.

    Args:
        counts: rows per rank, if they differ.
    """
    return _AllGather.apply(x, comm, counts)


def reduce_scatter(x: Tensor, comm: Communicator, counts: Sequence[int] | None = None) -> Tensor:
    """Sum over all ranks, and return this rank's rows; the transpose is `all_gather`. `counts` are rows per rank."""
    return _ReduceScatter.apply(x, comm, counts)


def gather(x: Tensor, comm: Communicator, root: int = 0, counts: Sequence[int] | None = None) -> Tensor:
    """Concatenate all blocks along axis 0 on the root; zeros of that shape elsewhere. The transpose is `scatter`.

    Arguments as in `all_gather`.
    """
    return _Gather.apply(x, comm, root, counts)


def scatter(x: Tensor, comm: Communicator, root: int = 0, counts: Sequence[int] | None = None) -> Tensor:
    """Return this rank's rows of the root's tensor; the transpose is `gather`. `counts` are rows per rank.

    Args:
        x: all rows on the root; elsewhere a tensor of its shape and dtype, whose gradient is zero.
    """
    return _Scatter.apply(x, comm, root, counts)


def all_to_all(
    x: Tensor, comm: Communicator, send_counts: Sequence[int] | None = None, recv_counts: Sequence[int] | None = None
) -> Tensor:
    """Exchange rows with each rank; the transpose sends them back. Counts are rows, by default equal."""
    return _AllToAll.apply(x, comm, send_counts, recv_counts)


def send(x: Tensor, comm: Communicator, dst: int, tag: int = 0) -> Tensor:
    """Send a tensor; the backward pass receives its gradient from `dst`.

    Returns:
        A scalar zero that must become part of what is differentiated here (add it to a loss, or call its `backward`), so that
        autograd runs the backward pass.
    """
    return _Send.apply(x, comm, dst, tag)


def recv(like: Tensor, comm: Communicator, src: int, tag: int = 0) -> Tensor:
    """Receive a tensor of the shape and dtype of `like`; the backward pass sends its gradient to `src`.

    Args:
        like: must require a gradient if one is to be sent; its own gradient is zero.
    """
    return _Recv.apply(like, comm, src, tag)


def _linear(op: Op, x: Tensor) -> Reduction:
    how = reduction(op)
    if how.op not in _LINEAR and x.requires_grad and torch.is_grad_enabled():
        raise DTypeError(f"{how.op} is not differentiable: use sum or avg, or pass x.detach()")
    return how


def _dense(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().contiguous()


class _Function(torch.autograd.Function):
    """Converts errors; `forward` takes the tensor first, then its other arguments."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save the arguments of `forward` except the tensor."""
        ctx.x_shape, ctx.arguments = inputs[0].shape, inputs[1:]


class _AllReduce(_Function):
    @staticmethod
    def forward(x: Tensor, comm: Communicator, how: Reduction) -> Tensor:
        out = _dense(x).clone()
        with mapped():
            comm.all_reduce(out, how)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        comm, how = ctx.arguments
        if how.op is ReduceOp.PREMUL_SUM:
            return all_reduce(dy, comm) * how.factor, None, None
        return all_reduce(dy, comm, how), None, None


class _Reduce(_Function):
    @staticmethod
    def forward(x: Tensor, comm: Communicator, root: int, how: Reduction) -> Tensor:
        out = _dense(x).clone()
        with mapped():
            comm.reduce(out, root, how)
        return out if comm.rank == root else torch.zeros_like(out)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        comm, root, how = ctx.arguments
        factor = {ReduceOp.AVG: 1 / comm.size, ReduceOp.PREMUL_SUM: how.factor}.get(how.op, 1)
        return broadcast(dy, comm, root) * factor, None, None, None


class _Broadcast(_Function):
    @staticmethod
    def forward(x: Tensor, comm: Communicator, root: int) -> Tensor:
        out = _dense(x).clone()
        with mapped():
            comm.broadcast(out, root)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        comm, root = ctx.arguments
        return reduce(dy, comm, root), None, None


class _AllGather(_Function):
    @staticmethod
    def forward(x: Tensor, comm: Communicator, counts: Sequence[int] | None) -> Tensor:
        with mapped():
            out: Tensor = comm.all_gather(_dense(x), counts=counts)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        comm, counts = ctx.arguments
        return reduce_scatter(dy, comm, counts).view(ctx.x_shape), None, None


class _ReduceScatter(_Function):
    @staticmethod
    def forward(x: Tensor, comm: Communicator, counts: Sequence[int] | None) -> Tensor:
        with mapped():
            out: Tensor = comm.reduce_scatter(_dense(x), counts=counts)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        comm, counts = ctx.arguments
        return all_gather(dy, comm, counts), None, None


class _Gather(_Function):
    @staticmethod
    def forward(x: Tensor, comm: Communicator, root: int, counts: Sequence[int] | None) -> Tensor:
        with mapped():
            out: Tensor | None = comm.gather(_dense(x), root, counts=counts)
        if out is not None:
            return out
        rows = sum(counts) if counts is not None else comm.size * (x.shape[0] if x.dim() else 1)
        return x.new_zeros(rows, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        comm, root, counts = ctx.arguments
        return scatter(dy, comm, root, counts).view(ctx.x_shape), None, None, None


class _Scatter(_Function):
    @staticmethod
    def forward(x: Tensor, comm: Communicator, root: int, counts: Sequence[int] | None) -> Tensor:
        with mapped():
            out: Tensor = comm.scatter(_dense(x), root, counts=counts)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        comm, root, counts = ctx.arguments
        return gather(dy, comm, root, counts), None, None, None


class _AllToAll(_Function):
    @staticmethod
    def forward(
        x: Tensor, comm: Communicator, send_counts: Sequence[int] | None, recv_counts: Sequence[int] | None
    ) -> Tensor:
        with mapped():
            out: Tensor = comm.all_to_all(_dense(x), send_counts=send_counts, recv_counts=recv_counts)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        comm, send_counts, recv_counts = ctx.arguments
        return all_to_all(dy, comm, recv_counts, send_counts), None, None, None


class _Send(_Function):
    @staticmethod
    def forward(x: Tensor, comm: Communicator, dst: int, tag: int) -> Tensor:
        with mapped():
            comm.send(_dense(x), dst, tag)
        return x.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Also save shape and dtype of the gradient."""
        x = inputs[0]
        ctx.shape, ctx.kind, ctx.place, ctx.arguments = x.shape, x.dtype, x.device, inputs[1:]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        comm, dst, tag = ctx.arguments
        like = torch.empty(ctx.shape, dtype=ctx.kind, device=ctx.place)
        return recv(like, comm, dst, tag), None, None, None


class _Recv(_Function):
    @staticmethod
    def forward(like: Tensor, comm: Communicator, src: int, tag: int) -> Tensor:
        out = torch.empty_like(like, memory_format=torch.contiguous_format)
        with mapped():
            comm.recv(out, src, tag)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        comm, src, tag = ctx.arguments
        with mapped():
            comm.send(_dense(dy), src, tag)
        return torch.zeros_like(dy), None, None, None
