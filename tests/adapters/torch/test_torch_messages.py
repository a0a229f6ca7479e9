"""Messages: any tag order, any source, both directions at once, every size and dtype, and objects."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torchchecks import DTYPES, me, noise, same, size, small
from torchjobs import BACKEND, Job

from xvcomm.errors import ArgumentError, ArrayError, ClosedError, DeadlineExceeded


def all_dtypes(dtypes: tuple[str, ...]) -> None:
    for dtype in dtypes:
        x = small(dtype, (3, 5), me())
        if me() == 0:
            dist.send(x, 1)
            dist.recv(x, 1)
            same(x, small(dtype, (3, 5), 1))
        else:
            dist.recv(y := torch.zeros(3, 5, dtype=x.dtype), 0)
            same(y, small(dtype, (3, 5), 0))
            dist.send(x, 0)


def test_every_dtype(pair: Job) -> None:
    pair.run(all_dtypes, DTYPES if BACKEND != "gloo" else ("float32", "int64"))


def tags_out_of_order() -> None:
    tags = [3 * i + 100 for i in range(30)]
    if me() == 0:
        works = [dist.isend(torch.full((3,), float(tag)), 1, tag=tag) for tag in tags]
        for work in works:
            work.wait()
    else:
        order = tags.copy()
        random.Random(1).shuffle(order)
        for tag in order:
            dist.recv(x := torch.zeros(3), 0, tag=tag)
            same(x, torch.full((3,), float(tag)))


def test_tags_match_in_any_order(pair: Job) -> None:
    pair.run(tags_out_of_order)


def many_tags() -> None:
    """More tags than there are channels between two ranks: those that share a channel match in order."""
    for first in range(0, 200, 10):
        if me() == 0:
            works = [dist.isend(torch.full((3,), float(tag)), 1, tag=tag) for tag in range(first, first + 10)]
            for work in works:
                work.wait()
        else:
            for tag in reversed(range(first, first + 10)):
                dist.recv(x := torch.zeros(3), 0, tag=tag)
                same(x, torch.full((3,), float(tag)))


def test_many_tags(pair: Job) -> None:
    pair.run(many_tags)


def same_tag_in_order() -> None:
    for i in range(50):
        if me() == 0:
            dist.isend(torch.tensor([float(i)]), 1, tag=i % 2).wait()
        else:
            dist.recv(x := torch.zeros(1), 0, tag=i % 2)
            same(x, [float(i)])


def test_messages_of_one_tag_keep_their_order(pair: Job) -> None:
    pair.run(same_tag_in_order)


def posted_before_they_are_sent() -> None:
    other = 1 - me()
    into = {tag: torch.zeros(10) for tag in (5, 3, 1000000)}
    works = [dist.irecv(x, other, tag=tag) for tag, x in into.items()]
    for tag in (3, 1000000, 5):
        dist.send(torch.full((10,), float(tag + me())), other, tag=tag)
    for work in works:
        work.wait()
    for tag, x in into.items():
        same(x, torch.full((10,), float(tag + other)))


def test_receives_posted_first(pair: Job) -> None:
    pair.run(posted_before_they_are_sent)


def from_anybody(place: str = "cpu") -> list[int]:
    found = []
    if me() == 0:
        for _ in range(2 * (size() - 1)):
            source = dist.recv(x := torch.zeros(5, device=place))
            same(x, torch.full((5,), float(source)))
            found.append(source)
    else:
        for _ in range(2):
            dist.send(torch.full((5,), float(me()), device=place), 0)
    return found


def test_receive_from_any_source(pair: Job, four: Job) -> None:
    assert pair.run(from_anybody)[0] == [1, 1]
    assert sorted(four.run(from_anybody)[0]) == [1, 1, 2, 2, 3, 3]


def from_anybody_by_tag() -> None:
    if me() == 0:
        for tag in (9, 8):
            got = {dist.recv(x := torch.zeros(1), tag=tag): x.item() for _ in range(size() - 1)}
            assert got == {rank: float(10 * tag + rank) for rank in range(1, size())}
        work = dist.irecv(x := torch.zeros(1), tag=1)
        dist.barrier()
        work.wait()
        same(x, [77.0])
        assert work._source_rank() == size() - 1
    else:
        works = [dist.isend(torch.tensor([float(10 * tag + me())]), 0, tag=tag) for tag in (8, 9)]
        for work in works:
            work.wait()
        dist.barrier()
        if me() == size() - 1:
            dist.send(torch.tensor([77.0]), 0, tag=1)


def from_anybody_with_a_later_tag_first() -> None:
    x, y = torch.zeros(1), torch.zeros(1)
    if me() == 0:
        first, second = dist.irecv(x, tag=1), dist.irecv(y, tag=2)
        second.wait()
        dist.send(y, second._source_rank())
        first.wait()
        assert x.item() == 1 and y.item() == 2
    elif me() == 1:
        dist.send(torch.tensor([2.0]), 0, tag=2)
        dist.recv(x, 0)
        dist.send(torch.tensor([1.0]), 0, tag=1)


def test_any_source_and_tags(pair: Job, four: Job) -> None:
    four.run(from_anybody_by_tag)
    pair.run(from_anybody_with_a_later_tag_first)


def batch(count: int, order: str) -> None:
    other = 1 - me()
    x, y = noise(me(), count), torch.zeros(count)
    operations = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]
    backwards = {"send first": False, "receive first": True, "unlike": me() == 1}[order]
    for work in dist.batch_isend_irecv(operations[::-1] if backwards else operations):
        work.wait()
    same(y, noise(other, count))


@pytest.mark.parametrize("order", ["send first", "receive first", "unlike"])
@pytest.mark.parametrize("count", [1, 4 << 20])
def test_batch(pair: Job, count: int, order: str) -> None:
    pair.run(batch, count, order)


def batch_in_a_ring() -> None:
    right, left = (me() + 1) % size(), (me() - 1) % size()
    out = [torch.zeros(1000) for _ in range(4)]
    operations = [dist.P2POp(dist.isend, noise(10 * me() + i, 1000), right) for i in range(4)]
    operations += [dist.P2POp(dist.irecv, out[i], left) for i in range(4)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for i, x in enumerate(out):
        same(x, noise(10 * left + i, 1000))


def test_batch_in_a_ring(four: Job) -> None:
    four.run(batch_in_a_ring)


def large_both_ways() -> None:
    other, count = 1 - me(), 4 << 20
    sent = dist.isend(noise(me(), count), other)
    got = dist.irecv(y := torch.zeros(count), other)
    got.wait()
    sent.wait()
    same(y, noise(other, count))


def test_large_messages_in_both_directions(pair: Job) -> None:
    pair.run(large_both_ways)


def small_ones_pass_a_large_one() -> None:
    if me() == 0:
        large = dist.isend(noise(1, 4 << 20), 1, tag=1)
        dist.send(torch.tensor([3.0]), 1, tag=2)
        dist.recv(x := torch.zeros(1), 1, tag=3)
        same(x, [4.0])
        large.wait()
    else:
        dist.recv(x := torch.zeros(1), 0, tag=2)
        same(x, [3.0])
        dist.send(torch.tensor([4.0]), 0, tag=3)
        dist.recv(y := torch.zeros(4 << 20), 0, tag=1)
        same(y, noise(1, 4 << 20))


def test_a_large_unmatched_message_does_not_block_others(pair: Job) -> None:
    pair.run(small_ones_pass_a_large_one)


def beside_collectives() -> None:
    other = 1 - me()
    got = dist.irecv(y := torch.zeros(100), other, tag=4)
    dist.all_reduce(x := torch.ones(10))
    sent = dist.isend(noise(me(), 100), other, tag=4)
    dist.all_reduce(x)
    got.wait()
    sent.wait()
    same(x, torch.full((10,), 4.0))
    same(y, noise(other, 100))


def test_messages_beside_collectives(pair: Job) -> None:
    pair.run(beside_collectives)


def in_a_subgroup() -> None:
    group = dist.new_group([1, 3])
    if me() == 1:
        dist.send(noise(1, 9), 3, group=group)
        dist.send(noise(2, 9), group=group, group_dst=1, tag=5)
    elif me() == 3:
        dist.recv(x := torch.zeros(9), 1, group=group)
        same(x, noise(1, 9))
        assert dist.recv(x, group=group, tag=5) == 1
        same(x, noise(2, 9))
    if me() in (1, 3):
        dist.destroy_process_group(group)


def test_messages_in_a_subgroup(four: Job) -> None:
    four.run(in_a_subgroup)


def objects() -> None:
    n, rank = size(), me()
    dist.all_gather_object(found := [None] * n, {"rank": rank, "x": torch.full((rank + 1,), float(rank))})
    assert [f["rank"] for f in found] == list(range(n)) and len(found[n - 1]["x"]) == n
    dist.broadcast_object_list(found := [("x", rank), rank], 1)
    assert found == [("x", 1), 1]
    dist.scatter_object_list(found := [None], [f"for {r}" for r in range(n)] if rank == 0 else None, 0)
    assert found == [f"for {rank}"]
    dist.gather_object(rank * 2, found := [None] * n if rank == 0 else None, 0)
    assert found is None or found == [2 * r for r in range(n)]
    if rank == 0:
        dist.send_object_list([1, "q", None], 1)
    elif rank == 1:
        dist.recv_object_list(found := [None] * 3, 0)
        assert found == [1, "q", None]


def test_objects(pair: Job, four: Job) -> None:
    pair.run(objects)
    four.run(objects)


def bad_messages() -> None:
    with pytest.raises(ValueError):
        dist.send(torch.zeros(1), me())
    dist.barrier()


def test_torch_refuses_a_blocking_send_to_oneself(pair: Job) -> None:
    pair.run(bad_messages)


def to_oneself_in_a_batch(place: str = "cpu") -> None:
    """Each rank sends to itself and to the next in one batch; messages of one tag match in order."""
    rank, after, before = me(), (me() + 1) % size(), (me() - 1) % size()
    sent = [torch.full((n + 1, 3), 10.0 * rank + n, device=place) for n in range(4)]
    got = [torch.zeros(n + 1, 3, device=place) for n in range(4)]
    crossed = torch.zeros(4, 3, device=place)
    ops = [dist.P2POp(dist.irecv, got[0], rank)]
    ops += [dist.P2POp(dist.isend, x, rank) for x in sent[:2]]
    ops += [dist.P2POp(dist.isend, sent[2], rank, tag=33), dist.P2POp(dist.isend, sent[3], rank, tag=1)]
    ops += [dist.P2POp(dist.irecv, got[3], rank, tag=1), dist.P2POp(dist.irecv, got[2], rank, tag=33)]
    ops += [dist.P2POp(dist.irecv, got[1], rank)]
    if size() > 1:
        ops += [dist.P2POp(dist.isend, sent[3], after), dist.P2POp(dist.irecv, crossed, before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for x, y in zip(sent, got, strict=True):
        same(y, x.clone())
    if size() > 1:
        same(crossed, torch.full((4, 3), 10.0 * before + 3))


def to_oneself_one_by_one() -> None:
    """An asynchronous send and a receive of either kind, in either order, and tensors with gaps."""
    x = torch.arange(12.0).reshape(3, 4).t() + me()
    work = dist.isend(x, me(), tag=7)
    assert not work.is_completed()
    source = dist.recv(y := torch.zeros(4, 3), me(), tag=7)
    assert source == me()
    work.wait()
    assert work.is_completed()
    same(y, x)
    future = (work := dist.irecv(z := torch.zeros(3, 4).t(), me())).get_future()
    dist.isend(x, me()).wait()
    same(z, x)
    assert future.wait()[0] is z and work.wait() and work.source_rank() == me()


def to_oneself_wrongly() -> None:
    with pytest.raises(ArgumentError, match=r"before its isend with tag 5: .* call isend first"):
        dist.recv(torch.zeros(2), me(), tag=5)
    lonely = dist.isend(torch.ones(2), me(), tag=6)
    with pytest.raises(DeadlineExceeded, match="has not called irecv with tag 6"):
        lonely.wait(timedelta(milliseconds=20))
    with pytest.raises(ArrayError, match=r"sends 2 x torch.float32 to itself and receives 2 x torch.float64"):
        dist.irecv(torch.zeros(2, dtype=torch.float64), me(), tag=6)
    with pytest.raises(ArrayError, match="to itself"):
        lonely.wait()
    to_oneself_in_a_batch()  # the group goes on


def to_oneself_and_closed() -> None:
    group = dist.new_group()
    work = dist.isend(torch.ones(2), me(), group=group)
    dist.destroy_process_group(group)
    with pytest.raises(ClosedError, match="closed before its other end"):
        work.wait()


@pytest.mark.not_gloo("it refuses messages to oneself")
def test_messages_to_oneself(pair: Job, start: Callable[..., Job]) -> None:
    alone = start("host:1")
    for job in (pair, alone):
        job.run(to_oneself_in_a_batch)
        job.run(to_oneself_one_by_one)
        job.run(to_oneself_wrongly)
        job.run(to_oneself_and_closed)
