"""Functional collectives, autograd collectives, and both under `torch.compile`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as differentiable
from torchchecks import close, combined, loss_of, me, mean_gradients, noise, perceptron, same, size, small
from torchjobs import BACKEND, Job


def everybody(*shape: int) -> list[torch.Tensor]:
    """All ranks' `small`."""
    return [small("float32", shape, rank) for rank in range(size())]


def eager() -> None:
    n, rank, group = size(), me(), dist.group.WORLD
    x = small("float32", (2 * n, 3), rank)
    for name in ("sum", "max", "min", "product", *(("avg",) if BACKEND != "gloo" else ())):
        same(funcol.all_reduce(x, name, group) + 0, combined(name.upper(), everybody(2 * n, 3)))
    same(x, small("float32", (2 * n, 3), rank))
    same(funcol.all_gather_tensor(x, 0, group) + 0, torch.cat(everybody(2 * n, 3)))
    same(funcol.all_gather_tensor(x, 1, group) + 0, torch.cat(everybody(2 * n, 3), 1))
    total = combined("SUM", everybody(2 * n, 3))
    same(funcol.reduce_scatter_tensor(x, "sum", 0, group) + 0, total.chunk(n)[rank])
    same(funcol.broadcast(x, n - 1, group) + 0, everybody(2 * n, 3)[n - 1])
    to_the_right = [(r + 1) % n for r in range(n)]
    same(funcol.permute_tensor(noise(rank, 5), to_the_right, group) + 0, noise((rank - 1) % n, 5))
    expected = torch.cat([part.chunk(n)[rank] for part in everybody(2 * n, 3)])
    same(funcol.all_to_all_single(x, None, None, group) + 0, expected)
    give, take = [1 + (r + rank) % 2 for r in range(n)], [1 + (r + rank) % 2 for r in range(n)]
    x = noise(rank, sum(give), 2)
    parts = [
        noise(r, sum(1 + (o + r) % 2 for o in range(n)), 2).split([1 + (o + r) % 2 for o in range(n)]) for r in range(n)
    ]
    same(funcol.all_to_all_single(x, take, give, group) + 0, torch.cat([part[rank] for part in parts]))


def test_eager(pair: Job, four: Job) -> None:
    pair.run(eager)
    four.run(eager)


def coalesced() -> None:
    n, rank, group = size(), me(), dist.group.WORLD
    a, b = small("float32", (2 * n,), rank), small("float32", (n, 3), rank)
    found = funcol.all_reduce_coalesced([a, b], "sum", group)
    for one, shape in zip(found, ((2 * n,), (n, 3)), strict=True):
        same(one + 0, combined("SUM", everybody(*shape)))
    found = funcol.all_gather_into_tensor_coalesced([a, b], group)
    for one, shape in zip(found, ((2 * n,), (n, 3)), strict=True):
        same(one + 0, torch.cat(everybody(*shape)))
    found = funcol.reduce_scatter_tensor_coalesced([a, b], "sum", [0, 0], group)
    for one, shape in zip(found, ((2 * n,), (n, 3)), strict=True):
        same(one + 0, combined("SUM", everybody(*shape)).chunk(n)[rank])


@pytest.mark.not_gloo("coalesced functional collectives in full")
def test_coalesced(pair: Job) -> None:
    pair.run(coalesced)


def asynchronous() -> None:
    found = funcol.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    assert isinstance(found, funcol.AsyncCollectiveTensor)
    same(funcol.wait_tensor(found), torch.full((4,), float(size())))
    many = [funcol.all_reduce(torch.full((10,), float(i)), "sum", dist.group.WORLD) for i in range(50)]
    for i, one in enumerate(many):
        same(one + 0, torch.full((10,), float(i * size())))
    assert funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD).trigger_wait().tolist() == [float(size())] * 2


def passed_on() -> None:
    """Results of tensor-parallel layers are passed to other collectives and messages unchanged."""

    def promised() -> torch.Tensor:
        return funcol.all_reduce(torch.ones(4), "sum", dist.group.WORLD)

    n, rank = size(), me()
    dist.all_gather(found := [torch.zeros(4) for _ in range(n)], promised())
    same(torch.cat(found), torch.full((4 * n,), float(n)))
    dist.all_reduce(x := promised())
    same(x + 0, torch.full((4,), float(n * n)))
    after, before = (rank + 1) % n, (rank - 1) % n
    sent = dist.P2POp(dist.isend, promised(), after)
    for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, y := torch.zeros(4), before)]):
        work.wait()
    same(y, torch.full((4,), float(n)))


def test_asynchronous_tensors(pair: Job) -> None:
    pair.run(asynchronous)
    pair.run(passed_on)


def named_groups() -> None:
    group = dist.new_group([1, 2])
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    if me() in (1, 2):
        same(funcol.all_reduce(torch.ones(2), "sum", group) + 0, [2.0, 2.0])
        same(funcol.all_reduce(torch.ones(2), "sum", [1, 2]) + 0, [2.0, 2.0])
        dist.destroy_process_group(group)
    same(funcol.all_reduce(torch.tensor([float(me())]), "sum", (mesh, 1)) + 0, [1.0 if me() < 2 else 5.0])
    same(funcol.all_gather_tensor(torch.tensor([float(me())]), 0, mesh["a"]) + 0, [float(me() % 2), me() % 2 + 2.0])


def test_named_groups_and_meshes(four: Job) -> None:
    four.run(named_groups)


def out_variants() -> None:
    name, n = dist.group.WORLD.group_name, size()
    operations = torch.ops._c10d_functional
    out = torch.zeros(2 * n)
    operations.wait_tensor(operations.all_gather_into_tensor_out(noise(me(), 2), n, name, out=out))
    same(out, torch.cat([noise(rank, 2) for rank in range(n)]))
    x = torch.ones(3)
    operations.wait_tensor(operations.all_reduce_(x, "sum", name))
    same(x, torch.full((3,), float(n)))
    operations.wait_tensor(operations.broadcast_(x := noise(me(), 3), 1, name))
    same(x, noise(1, 3))
    a, b = torch.ones(2), torch.ones(4)
    for one in operations.all_reduce_coalesced_([a, b], "sum", name):
        operations.wait_tensor(one)
    same(b, torch.full((4,), float(n)))


def test_operators_that_write_into_their_arguments(pair: Job) -> None:
    pair.run(out_variants)


def with_gradients() -> None:
    n, rank, group = size(), me(), dist.group.WORLD
    x = noise(rank, 2 * n, 3).requires_grad_()
    weights = noise(7, 2 * n * n, 3)
    (funcol.all_gather_tensor_autograd(x, 0, group) * weights).sum().backward()
    close(x.grad, n * weights.chunk(n)[rank])
    x.grad = None
    funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group).mul(rank + 1.0).sum().backward()
    same(x.grad, torch.repeat_interleave(torch.arange(1.0, n + 1), 2)[:, None].expand(2 * n, 3))
    x.grad = None
    funcol.all_to_all_single_autograd(x, [2] * n, [2] * n, group).mul(rank + 1.0).sum().backward()
    same(x.grad, torch.repeat_interleave(torch.arange(1.0, n + 1), 2)[:, None].expand(2 * n, 3))


def test_gradients(pair: Job) -> None:
    pair.run(with_gradients)


def differentiated() -> None:
    n, rank = size(), me()
    x = noise(rank, 4).requires_grad_()
    (differentiable.all_reduce(x * 2) * (rank + 1)).sum().backward()
    same(x.grad, torch.full((4,), 2.0 * sum(range(1, n + 1))))
    x.grad = None
    sum((part * (rank + 1)).sum() for part in differentiable.all_gather(x)).backward()
    same(x.grad, torch.full((4,), float(sum(range(1, n + 1)))))
    x.grad = None
    differentiable.broadcast(x * 3, 0).mul(rank + 1).sum().backward()
    same(x.grad, torch.full((4,), 3.0 * sum(range(1, n + 1))) if rank == 0 else torch.zeros(4))
    x.grad = None
    differentiable.reduce_scatter(
        torch.zeros(2), list(torch.cat([x] * n).chunk(2 * n)[:n]), dist.ReduceOp.SUM
    ).sum().backward()
    assert x.grad is not None
    out = differentiable.all_to_all_single(torch.zeros(4), x, [4 // n] * n, [4 // n] * n)
    same(out, torch.cat([noise(r, 4).chunk(n)[rank] for r in range(n)]))


def test_collectives_that_autograd_knows(pair: Job) -> None:
    pair.run(differentiated)


def compiled(function: Callable[..., Any], backend: str) -> Any:
    """The function compiled as a full graph."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


def chain(x: torch.Tensor) -> torch.Tensor:
    """Three collectives one after the other."""
    group = dist.group.WORLD
    y = funcol.all_gather_tensor(funcol.all_reduce(x * 2, "sum", group) + 1, 0, group)
    return funcol.reduce_scatter_tensor(y, "sum", 0, group)


def plain(x: torch.Tensor) -> torch.Tensor:
    """The c10d calls that torch's compiler rewrites."""
    y = x * 2
    dist.all_reduce(y)
    out = torch.empty(dist.get_world_size() * x.shape[0], device=x.device)
    dist.all_gather_into_tensor(out, y)
    return out + 1


def runs_compiled(backend: str, place: str = "cpu") -> None:
    n, x = size(), noise(0, 3).round()
    for _ in range(2):
        same(compiled(chain, backend)(x.to(place)), (x * 2 * n + 1) * n)
        same(compiled(plain, backend)(x.to(place)), (x * 2 * n).repeat(n) + 1)


def parallel_compiled(backend: str, place: str = "cpu") -> None:
    torch._dynamo.reset()
    model = torch.nn.parallel.DistributedDataParallel(perceptron().to(place))
    fast = torch.compile(model, backend=backend)
    for _ in range(2):
        model.zero_grad()
        loss_of(fast, me()).backward()
        for parameter, expected in zip(model.parameters(), mean_gradients(), strict=True):
            close(parameter.grad, expected, 1e-5)


def sharded_compiled(backend: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch._dynamo.reset()
    model = perceptron()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (size(),)))
    model.compile(backend=backend)
    loss_of(model, me()).backward()
    for parameter, expected in zip(model.parameters(), mean_gradients(), strict=True):
        close(parameter.grad.full_tensor(), expected, 1e-5)


@pytest.mark.parametrize("function", [runs_compiled, parallel_compiled, sharded_compiled])
def test_compiled_ahead_of_time(pair: Job, function: Callable[[str], None]) -> None:
    pair.run(function, "aot_eager")


def runs_compiled_by_inductor() -> None:
    from torch._inductor import config

    # Headers compiled in advance would take longer than they save on so few programs.
    with config.patch(compile_threads=1, cpp_cache_precompile_headers=False):
        runs_compiled("inductor")


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_by_inductor(start: Callable[..., Job], tmp_path: object) -> None:
    job = start("cuda:1,rocm:1", env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
    job.run(runs_compiled_by_inductor, timeout=280)
