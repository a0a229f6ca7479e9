"""Collectives in other forms: the group's methods, coalesced, strided, empty, large, many at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager
from torchchecks import combined, me, noise, raw, same, size, small
from torchjobs import Job


def total(*shape: int, dtype: str = "float32") -> torch.Tensor:
    """The sum of `small` over all ranks."""
    return combined("SUM", [small(dtype, shape, rank) for rank in range(size())])


def mine(*shape: int) -> torch.Tensor:
    """This rank's `small`."""
    return small("float32", shape, me())


def everybody(*shape: int) -> list[torch.Tensor]:
    """All ranks' `small`."""
    return [small("float32", shape, rank) for rank in range(size())]


def methods_with_lists() -> None:
    group, n, rank = dist.group.WORLD, size(), me()
    group.allreduce([x := mine(4)]).wait()
    same(x, total(4))
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    group.allreduce([x := mine(4)], options).wait()
    same(x, combined("MAX", everybody(4)))
    options = dist.BroadcastOptions()
    options.rootRank = n - 1
    group.broadcast([x := mine(4)], options).wait()
    same(x, everybody(4)[n - 1])
    group.allgather([out := [torch.zeros(4) for _ in range(n)]], [mine(4)]).wait()
    assert [raw(t) for t in out] == [raw(t) for t in everybody(4)]
    group.reduce_scatter([x := torch.zeros(2)], [list(mine(2 * n).chunk(n))]).wait()
    same(x, total(2 * n).chunk(n)[rank])
    group.all_gather_single(out := torch.zeros(4 * n), mine(4)).wait()
    same(out, torch.cat(everybody(4)))
    group.reduce_scatter_single(x := torch.zeros(2), mine(2 * n)).wait()
    same(x, total(2 * n).chunk(n)[rank])
    group.all_to_all_single(x := torch.zeros(2 * n), mine(2 * n), [], []).wait()
    same(x, torch.cat([part.chunk(n)[rank] for part in everybody(2 * n)]))
    group.barrier().wait()


def test_methods_of_the_group(pair: Job) -> None:
    pair.run(methods_with_lists)


def methods_with_tensors() -> None:
    group, n, rank = dist.group.WORLD, size(), me()
    group.allreduce(x := mine(4)).wait()
    same(x, total(4))
    group.allreduce(x := mine(4), dist.ReduceOp.MIN).wait()
    same(x, combined("MIN", everybody(4)))
    group.broadcast(x := mine(4), 1).wait()
    same(x, everybody(4)[1])
    group.allgather(out := [torch.zeros(4) for _ in range(n)], mine(4)).wait()
    assert [raw(t) for t in out] == [raw(t) for t in everybody(4)]
    group.reduce_scatter(x := torch.zeros(2), list(mine(2 * n).chunk(n))).wait()
    same(x, total(2 * n).chunk(n)[rank])
    group.reduce(x := mine(4), 0).wait()
    if rank == 0:
        same(x, total(4))
    group.gather(out := [torch.zeros(4) for _ in range(n)] if rank == 1 else [], mine(4), 1).wait()
    assert [raw(t) for t in out] == [raw(t) for t in everybody(4)] * (rank == 1)
    group.scatter(x := torch.zeros(4), everybody(4) if rank == 0 else [], 0).wait()
    same(x, mine(4))
    group.barrier().wait()


def test_methods_of_the_group_with_single_tensors(pair: Job) -> None:
    pair.run(methods_with_tensors)


def several_tensors_in_one_call() -> None:
    group = dist.group.WORLD
    group.allreduce_coalesced([a := mine(3), b := mine(2, 2)]).wait()
    same(a, total(3))
    same(b, total(2, 2))
    dist.all_reduce_coalesced([a := mine(3), b := mine(5)])
    same(a, total(3))
    same(b, total(5))
    out = [[torch.zeros(3), torch.zeros(5)] for _ in range(size())]
    dist.all_gather_coalesced(out, [mine(3), mine(5)])
    for rank, (first, second) in enumerate(out):
        same(first, small("float32", (3,), rank))
        same(second, small("float32", (5,), rank))


def test_several_tensors_in_one_call(pair: Job) -> None:
    pair.run(several_tensors_in_one_call)


def tensors_coalesced(async_op: bool) -> None:
    n, rank = size(), me()
    with _coalescing_manager(async_ops=async_op) as manager:
        dist.all_reduce(a := mine(3))
        dist.all_reduce(b := mine(7))
    if async_op:
        manager.wait()
    same(a, total(3))
    same(b, total(7))
    with _coalescing_manager(async_ops=async_op) as manager:
        dist.all_gather_into_tensor(a := torch.zeros(2 * n), mine(2))
        dist.all_gather_into_tensor(b := torch.zeros(3 * n), mine(3))
    if async_op:
        manager.wait()
    same(a, torch.cat(everybody(2)))
    same(b, torch.cat(everybody(3)))
    with _coalescing_manager(async_ops=async_op) as manager:
        dist.reduce_scatter_tensor(a := torch.zeros(2), mine(2 * n), dist.ReduceOp.MAX)
        dist.reduce_scatter_tensor(b := torch.zeros(1), mine(n), dist.ReduceOp.MAX)
    if async_op:
        manager.wait()
    same(a, combined("MAX", everybody(2 * n)).chunk(n)[rank])
    same(b, combined("MAX", everybody(n)).chunk(n)[rank])


@pytest.mark.parametrize("async_op", [False, True])
def test_coalescing_manager(pair: Job, async_op: bool) -> None:
    pair.run(tensors_coalesced, async_op)


def messages_coalesced() -> None:
    peer = 1 - me()
    with _coalescing_manager(dist.group.WORLD, torch.device("cpu"), async_ops=True) as manager:
        dist.isend(noise(me(), 1000), peer)
        dist.irecv(x := torch.zeros(1000), peer)
    manager.wait()
    same(x, noise(peer, 1000))


@pytest.mark.not_gloo("coalesced messages")
def test_coalesced_messages(pair: Job) -> None:
    pair.run(messages_coalesced)


def strided() -> None:
    n, rank = size(), me()
    views = (lambda x: x.t(), lambda x: x[:, ::2], lambda x: x.view(2, 3, 4).permute(2, 0, 1), lambda x: x[1:, 1:3])
    for view in views:
        x = view(mine(6, 4))
        shape = tuple(x.shape)
        dist.all_reduce(x)
        same(x, view(total(6, 4)))
        base = mine(6, 4)
        dist.broadcast(view(base), 1)
        expected = mine(6, 4)
        view(expected).copy_(view(everybody(6, 4)[1]))
        same(base, expected)
        dist.all_gather(out := [view(torch.zeros(6, 4)) for _ in range(n)], view(mine(6, 4)))
        for found, whole in zip(out, everybody(6, 4), strict=True):
            same(found, view(whole))
        dist.all_gather_into_tensor(flat := torch.zeros(n * shape[0], *shape[1:]), view(mine(6, 4)).contiguous())
        same(flat, torch.cat([view(whole) for whole in everybody(6, 4)]))
    dist.reduce(x := mine(4, 4).t(), 0)
    if rank == 0:
        same(x, total(4, 4).t())
    dist.reduce_scatter(out := torch.zeros(3, 2).t(), [t.t() for t in mine(n * 3, 2).chunk(n)])
    same(out, total(n * 3, 2).chunk(n)[rank].t())
    if rank == 0:
        dist.send(mine(4, 6).t(), 1)
    elif rank == 1:
        dist.recv(x := torch.zeros(4, 12)[:, ::2].t(), 0)
        same(x, everybody(4, 6)[0].t())


@pytest.mark.not_gloo("strided tensors")
def test_strided_tensors(pair: Job) -> None:
    pair.run(strided)


def lazy_views() -> None:
    """Tensors with a lazy conjugate or negation bit, whose memory differs from their value."""
    negative = torch.tensor([1 + 2j, 3 - 4j]).conj().imag[:1]
    assert negative.is_neg() and negative.is_contiguous()
    dist.all_reduce(negative)
    same(negative, [-2.0 * size()])
    conjugate = torch.tensor([me() + 1 + 1j]).conj()  # `dist.broadcast` refuses it
    dist.group.WORLD.broadcast(conjugate, 0).wait()
    assert conjugate.is_conj()
    same(conjugate.resolve_conj(), [1 - 1j])


@pytest.mark.not_gloo("negations that are only noted")
def test_conjugates_and_negations(pair: Job) -> None:
    pair.run(lazy_views)


def empty() -> None:
    n = size()
    for shape in ((0,), (0, 3), (2, 0)):
        dist.all_reduce(torch.zeros(shape))
        dist.broadcast(torch.zeros(shape), 0)
        dist.all_gather([torch.zeros(shape) for _ in range(n)], torch.zeros(shape))
        dist.reduce(torch.zeros(shape), 0)
        dist.all_gather_into_tensor(torch.zeros(n * shape[0], *shape[1:]), torch.zeros(shape))
        dist.reduce_scatter_tensor(torch.zeros(shape), torch.zeros(n * shape[0], *shape[1:]))
        dist.all_to_all_single(torch.zeros(0, 3), torch.zeros(0, 3))
        dist.gather(torch.zeros(shape), [torch.zeros(shape) for _ in range(n)] if me() == 0 else None, 0)
        dist.scatter(torch.zeros(shape), [torch.zeros(shape) for _ in range(n)] if me() == 0 else None, 0)
        if me() == 0:
            dist.send(torch.zeros(shape), 1)
        elif me() == 1:
            dist.recv(torch.zeros(shape), 0)
    dist.all_reduce(x := mine(3))
    same(x, total(3))


@pytest.mark.not_gloo("some empty tensors")
def test_empty_tensors(pair: Job, four: Job) -> None:
    pair.run(empty)
    four.run(empty)


def large() -> None:
    count = (8 << 20) + 3
    x = torch.arange(count, dtype=torch.float32) % 1000 + me()
    dist.all_reduce(x)
    same(x, torch.arange(count, dtype=torch.float32) % 1000 * size() + sum(range(size())))
    x = torch.full((count,), float(me()))
    dist.broadcast(x, size() - 1)
    same(x, torch.full((count,), size() - 1.0))


def test_large_tensors(pair: Job) -> None:
    pair.run(large)


def many_at_once() -> None:
    tensors = [small("float32", (100 + i,), me() + i) for i in range(100)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    for work in reversed(works):
        work.wait()
    for i, x in enumerate(tensors):
        same(x, combined("SUM", [small("float32", (100 + i,), rank + i) for rank in range(size())]))


def test_many_collectives_at_once(pair: Job, four: Job) -> None:
    pair.run(many_at_once)
    four.run(many_at_once)


def mixed_at_once() -> None:
    n, rank = size(), me()
    a, b, c = mine(5), torch.zeros(2 * n), torch.zeros(2)
    d, e = mine(6), [torch.zeros(3) for _ in range(n)]
    works = [
        dist.all_reduce(a, async_op=True),
        dist.all_gather_into_tensor(b, mine(2), async_op=True),
        dist.reduce_scatter_tensor(c, mine(2 * n), async_op=True),
        dist.broadcast(d, 1, async_op=True),
        dist.all_gather(e, mine(3), async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in works:
        work.wait()
    same(a, total(5))
    same(b, torch.cat(everybody(2)))
    same(c, total(2 * n).chunk(n)[rank])
    same(d, everybody(6)[1])
    assert [raw(t) for t in e] == [raw(t) for t in everybody(3)]


def test_different_collectives_at_once(pair: Job) -> None:
    pair.run(mixed_at_once)


def kinds_of_tensors() -> None:
    parameter = torch.nn.Parameter(mine(4))
    dist.all_reduce(parameter.data)
    same(parameter.detach(), total(4))
    with torch.no_grad():
        dist.broadcast(parameter, 1)
    same(parameter.detach(), total(4))
    assert parameter.is_leaf and parameter.requires_grad
    with torch.inference_mode():
        dist.all_reduce(x := mine(4))
        same(x, total(4))


def test_parameters_and_inference(pair: Job) -> None:
    pair.run(kinds_of_tensors)


def reused_lists() -> None:
    """The caller changes its lists as soon as the call returns."""
    n, rank = size(), me()
    busy = [dist.all_reduce(torch.ones(1 << 18), async_op=True) for _ in range(4)]

    def changed(tensors: list[torch.Tensor], call: Callable[[list[torch.Tensor]], Any]) -> list[torch.Tensor]:
        kept = list(tensors)
        busy.append(call(tensors))
        tensors[:] = [torch.full((4,), 100.0) for _ in tensors]
        return kept

    group, x, y = dist.group.WORLD, torch.zeros(4), torch.zeros(4)
    changed([mine(4) for _ in range(n)], lambda parts: dist.reduce_scatter(x, parts, async_op=True))
    gathered = changed(
        [torch.zeros(4) for _ in range(n if rank == 0 else 0)],
        lambda outs: dist.gather(mine(4), outs if rank == 0 else None, 0, async_op=True),
    )
    changed(everybody(4) if rank == 1 else [], lambda parts: dist.scatter(y, parts or None, 1, async_op=True))
    everyone = changed([torch.zeros(4) for _ in range(n)], lambda outs: dist.all_gather(outs, mine(4), async_op=True))
    exchanged = [torch.zeros(4) for _ in range(n)]
    changed([mine(4) for _ in range(n)], lambda parts: group.alltoall(exchanged, parts))
    summed = changed([mine(4)], group.allreduce)
    for work in busy:
        work.wait()
    same(x, total(4))
    same(y, everybody(4)[rank])
    same(summed[0], total(4))
    for found in (gathered or everyone, everyone, exchanged):
        assert [raw(t) for t in found] == [raw(t) for t in everybody(4)]


@pytest.mark.not_gloo("its group's own methods return before they are called")
def test_lists_may_change_while_an_operation_is_under_way(pair: Job) -> None:
    pair.run(reused_lists)


def into_one_of_its_parts(count: int) -> None:
    """Every rank's result overwrites another rank's part of the input."""
    whole, n = mine(size() * count), size()
    dist.reduce_scatter(whole[:count], list(whole.chunk(n)))
    same(whole[:count], total(n * count).chunk(n)[me()])


def test_a_result_in_place_of_another_ranks_part(pair: Job, island: Job, four: Job) -> None:
    for ranks in (pair, island, four):
        ranks.run(into_one_of_its_parts, 3)
        ranks.run(into_one_of_its_parts, 50_000)


def bits() -> bytes:
    found = b""
    for dtype in (torch.float32, torch.bfloat16):
        dist.all_reduce(x := noise(me(), 3001, dtype=dtype))
        found += raw(x)
    return found


@pytest.mark.not_gloo("bits that depend on the rank")
def test_same_bits_on_every_rank_and_in_every_run(four: Job) -> None:
    assert len({*four.run(bits), *four.run(bits)}) == 1


def refuses() -> list[str]:
    texts = []
    for call in (
        lambda: dist.all_reduce([torch.zeros(1)]),
        lambda: dist.all_gather_into_tensor(torch.zeros(3), torch.zeros(2)),
        lambda: dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(2)),
        lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1, 2], [2, 2]),
        lambda: dist.all_gather([torch.zeros(2)], torch.zeros(2)),
        lambda: dist.all_reduce(torch.zeros(2, dtype=torch.complex64), dist.ReduceOp.MAX),
        lambda: dist.all_reduce(torch.zeros(2), dist.ReduceOp.BAND),
        lambda: dist.broadcast(torch.zeros(2), 7),
    ):
        try:
            call()
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
        else:
            texts.append("")
    dist.all_reduce(x := mine(3))
    same(x, total(3))
    return texts


@pytest.mark.not_gloo("all of these refusals")
def test_unsupported_calls_raise_and_the_group_stays_usable(pair: Job) -> None:
    for texts in pair.run(refuses):
        assert all(texts), texts
