"""Sparse tensors: sums of COO tensors with Gloo's semantics."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchchecks import close, me, same, size
from torchjobs import Job


def coo(rank: int, *dense: int, place: str = "cpu") -> torch.Tensor:
    """A rank's tensor: `rank + 1` entries, one of which all ranks have."""
    indices = torch.tensor([[0, *(2 + rank + i for i in range(rank))], [1, *(i % 3 for i in range(rank))]])
    values = torch.arange(1.0, indices.shape[1] + 1)
    return torch.sparse_coo_tensor(
        indices, values.reshape(-1, *[1] * len(dense)).expand(-1, *dense), (9, 3, *dense), device=place
    )


def added(*dense: int, place: str = "cpu") -> None:
    expected = sum(coo(rank, *dense).to_dense() for rank in range(size()))
    dist.all_reduce(x := coo(me(), *dense, place=place))
    assert x.is_sparse
    same(x.to_dense(), expected)
    work = dist.all_reduce(x := coo(me(), *dense, place=place), async_op=True)
    work.wait()
    same(x.to_dense(), expected)
    empty = torch.sparse_coo_tensor(
        torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0, *dense), (9, 3, *dense), device=place
    )
    dist.all_reduce(x := coo(0, *dense, place=place) if me() == 0 else empty)
    same(x.to_dense(), coo(0, *dense).to_dense())


def test_sums_of_sparse_tensors(pair: Job, four: Job) -> None:
    for job in (pair, four):
        job.run(added)
        job.run(added, 2)


def embedding() -> None:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    model(torch.tensor([1, 2 + me(), 1])).pow(2).sum().backward()
    alone = nn.Embedding.from_pretrained(model.module.weight.detach(), freeze=False)
    for rank in range(size()):
        (alone(torch.tensor([1, 2 + rank, 1])).pow(2).sum() / size()).backward()
    assert model.module.weight.grad.is_sparse
    close(model.module.weight.grad.to_dense(), alone.weight.grad)


def test_sparse_gradients_in_ddp(pair: Job) -> None:
    pair.run(embedding)


def refused() -> list[bool]:
    found = []
    for call in (
        lambda: dist.all_reduce(coo(me()), dist.ReduceOp.MAX),
        lambda: dist.broadcast(coo(me()), 0),
        lambda: dist.all_reduce(torch.eye(3).to_sparse_csr()),
    ):
        try:
            call()
        except Exception:
            found.append(True)
        else:
            found.append(False)
    return found


@pytest.mark.not_gloo("all of these refusals")
def test_unsupported_operations_on_sparse_tensors_are_rejected(pair: Job) -> None:
    for found in pair.run(refused):
        assert all(found), found
