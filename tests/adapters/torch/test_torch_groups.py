"""Groups: of any ranks in any order, created by all ranks or by members only, several at once; meshes; destruction."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchchecks import combined, me, noise, same, size, small
from torchjobs import BACKEND, Job

from xvcomm.adapters.torch import communicator
from xvcomm.errors import ArgumentError


def summed(group: dist.ProcessGroup, expected: list[int], place: str = "cpu") -> None:
    """Check that an all-reduce in a group sums these global ranks."""
    dist.all_reduce(x := torch.tensor([float(me()), 1.0], device=place), group=group)
    same(x, [float(sum(expected)), float(len(expected))])


def some_ranks() -> None:
    group = dist.new_group([1, 3])
    if me() in (1, 3):
        summed(group, [1, 3])
        assert dist.get_rank(group) == (me() == 3) and dist.get_world_size(group) == 2
        assert dist.get_process_group_ranks(group) == [1, 3]
        assert dist.get_global_rank(group, 1) == 3 and dist.get_group_rank(group, 3) == 1
        dist.broadcast(x := torch.tensor([float(me())]), 3, group=group)
        same(x, [3.0])
        dist.destroy_process_group(group)
    else:
        assert group == dist.GroupMember.NON_GROUP_MEMBER
    summed(dist.group.WORLD, [0, 1, 2, 3])


def test_a_group_of_some_ranks(four: Job) -> None:
    four.run(some_ranks)


def in_every_shape() -> None:
    for ranks in ([0], [0, 1], [2, 3], [0, 2], [0, 1, 2], [1, 2, 3], [0, 1, 2, 3], [3, 0]):
        group = dist.new_group(ranks)
        if me() in ranks:
            summed(group, ranks)
            n = len(ranks)
            dist.all_gather_into_tensor(out := torch.zeros(2 * n), noise(me(), 2), group=group)
            same(out, torch.cat([noise(rank, 2) for rank in sorted(ranks)]))
            dist.reduce_scatter_tensor(part := torch.zeros(3), small("float32", (3 * n,), me()), group=group)
            whole = combined("SUM", [small("float32", (3 * n,), rank) for rank in ranks])
            same(part, whole.chunk(n)[dist.get_rank(group)])
            dist.destroy_process_group(group)
    dist.barrier()


def test_groups_in_one_and_several_islands(four: Job) -> None:
    four.run(in_every_shape)


def by_subgroups() -> None:
    mine, groups = dist.new_subgroups(2)
    assert len(groups) == 2
    summed(mine, [0, 1] if me() < 2 else [2, 3])
    mine, groups = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    summed(mine, [0, 3] if me() in (0, 3) else [1, 2])
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def test_subgroups(four: Job) -> None:
    four.run(by_subgroups)


def members_only() -> None:
    half = [0, 1] if me() < 2 else [2, 3]
    across = [me() % 2 + 2, me() % 2]
    for ranks in (half, across, half, [me()]):
        summed(dist.new_group(ranks, use_local_synchronization=True, group_desc="by members"), ranks)
    if me() == 3:
        assert dist.get_world_size(dist.new_group([3], use_local_synchronization=True)) == 1


def test_groups_that_only_their_members_make(start: Callable[..., Job]) -> None:
    start("cuda:2,rocm:2").run(members_only)


def meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    summed(mesh["tp"].get_group(), [0, 1] if me() < 2 else [2, 3])
    summed(mesh["dp"].get_group(), [me() % 2, me() % 2 + 2])
    summed(mesh["dp", "tp"]._flatten("all").get_group(), [0, 1, 2, 3])
    assert list(mesh.get_coordinate()) == [me() // 2, me() % 2]
    assert mesh.get_local_rank("dp") == me() // 2
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    summed(cube.get_group("dp"), [me()])
    assert copy.deepcopy(mesh).mesh.tolist() == [[0, 1], [2, 3]]


def test_device_mesh(four: Job) -> None:
    four.run(meshes)


def splits() -> None:
    """Across islands and along them, all at once, without a name, and reordered; a split has its own attributes."""
    world = dist.group.WORLD
    before = world.comm_split_count()
    for number, halves in enumerate(([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 0]], [[2]])):
        mine = next((half for half in halves if me() in half), None)
        part = world.split_group(mine or halves[0], timedelta(seconds=20))
        assert world.comm_split_count() == before + number + 1, "also on those that are no members"
        if mine is None:
            assert part is None
            world.perform_nocolor_split(torch.device("cpu"))
            continue
        assert (part.rank(), part.size()) == (mine.index(me()), len(mine)) and part.name() == BACKEND
        assert part.options._timeout == timedelta(seconds=20) and part.comm_split_count() == 0
        assert part.group_desc == f"{world.group_desc}:split:{before + number + 1}"
        part.allreduce(x := torch.tensor([float(me()), 1.0])).wait()
        same(x, [float(sum(mine)), float(len(mine))])
        part.all_gather_single(out := torch.zeros(len(mine)), torch.tensor([float(me())])).wait()
        same(out, [float(rank) for rank in mine])
        part.broadcast(x := torch.tensor([float(me())]), len(mine) - 1).wait()
        same(x, [float(mine[-1])])
        again = part.split_group(list(range(len(mine)))[::-1], group_name=f"again-{number}", group_desc="reversed")
        assert again.group_name == f"again-{number}" and again.group_desc == "reversed"
        assert again.options._timeout == timedelta(seconds=20), "the parent's"
        again.all_gather_single(out, torch.tensor([float(me())])).wait()
        same(out, [float(rank) for rank in mine[::-1]])
        again.shutdown()
        part.shutdown()
    dist.barrier()


@pytest.mark.not_gloo("the method")
def test_splits_of_a_group(four: Job) -> None:
    four.run(splits)


def splits_by_torch(*splits: list[list[int]], place: str = "cpu") -> None:
    """Groups by `dist.split_group`, and splits of those."""
    for halves in splits:
        mine = next((half for half in halves if me() in half), None)
        part = dist.split_group(split_ranks=halves, group_desc="described")
        assert (part is None) == (mine is None)
        if part is not None:
            summed(part, mine, place)
            assert part.group_desc == "described" and dist.get_process_group_ranks(part) == mine
            if len(mine) > 1:
                inner = dist.split_group(part, [[0], list(range(1, len(mine)))])
                summed(inner, mine[:1] if me() == mine[0] else mine[1:], place)
                dist.destroy_process_group(inner)
            dist.destroy_process_group(part)
    dist.barrier()


def splits_without_a_gpu() -> None:
    """`dist.split_group` requires an accelerator and a job that is bound to a device; nothing else here does."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.accelerator, "is_available", lambda: True)
        patched.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
        patched.setattr(type(dist.group.WORLD), "bound_device_id", torch.device("cpu"), raising=False)
        splits_by_torch([[0, 2], [1, 3]], [[0, 1], [2, 3]], [[1, 2, 3]])


@pytest.mark.not_gloo("splitting")
def test_split_group(start: Callable[..., Job]) -> None:
    start("cuda:2,rocm:2").run(splits_without_a_gpu)


def several_in_threads() -> None:
    groups = [dist.new_group() for _ in range(4)]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for step in range(30):
                x = torch.full((1000 + index,), float(me() + step * index))
                dist.all_reduce(x, group=groups[index])
                same(x, torch.full((1000 + index,), float(sum(range(size())) + step * index * size())))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors and not any(thread.is_alive() for thread in threads), errors
    for group in groups:
        dist.destroy_process_group(group)


def test_groups_in_several_threads(pair: Job, four: Job) -> None:
    pair.run(several_in_threads)
    four.run(several_in_threads)


def in_unlike_orders() -> None:
    first, second = dist.new_group(), dist.new_group()
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    pairs = [(first, a), (second, b)]
    works = [dist.all_reduce(x, group=group, async_op=True) for group, x in (pairs if me() == 0 else pairs[::-1])]
    for work in works:
        work.wait()
    same(a, [2.0])
    same(b, [4.0])
    dist.destroy_process_group(first)
    dist.destroy_process_group(second)


def test_asynchronous_operations_of_two_groups_in_different_orders(pair: Job) -> None:
    pair.run(in_unlike_orders)


def passed_to_threads() -> None:
    group = dist.new_group()
    found: list[float] = []

    def work() -> None:
        dist.all_reduce(x := torch.ones(1), group=dist.distributed_c10d._resolve_process_group(group.group_name))
        found.append(x.item())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert found == [float(size())]
    with pytest.raises(TypeError):
        pickle.dumps(group)
    boxed = dist.ProcessGroup.unbox(group.boxed())
    dist.all_reduce(x := torch.ones(1), group=boxed)
    same(x, [float(size())])
    dist.destroy_process_group(group)


def test_groups_pass_to_threads_by_name_and_are_not_pickled(pair: Job) -> None:
    pair.run(passed_to_threads)


def facts() -> None:
    group = dist.group.WORLD
    assert dist.get_backend() == BACKEND
    assert group.rank() == me() == dist.get_rank() and group.size() == size() == 2
    assert group.name() == BACKEND
    assert group.group_name == group.group_name and isinstance(group.group_name, str)
    assert torch.device("cpu") in group._device_types
    assert dist.is_initialized() and not dist.is_nccl_available()
    named = dist.new_group(group_desc="described")
    assert named.group_desc == "described" and named.group_name != group.group_name
    before = named._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1), group=named)
    assert named._get_sequence_number_for_group() == before + 1
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=25), named)
    dist.all_reduce(torch.ones(1), group=named)
    dist.destroy_process_group(named)


def test_attributes_of_a_group(pair: Job) -> None:
    pair.run(facts)


def monitored() -> None:
    for group in (dist.group.WORLD, dist.new_group()):
        group.monitored_barrier(timedelta(seconds=10))
        group.monitored_barrier(timedelta(seconds=10), wait_all_ranks=True)


def test_monitored_barrier(four: Job) -> None:
    four.run(monitored)


def one_after_the_other(count: int) -> None:
    for _ in range(count):
        group = dist.new_group()
        summed(group, list(range(size())))
        dist.destroy_process_group(group)


def test_many_groups_one_after_the_other(pair: Job) -> None:
    pair.run(one_after_the_other, 30)


def destroyed_under_way(whole: bool) -> None:
    group, n = None if whole else dist.new_group(), size()
    xs = [torch.ones(1 << 18) for _ in range(8)]
    works = [dist.all_reduce(x, group=group, async_op=True) for x in xs]
    dist.destroy_process_group(group)
    for work in works:
        work.wait()
    assert all((x == n).all() for x in xs)


def test_destroying_a_group_waits_for_its_operations(start: Callable[..., Job], pair: Job) -> None:
    pair.run(destroyed_under_way, False)
    start("cuda:1,rocm:1").run(destroyed_under_way, True)


def joined_again(backend: str) -> None:
    summed(dist.group.WORLD, list(range(size())))
    for attempt in range(1, 4):
        dist.destroy_process_group()
        assert not dist.is_initialized()
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        dist.init_process_group(backend, timeout=timedelta(seconds=20))
        summed(dist.group.WORLD, list(range(size())))
        summed(dist.new_group([0, 1]), [0, 1]) if me() < 2 else dist.new_group([0, 1])


@pytest.mark.not_gloo("ranks that destroy a group while others still finish")
def test_destroy_and_join_again(start: Callable[..., Job]) -> None:
    start("cuda:1,rocm:2").run(joined_again, BACKEND)


def beside_gloo() -> None:
    group = dist.new_group([0, 1], backend="gloo")
    summed(group, [0, 1])
    summed(dist.group.WORLD, [0, 1])
    assert dist.get_backend(group) == "gloo"


def test_a_gloo_group_in_the_same_job(start: Callable[..., Job]) -> None:
    start("cuda:1,rocm:1").run(beside_gloo)


def devices_named(expected: str) -> None:
    assert dist.get_backend_config().startswith(expected)
    summed(dist.group.WORLD, [0, 1])
    summed(dist.new_group(), [0, 1])
    dist.all_gather_object(found := [None, None], me())
    assert found == [0, 1]


@pytest.mark.parametrize(
    ("backend", "expected"),
    [(f"cpu:{BACKEND}", f"cpu:{BACKEND}"), (f"cpu:gloo,cuda:{BACKEND}", f"cpu:gloo,cuda:{BACKEND}")],
)
def test_one_backend_per_device(start: Callable[..., Job], backend: str, expected: str) -> None:
    start("cuda:1,rocm:1", backend).run(devices_named, expected)


def inside_gloo(backend: str) -> None:
    summed(dist.group.WORLD, [0, 1])
    summed(dist.new_group(backend=backend), [0, 1])


def test_a_group_in_a_job_of_gloo(start: Callable[..., Job]) -> None:
    start("cuda:1,rocm:1", "gloo").run(inside_gloo, BACKEND)


def by_hand(backend: str, store: str) -> None:
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=dist.FileStore(store, count), rank=rank, world_size=count)
    summed(dist.group.WORLD, list(range(count)))
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"file://{store}-2", rank=rank, world_size=count)
    summed(dist.group.WORLD, list(range(count)))


def test_file_stores(start: Callable[..., Job], tmp_path: object) -> None:
    start("cuda:1,rocm:1", None).run(by_hand, BACKEND, f"{tmp_path}/store")


def alone(backend: str) -> None:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(x := torch.ones(3))
    same(x, torch.ones(3))
    dist.all_gather_into_tensor(y := torch.zeros(3), x)
    same(y, x)
    dist.reduce_scatter_tensor(y, x, dist.ReduceOp.AVG if backend != "gloo" else dist.ReduceOp.SUM)
    same(y, x)
    dist.broadcast(y, 0)
    dist.barrier()


def test_a_job_of_one_rank(start: Callable[..., Job]) -> None:
    start("cuda:1", None).run(alone, BACKEND)


def mismatched_lists() -> None:
    with pytest.raises((RuntimeError, ValueError)):
        dist.new_group([0, 0])
    with pytest.raises((RuntimeError, ValueError)):
        dist.new_group([0, 9])


def test_invalid_groups_are_rejected(start: Callable[..., Job]) -> None:
    start("cuda:1,rocm:1").run(mismatched_lists)


def communicators() -> tuple[list[int], str, list[tuple[str, bool]]]:
    part = dist.new_group([1, 0])
    gloo = dist.new_group(backend="gloo")
    other = dist.new_group([1 - me()])
    dist.all_reduce(torch.ones(7))
    newest = communicator().history()[-1].describe()
    found = [communicator(), communicator(part), communicator(device="cpu"), communicator(dist.group.WORLD)]
    assert found[0] is found[2] is found[3] is not found[1]
    refused = []
    for call in (
        lambda: communicator(gloo),
        lambda: communicator(other),
        lambda: communicator(object()),  # type: ignore[arg-type]
        lambda: communicator(device="cuda"),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        refused.append((str(caught.value), isinstance(caught.value, RuntimeError)))
    return [comm.size for comm in found], newest, refused


@pytest.mark.not_gloo("the communicator")
def test_the_communicator_of_a_group(pair: Job) -> None:
    for sizes, newest, refused in pair.run(communicators):
        assert sizes == [2, 2, 2, 2] and "7 x float32" in newest, newest
        for (text, caught), words in zip(refused, ("gloo", "not a member", "object", "cuda"), strict=True):
            assert words in text and caught, text


def test_the_communicator_without_a_group() -> None:
    with pytest.raises(ArgumentError, match="init_process_group"):
        communicator()
