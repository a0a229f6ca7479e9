"""A program written for NCCL only; `test_torch_replace.py` runs it on xvcomm, and it also runs on NCCL.

    torchrun --nproc-per-node 2 nccl_program.py nccl

Exits with code 1 if anything differs from NCCL; rank 0 prints which library was used.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel


def place() -> torch.device:
    """This rank's GPU; without GPUs the program only runs if another library replaces NCCL."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def summed(device: torch.device, group: dist.ProcessGroup | None = None) -> float:
    """The sum over a group's ranks."""
    x = torch.full((1000,), float(dist.get_rank()), device=device)
    dist.all_reduce(x, group=group)
    assert (x == x[0]).all()
    return x[0].item()


def groups(device: torch.device, backend: str) -> None:
    """New groups, with and without NCCL's options, of all ranks and of single ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    everybody = float(sum(range(size)))
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 4
    options.config.cga_cluster_size = 2
    assert summed(device, dist.new_group(pg_options=options)) == everybody
    assert summed(device, dist.new_group(backend="nccl", timeout=timedelta(seconds=40))) == everybody
    for other in range(size):
        group = dist.new_group([other], backend=backend)
        if other == rank:
            assert dist.get_backend(group) == dist.get_backend() and summed(device, group) == rank
    backend_there = dist.new_group()._get_backend(device)
    assert isinstance(backend_there, dist.ProcessGroupNCCL) and not isinstance(backend_there, dist.ProcessGroupGloo)
    assert backend_there.options._timeout > timedelta()


def collectives(device: torch.device) -> None:
    """Tensors, a message, objects, both kinds of barrier."""
    size, rank = dist.get_world_size(), dist.get_rank()
    dist.all_gather(
        blocks := [torch.zeros(5, device=device) for _ in range(size)], torch.full((5,), float(rank), device=device)
    )
    assert [block[0].item() for block in blocks] == list(range(size))
    ring = [
        dist.P2POp(dist.isend, blocks[rank], (rank + 1) % size),
        dist.P2POp(dist.irecv, x := blocks[rank] * 0, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    assert x[0].item() == (rank - 1) % size
    dist.all_gather_object(found := [None] * size, {"rank": rank})
    assert found == [{"rank": r} for r in range(size)]
    dist.barrier()
    dist.barrier(device_ids=[device.index or 0])


def refusals(device: torch.device) -> None:
    """Errors that torch raises for invalid calls, including while it logs them, keep their cause."""
    try:
        dist.all_to_all_single(torch.zeros(3, device=device), torch.zeros(2, device=device))
    except (RuntimeError, ValueError):
        pass
    else:
        raise AssertionError("three elements took two from each rank")
    assert len(torch.cuda.nccl.version()) >= 3


def gradients(device: torch.device) -> None:
    """DDP's gradients: the mean over the ranks, also with the hook that torch allows for NCCL only."""
    for hook, tolerance in ((None, 1e-6), (default_hooks.bf16_compress_hook, 2e-2)):
        torch.manual_seed(0)
        model = DistributedDataParallel(
            nn.Linear(8, 4).to(device), device_ids=[device] if device.type == "cuda" else None
        )
        if hook is not None:
            model.register_comm_hook(None, hook)
        batch = torch.full((3, 8), float(dist.get_rank() + 1), device=device)
        model(batch).sum().backward()
        mean = (dist.get_world_size() + 1) / 2
        torch.testing.assert_close(model.module.weight.grad.cpu(), torch.full((4, 8), 3 * mean), rtol=tolerance, atol=0)


def main() -> None:
    """Run all of it with the backend of the command line."""
    backend = sys.argv[1]
    device = place()
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    assert dist.is_nccl_available() and "nccl" in str(dist.get_backend_config())
    assert summed(device) == sum(range(dist.get_world_size()))
    if ":" in backend:
        assert summed(torch.device("cpu")) == sum(range(dist.get_world_size()))
    collectives(device)
    refusals(device)
    groups(device, backend)
    gradients(device)
    if dist.get_rank() == 0:
        print("get_backend:", dist.get_backend(), "served by:", type(dist.group.WORLD).__module__, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
