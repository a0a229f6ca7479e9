"""PyTorch's backend on GPUs: alone, with ranks on host memory, and on NVIDIA's with ranks whose ROCm forwards to CUDA."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

sys.path.insert(
    0, str(Path(__file__).parents[1] / "adapters" / "torch")
)  # for the two modules there, here and on the ranks

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as Parallel
from torchchecks import loss_of, me, mean_gradients, perceptron, size
from torchjobs import Job, launch

from xvcomm.testing.cases import SMALL_GPU_RINGS

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_finetune.py"
JOBS = {
    "one island": ("cuda:2", "a:2"),
    "1 and 1": ("cuda:2", "a:1,b:1"),
    "cuda and host": ("cuda:1,host:1", "cuda:1,host:1"),
    "cuda and rocm": ("cuda:1,rocm:1", "cuda:1,rocm:1"),
    "2 cuda and 2 rocm": ("cuda:2,rocm:2", "cuda:2,rocm:2"),
}


def here() -> torch.device:
    """Device of this rank's tensors."""
    if torch.device("cuda") not in dist.group.WORLD._device_types:
        return torch.device("cpu")
    torch.cuda.set_device(me())
    return torch.device("cuda", me())


def mine(place: torch.device, count: int) -> torch.Tensor:
    """Integers that depend on the rank."""
    return (torch.arange(count) % 7 + me()).to(place, torch.float32)


def total(count: int) -> torch.Tensor:
    """The sum of all ranks' `mine`."""
    return ((torch.arange(count) % 7) * size() + sum(range(size()))).float()


def collectives() -> None:
    """On all devices of the ranks, contiguous or not, of a few elements and of several slots."""
    n = size()
    for place in (here(), torch.device("cpu")):
        for count in (2 * n, 60_000 * n):
            dist.all_reduce(x := mine(place, count))
            equal(x, total(count))
            dist.all_reduce(x := mine(place, count).view(2, -1).t())
            equal(x, total(count).view(2, -1).t())
            dist.broadcast(x := mine(place, count), 1)
            equal(x, torch.arange(count) % 7 + 1)
            dist.all_gather_into_tensor(out := torch.zeros(n * count, device=place), mine(place, count))
            equal(out, torch.cat([torch.arange(count) % 7 + r for r in range(n)]))
            dist.reduce_scatter_tensor(out := torch.zeros(count // n, device=place), mine(place, count))
            equal(out, total(count).chunk(n)[me()])
            dist.all_to_all_single(out := torch.zeros(count, device=place), mine(place, count))
            equal(out, torch.cat([(torch.arange(count) % 7).chunk(n)[me()] + r for r in range(n)]))
            dist.all_gather(outs := [torch.zeros(count, device=place) for _ in range(n)], mine(place, count))
            for rank, found in enumerate(outs):
                equal(found, torch.arange(count) % 7 + rank)


def equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected.to(found.dtype), rtol=0, atol=0)


def asynchronous() -> None:
    """Started operations run concurrently to the current stream, in order; `wait` and futures order later work."""
    place, count = here(), 100_000
    noise_there = torch.rand(1500, 1500, device=place)
    for _ in range(3):
        for _ in range(5):
            noise_there = noise_there @ noise_there / 800  # keeps a GPU's stream behind the host
        xs = [mine(place, count) + i for i in range(20)]
        works = [dist.all_reduce(x, async_op=True) for x in xs]
        for i, (x, work) in enumerate(zip(xs, works, strict=True)):
            if i % 2:
                assert work.wait()
                equal(x * 2, (total(count) + size() * i) * 2)
            else:
                doubled = work.get_future().then(lambda f: f.value()[0] * 2)
                equal(doubled.wait(), (total(count) + size() * i) * 2)
        assert all(work.is_completed() and work.is_success() for work in works)
        again = dist.all_gather_into_tensor(out := torch.zeros(size(), 4, device=place), mine(place, 4), async_op=True)
        dist.reduce(x := mine(place, 4), 0, async_op=True).wait()
        again.wait()
        equal(out[1], torch.arange(4) + 1)


def messages() -> None:
    """Blocking and not, with tags out of order, in batches."""
    place, n = here(), size()
    right, left = (me() + 1) % n, (me() - 1) % n
    for count in (3, 300_000):
        if me() % 2 == 0:
            dist.send(mine(place, count), right)
            dist.recv(x := torch.zeros(count, device=place), left)
        else:
            dist.recv(x := torch.zeros(count, device=place), left)
            dist.send(mine(place, count), right)
        equal(x, torch.arange(count) % 7 + left)
        sent, a, b = mine(place, count), torch.zeros(count, device=place), torch.zeros(count, device=place)
        works = [dist.isend(sent, right, tag=1), dist.isend(sent * 2, right, tag=2)]
        works += [dist.irecv(b, left, tag=2), dist.irecv(a, left, tag=1)]
        for work in works:
            work.wait()
        equal(b, 2 * a.cpu())
        equal(a, torch.arange(count) % 7 + left)
        ops = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, c := torch.zeros_like(a), left)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        equal(c, a.cpu())
        to_oneself = [dist.isend(sent * 3, me(), tag=4), dist.irecv(d := torch.zeros_like(a), me(), tag=4)]
        own = to_oneself[0].get_future()
        for work in to_oneself:
            work.wait()
        equal(d, (torch.arange(count) % 7 + me()) * 3)
        equal(own.wait()[0], d.cpu())
        columns = torch.zeros(count, 2, device=place)
        works = [dist.isend(sent, right), dist.irecv(columns[:, 0], left)]
        late = works[1].get_future().then(lambda f: f.value()[0] * 2)
        for work in works:
            work.wait()
        equal(columns[:, 0] + 1, a.cpu() + 1)
        equal(late.wait(), 2 * a.cpu())
        equal(columns[:, 1], torch.zeros(count))


def gradients() -> None:
    """DDP's gradients, with buckets and hooks, are the mean over all ranks."""
    place = here()
    hooks: dict[str, tuple[float, Callable[[Parallel], None]]] = {
        "none": (1e-6, lambda model: None),
        "allreduce": (1e-6, lambda model: model.register_comm_hook(None, default_hooks.allreduce_hook)),
        "built-in": (1e-6, lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)),
        "built-in fp16": (
            3e-3,
            lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
        ),
    }
    for tolerance, register in hooks.values():
        model = Parallel(OnDevice(place), bucket_cap_mb=0.0005)
        register(model)
        for _ in range(3):
            model.zero_grad()
            loss_of(model, me()).backward()
            for parameter, expected in zip(model.parameters(), mean_gradients(), strict=True):
                torch.testing.assert_close(parameter.grad.cpu(), expected, rtol=tolerance, atol=tolerance / 10)


class OnDevice(torch.nn.Module):
    """The perceptron, for batches in host memory."""

    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self.net = perceptron().to(place)
        self.place = place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.to(self.place))


def groups() -> None:
    """A group of some ranks, objects, a barrier."""
    place = here()
    dist.all_gather_object(found := [None] * size(), {"rank": me()})
    assert found == [{"rank": r} for r in range(size())]
    pair = dist.new_group([0, size() - 1])
    if me() in (0, size() - 1):
        dist.all_reduce(x := mine(place, 5), group=pair)
        equal(x, (torch.arange(5) % 7) * 2 + size() - 1)
    dist.barrier()


def captured() -> None:
    """Blocking and asynchronous operations in a graph that runs several times."""
    place = here()
    x, y = torch.zeros(50_000, device=place), torch.zeros(50_000, device=place)

    def step() -> None:
        dist.all_reduce(x)
        work = dist.all_reduce(y, async_op=True)
        x.mul_(2)
        work.wait()
        y.add_(1)

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        x.copy_(mine(place, 50_000))
        y.copy_(mine(place, 50_000))
        graph.replay()
        equal(x, total(50_000) * 2)
        equal(y, total(50_000) + 1)
    dist.barrier()


@pytest.mark.parametrize("name", JOBS)
def test_torch(
    vendor: str, places: Callable[[str], tuple[str, ...]], libraries: Callable[[str], dict[str, str]], name: str
) -> None:
    """All kinds of operations in one job, because its start takes most of the time."""
    devices, islands = JOBS[name]
    kinds = places(devices)
    if torch.cuda.device_count() < sum(kind != "host" for kind in kinds):
        pytest.skip(f"this torch is not built for {vendor}, or sees too few GPUs")
    env = [{**SMALL_GPU_RINGS, "XVCOMM_DEVICE": kind, **libraries(kind)} for kind in kinds]
    with Job(islands, "xvcomm", env=env, timeout=40) as ranks:
        for check in (collectives, asynchronous, messages, gradients, groups):
            ranks.run(check)
        if set(kinds) == {vendor}:
            ranks.run(captured)


def losses(folder: Path, **env: str) -> dict[str, Any]:
    """Of the example with Hugging Face's Trainer, on two GPUs."""
    run = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    env = {"XVCOMM_DEVICE": "", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", **env}
    launch(sys.executable, *run, str(EXAMPLE), "--steps", "8", "--out", str(folder), env=env)
    record: dict[str, Any] = json.loads((folder / "losses.json").read_text())
    return record


def beside_nccl() -> None:
    """NCCL's operations in quick succession, with an unused group of xvcomm."""
    dist.new_group(backend="xvcomm")
    place, n, operations = torch.device("cuda", me()), size(), torch.ops._c10d_functional
    torch.cuda.set_device(place)
    gathered, name = torch.zeros(4 * n, device=place), dist.group.WORLD.group_name
    want = torch.arange(n, dtype=torch.float32).repeat_interleave(4)
    for number in range(2000):
        dist.all_gather_into_tensor(gathered, torch.full((4,), float(number + me()), device=place))
    equal(gathered, want + 1999)
    for number in range(500):
        part = torch.full((4,), float(number + me()), device=place)
        operations.wait_tensor(operations.all_gather_into_tensor_out(part, n, name, out=gathered))
    equal(gathered, want + 499)


def test_nccl_beside_a_group_that_is_never_used(vendor: str, gpus: int) -> None:
    """As many ranks as there are GPUs, one or two."""
    ranks = min(gpus, torch.cuda.device_count(), 2)
    if not ranks or not dist.is_nccl_available():
        pytest.skip("this torch sees no GPU, or has no NCCL")
    islands = ",".join("ab"[:ranks])
    with Job(islands, "nccl", env={"XVCOMM_DEVICE": vendor}, timeout=40) as job:
        job.run(beside_nccl, timeout=120)


def test_a_script_that_uses_nccl(gpus: int, tmp_path: Path) -> None:
    """Hugging Face's Trainer: the losses with xvcomm in place of NCCL equal NCCL's."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    if gpus < 2 or torch.cuda.device_count() < 2:
        pytest.skip(f"2 ranks on GPUs, and {min(gpus, torch.cuda.device_count())} GPUs")
    theirs, ours = losses(tmp_path / "nccl"), losses(tmp_path / "xvcomm", XVCOMM_REPLACE="nccl")
    assert "xvcomm" in ours["group"] and "xvcomm" not in theirs["group"]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    assert ours["held_out"] == pytest.approx(theirs["held_out"], rel=1e-6)
