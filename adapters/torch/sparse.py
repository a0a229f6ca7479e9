"""all_reduce of sparse tensors, with Gloo's semantics: the sum, coalesced, on every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from xvcomm.adapters.torch.options import Options
from xvcomm.adapters.torch.planes import Plane
from xvcomm.errors import ArgumentError
from xvcomm.types.dtype import ReduceOp


def all_reduce_sparse(plane: Plane, x: Tensor, how: Options) -> None:
    """Sum a COO tensor over all ranks, in place; ranks may have different numbers of elements.

    Indices and values of all ranks are gathered, and added in rank order.

    Raises:
        ArgumentError: the layout is not COO, or the reduction not a sum.
    """
    if x.layout is not torch.sparse_coo:
        raise ArgumentError(
            f"all_reduce takes dense and sparse COO tensors, not {x.layout}; convert it with to_sparse()"
        )
    if how.op.op is not ReduceOp.SUM:
        raise ArgumentError(
            f"all_reduce of a sparse tensor can only be a sum, not {how.op.op}; convert it with to_dense()"
        )
    mine = x.detach().coalesce()
    indices, values = (t.to(plane.device or x.device).contiguous() for t in (mine.indices(), mine.values()))
    number = torch.tensor([mine._nnz()], device=indices.device)
    counts = plane.comm.all_gather(number, timeout=how.timeout).tolist()
    all_indices = _gathered(plane, indices.t().contiguous(), counts, how).t()
    all_values = _gathered(plane, values, counts, how)
    total = torch.sparse_coo_tensor(all_indices, all_values, x.shape).coalesce()
    with torch.no_grad():
        x.copy_(total.to(x.device))


def _gathered(plane: Plane, rows: Tensor, counts: list[int], how: Options) -> Tensor:
    width = rows.shape[1:].numel()
    out = rows.new_empty((sum(counts), *rows.shape[1:]))
    elements = [n * width for n in counts]
    plane.comm.all_gather(plane.view(rows), out=plane.view(out), counts=elements, timeout=how.timeout)
    return out
