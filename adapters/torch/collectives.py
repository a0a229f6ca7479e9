"""The collectives of c10d implemented with those of a communicator, one function each; they run in order on one plane.

c10d passes lists where xvcomm takes one array: blocks that are not contiguous are first copied together, and results are copied
back. Blocks may differ in size, as with NCCL.

`all_reduce`, `broadcast`, `all_gather_into` and `reduce_scatter_into` require tensors that the communicator accepts, and return
its Work with `async_op`; `on_any` runs them on other tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from xvcomm.adapters.torch.options import Options
from xvcomm.adapters.torch.planes import Operation, Plane
from xvcomm.adapters.torch.sparse import all_reduce_sparse
from xvcomm.adapters.torch.tensors import apart, dense, joined, room, room_for, same_dtype, settle, spread
from xvcomm.errors import ArgumentError


def on_any(operation: Operation, plane: Plane, tensors: Sequence[Tensor], how: Options) -> None:
    """Run `all_reduce`, `broadcast`, `all_gather_into` or `reduce_scatter_into` on tensors of any layout and device.

    Args:
        operation: one of these functions.
        tensors: the output, and the input if that is a different tensor.
        how: options of the call.
    """
    out, *inputs = tensors
    if plane.takes(tensors):
        operation(plane, *tensors, how)
    elif operation is all_reduce and out.layout is not torch.strided:
        all_reduce_sparse(plane, out, how)
    else:
        result = room(out, plane.device) if inputs else dense(out, plane.device)
        operation(plane, result, *(dense(x, plane.device) for x in inputs), how)
        settle(result, out)


def all_reduce(plane: Plane, x: Tensor, how: Options, *, async_op: bool = False) -> Any:
    """Reduce over all ranks, in place."""
    return plane.comm.all_reduce(plane.view(x), how.op, async_op=async_op, timeout=how.timeout)


def broadcast(plane: Plane, x: Tensor, how: Options, *, async_op: bool = False) -> Any:
    """Copy the root's tensor to all ranks."""
    return plane.comm.broadcast(plane.view(x), how.root, async_op=async_op, timeout=how.timeout)


def reduce(plane: Plane, x: Tensor, how: Options) -> None:
    """Reduce into the root's tensor."""
    buffer = dense(x, plane.device)
    plane.comm.reduce(plane.view(buffer), how.root, how.op, timeout=how.timeout)
    if plane.comm.rank == how.root:
        settle(buffer, x)


def all_gather_into(plane: Plane, out: Tensor, x: Tensor, how: Options, *, async_op: bool = False) -> Any:
    """Concatenate the blocks of all ranks in one tensor."""
    same_dtype((out, x), "all_gather")
    _fits("all_gather", "output", out.numel(), plane.comm.size * x.numel())
    return plane.comm.all_gather(plane.view(x), out=plane.view(out), async_op=async_op, timeout=how.timeout)


def all_gather(plane: Plane, outs: Sequence[Tensor], x: Tensor, how: Options) -> None:
    """Gather the blocks of all ranks, each in its own tensor."""
    _one_a_rank("all_gather", outs, plane)
    same_dtype((*outs, x), "all_gather")
    counts = _counts(outs)
    _fits("all_gather", "input", x.numel(), outs[plane.comm.rank].numel())
    whole = room_for(outs, plane.device)
    plane.comm.all_gather(plane.view(dense(x, plane.device)), out=plane.view(whole), counts=counts, timeout=how.timeout)
    spread(whole, outs)


def reduce_scatter_into(plane: Plane, out: Tensor, x: Tensor, how: Options, *, async_op: bool = False) -> Any:
    """Reduce over all ranks, and give each rank its block of one tensor."""
    same_dtype((out, x), "reduce_scatter")
    _fits("reduce_scatter", "input", x.numel(), plane.comm.size * out.numel())
    return plane.comm.reduce_scatter(plane.view(x), how.op, out=plane.view(out), async_op=async_op, timeout=how.timeout)


def reduce_scatter(plane: Plane, out: Tensor, parts: Sequence[Tensor], how: Options) -> None:
    """Reduce over all ranks, and give each rank its block, which are separate tensors."""
    _one_a_rank("reduce_scatter", parts, plane)
    same_dtype((out, *parts), "reduce_scatter")
    _fits("reduce_scatter", "output", out.numel(), parts[plane.comm.rank].numel())
    whole, own = joined(parts, plane.device), parts[plane.comm.rank]
    # a temporary if `out` overlaps an input block, which other ranks may still read
    buffer = room(out, plane.device) if apart(out, whole, own) else torch.empty_like(own)
    plane.comm.reduce_scatter(
        plane.view(whole),
        how.op,
        out=plane.view(buffer),
        counts=_counts(parts),
        timeout=how.timeout,
    )
    settle(buffer, out)


def gather(plane: Plane, outs: Sequence[Tensor], x: Tensor, how: Options) -> None:
    """Gather the blocks of all ranks on the root; `outs` is empty elsewhere."""
    whole = None
    if plane.comm.rank == how.root:
        _one_a_rank("gather", outs, plane)
        same_dtype((*outs, x), "gather")
        if len({o.numel() for o in outs}) > 1:
            raise ArgumentError(
                "gather: the root's tensors differ in size; gather blocks of one size, or use all_gather"
            )
        whole = room_for(outs, plane.device)
    plane.comm.gather(
        plane.view(dense(x, plane.device)),
        how.root,
        out=None if whole is None else plane.view(whole),
        timeout=how.timeout,
    )
    if whole is not None:
        spread(whole, outs)


def scatter(plane: Plane, out: Tensor, parts: Sequence[Tensor], how: Options) -> None:
    """Send each rank its block from the root; `parts` is empty elsewhere."""
    whole = None
    if plane.comm.rank == how.root:
        _one_a_rank("scatter", parts, plane)
        same_dtype((out, *parts), "scatter")
        if len({p.numel() for p in parts}) > 1:
            raise ArgumentError("scatter: the root's tensors differ in size; scatter blocks of one size")
        whole = joined(parts, plane.device)
    buffer = room(out, plane.device)
    plane.comm.scatter(
        None if whole is None else plane.view(whole), how.root, out=plane.view(buffer), timeout=how.timeout
    )
    settle(buffer, out)


def all_to_all_into(
    plane: Plane, out: Tensor, x: Tensor, out_rows: Sequence[int], in_rows: Sequence[int], how: Options
) -> None:
    """Send rows to each rank and receive rows from each; empty lists of rows mean equal blocks."""
    same_dtype((out, x), "all_to_all")
    buffer = room(out, plane.device)
    plane.comm.all_to_all(
        plane.view(dense(x, plane.device)), out=plane.view(buffer),
        send_counts=_elements("input", x, in_rows, plane), recv_counts=_elements("output", out, out_rows, plane),
        timeout=how.timeout,
    )  # fmt: skip
    settle(buffer, out)


def all_to_all(plane: Plane, outs: Sequence[Tensor], parts: Sequence[Tensor], how: Options) -> None:
    """Send a tensor to each rank and receive one from each."""
    _one_a_rank("all_to_all", outs, plane)
    _one_a_rank("all_to_all", parts, plane)
    same_dtype((*outs, *parts), "all_to_all")
    whole = room_for(outs, plane.device)
    plane.comm.all_to_all(
        plane.view(joined(parts, plane.device)), out=plane.view(whole), send_counts=[p.numel() for p in parts],
        recv_counts=[o.numel() for o in outs], timeout=how.timeout,
    )  # fmt: skip
    spread(whole, outs)


def barrier(plane: Plane, how: Options) -> None:
    """Wait until every rank has called this."""
    plane.comm.barrier(timeout=how.timeout, stream=plane.handle())


def _counts(parts: Sequence[Tensor]) -> list[int] | None:
    """Elements per rank, if they differ."""
    counts = [p.numel() for p in parts]
    return counts if len(set(counts)) > 1 else None


def _elements(what: str, x: Tensor, rows: Sequence[int], plane: Plane) -> list[int]:
    """Elements for or from each rank."""
    size, total = plane.comm.size, x.shape[0] if x.dim() else 1
    if not rows:
        if total % size:
            raise ArgumentError(
                f"all_to_all: the {what}'s {total} rows do not divide by {size} ranks; pass split sizes"
            )
        rows = [total // size] * size
    if len(rows) != size or sum(rows) != total:
        raise ArgumentError(
            f"all_to_all: {what} split sizes {list(rows)} must be {size} numbers, and their sum the tensor's {total} rows"
        )
    row = x.numel() // total if total else 0
    return [n * row for n in rows]


def _one_a_rank(what: str, tensors: Sequence[Tensor], plane: Plane) -> None:
    if len(tensors) != plane.comm.size:
        raise ArgumentError(
            f"{what}: {len(tensors)} tensors for {plane.comm.size} ranks; pass a list with one for each rank"
        )


def _fits(what: str, name: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise ArgumentError(f"{what}: the {name} tensor has {found} elements, {wanted} are needed")
