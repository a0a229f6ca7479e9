"""Gradients through xvcomm's functions for tensors, against the same formulas over all ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import xvcomm
from xvcomm.adapters.torch import functions
from xvcomm.comm.communicator import Communicator
from xvcomm.testing.world import World

WIDTH = 4
Ours = Callable[[Tensor, Communicator], Tensor]
Formula = Callable[[Sequence[Tensor]], list[Tensor]]


@pytest.fixture(scope="module", params=["cuda:2,rocm:1", "cuda:1,rocm:1"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(islands=request.param, preload=["torch"]) as ranks:
        yield ranks


def draw(rows: Sequence[int], seed: int) -> list[Tensor]:
    """One matrix per rank, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in rows]


def place(comm: Communicator) -> torch.device:
    """The device of this rank's tensors."""
    return torch.device("cpu") if comm.device == "host" else torch.device("cuda", comm.device_index)


def compare(comm: Communicator, rows: Sequence[int], ours: Ours, formula: Formula) -> None:
    """Compare this rank's value and gradient with `formula`, which maps all ranks' inputs to all ranks' results."""
    xs = [x.requires_grad_() for x in draw(rows, 1)]
    results = formula(xs)
    weights = draw([len(r) for r in results], 2)
    torch.autograd.backward(results, weights)
    x = draw(rows, 1)[comm.rank].to(place(comm)).requires_grad_()
    y = ours(x, comm)
    torch.testing.assert_close(y.detach().cpu(), results[comm.rank].detach())
    y.backward(weights[comm.rank].to(y.device))
    wanted, found = xs[comm.rank].grad, x.grad
    torch.testing.assert_close(found.cpu(), torch.zeros_like(xs[comm.rank]) if wanted is None else wanted)


def total(xs: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(xs)).sum(0)


def check_all_reduce(comm: Communicator) -> None:
    even = [3] * comm.size
    compare(comm, even, functions.all_reduce, lambda xs: [total(xs)] * len(xs))
    compare(comm, even, lambda x, c: functions.all_reduce(x, c, "avg"), lambda xs: [total(xs) / len(xs)] * len(xs))
    compare(
        comm, even, lambda x, c: functions.all_reduce(x, c, xvcomm.premul_sum(2.0 + c.rank)),
        lambda xs: [total([x * (2.0 + r) for r, x in enumerate(xs)])] * len(xs),
    )  # fmt: skip


def check_rooted(comm: Communicator) -> None:
    even, root = [3] * comm.size, comm.size - 1

    def reduced(xs: Sequence[Tensor]) -> list[Tensor]:
        return [total(xs) if r == root else torch.zeros_like(x) + 0 * x for r, x in enumerate(xs)]

    compare(comm, even, lambda x, c: functions.reduce(x, c, root), reduced)
    compare(comm, even, lambda x, c: functions.broadcast(x, c, root), lambda xs: [xs[root] + 0 * x for x in xs])


def check_blocks(comm: Communicator) -> None:
    size = comm.size
    uneven = [r + 1 for r in range(size)]
    compare(comm, [2] * size, functions.all_gather, lambda xs: [torch.cat(list(xs))] * len(xs))
    compare(comm, uneven, lambda x, c: functions.all_gather(x, c, uneven), lambda xs: [torch.cat(list(xs))] * len(xs))
    compare(comm, [2 * size] * size, functions.reduce_scatter, lambda xs: list(total(xs).chunk(len(xs))))
    compare(
        comm, [sum(uneven)] * size, lambda x, c: functions.reduce_scatter(x, c, uneven),
        lambda xs: list(total(xs).split(uneven)),
    )  # fmt: skip


def check_rooted_blocks(comm: Communicator) -> None:
    """Ranks without a result get zeros, whose gradient is ignored."""
    size, root = comm.size, comm.size - 1
    uneven = [r + 1 for r in range(size)]

    def gathered(xs: Sequence[Tensor]) -> list[Tensor]:
        whole = torch.cat(list(xs))
        return [whole if r == root else 0 * whole for r in range(len(xs))]

    def scattered(rows: Sequence[int]) -> Formula:
        return lambda xs: [part + 0 * x.sum() for part, x in zip(xs[root].split(list(rows)), xs, strict=True)]

    compare(comm, [2] * size, lambda x, c: functions.gather(x, c, root), gathered)
    compare(comm, uneven, lambda x, c: functions.gather(x, c, root, uneven), gathered)
    compare(comm, [2 * size] * size, lambda x, c: functions.scatter(x, c, root), scattered([2] * size))
    compare(comm, [sum(uneven)] * size, lambda x, c: functions.scatter(x, c, root, uneven), scattered(uneven))
    x = torch.tensor(float(comm.rank), requires_grad=True, device=place(comm))
    y = functions.gather(x, comm)
    assert y.tolist() == ([float(r) for r in range(size)] if comm.rank == 0 else [0.0] * size)
    (y * torch.arange(size, device=y.device)).sum().backward()
    assert x.grad is not None and x.grad.item() == comm.rank


def check_twice(comm: Communicator) -> None:
    """The second derivative of the sum of cubes: 6x."""
    x = torch.full((comm.size,), comm.rank + 1.0, dtype=torch.float64, requires_grad=True, device=place(comm))
    back = functions.scatter(functions.gather(x, comm), comm)
    (first,) = torch.autograd.grad((back**3).sum(), x, create_graph=True)
    torch.testing.assert_close(first.detach(), 3 * x.detach() ** 2)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * x.detach())


def check_all_to_all(comm: Communicator) -> None:
    size = comm.size

    def turned(xs: Sequence[Tensor]) -> list[Tensor]:
        parts = [x.chunk(size) for x in xs]
        return [torch.cat([parts[source][r] for source in range(size)]) for r in range(size)]

    compare(comm, [2 * size] * size, functions.all_to_all, turned)
    sends = [[(r + c) % 3 for c in range(size)] for r in range(size)]

    def turned_unevenly(xs: Sequence[Tensor]) -> list[Tensor]:
        parts = [x.split(sends[r]) for r, x in enumerate(xs)]
        return [torch.cat([parts[source][r] for source in range(size)]) for r in range(size)]

    compare(
        comm, [sum(s) for s in sends],
        lambda x, c: functions.all_to_all(x, c, sends[c.rank], [s[c.rank] for s in sends]), turned_unevenly,
    )  # fmt: skip


def check_messages(comm: Communicator) -> None:
    """Rank 0 squares and sends, the last rank cubes: d(x^6)/dx at rank 0."""
    last = comm.size - 1
    if comm.rank == 0:
        x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True, device=place(comm))
        functions.send(x * x, comm, last, tag=3).backward()
        assert torch.equal(x.grad, 6 * x.detach() ** 5), x.grad  # type: ignore[arg-type]
    elif comm.rank == last:
        y = functions.recv(torch.empty(3, requires_grad=True, device=place(comm)), comm, 0, tag=3)
        (y**3).sum().backward()


def check_refusals(comm: Communicator) -> str:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(xvcomm.DTypeError, match=r"max is not differentiable.*detach"):
        functions.all_reduce(x, comm, "max")
    with torch.no_grad():
        return str(functions.all_reduce(x * comm.rank, comm, "max").tolist())


CHECKS = (
    check_all_reduce, check_rooted, check_blocks, check_rooted_blocks, check_twice, check_all_to_all, check_messages,
)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_gradients(world: World, check: Callable[..., Any]) -> None:
    world.run(check)


def test_other_reductions_have_no_gradient(world: World) -> None:
    assert world.run(check_refusals) == [str([float(world.size - 1)] * 3)] * world.size
