"""Process groups after a loss: `shrink_group` and abort."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchjobs import Job

from xvcomm.adapters.torch import communicator
from xvcomm.adapters.torch.joining import Planes
from xvcomm.errors import PeerLost

pytestmark = [
    pytest.mark.not_gloo("shrink_group"),
    pytest.mark.skipif(not hasattr(dist.distributed_c10d, "shrink_group"), reason="this torch has no shrink_group"),
]


def works(ranks: list[int], group: Any = None) -> None:
    """Check that a group has these ranks of the job, and that its operations work."""
    size = len(ranks)
    assert dist.get_world_size(group) == size
    assert list(communicator(group).job_ranks) == ranks
    x = torch.full((1000,), float(ranks[dist.get_rank(group)]))
    dist.all_reduce(x, group=group)
    assert (x == sum(ranks)).all()
    found = [torch.zeros(3) for _ in ranks]
    dist.all_gather(found, torch.full((3,), float(dist.get_rank(group))), group=group)
    assert [int(y[0]) for y in found] == list(range(size))
    dist.barrier(group=group)


def lose(victims: list[int], flags: int) -> None:
    me = dist.get_rank()
    dist.barrier()
    if me in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError):
        while True:
            dist.all_reduce(torch.ones(100_000))
    made = dist.distributed_c10d.shrink_group(victims, shrink_flags=flags)
    assert made is dist.group.WORLD
    left = [rank for rank in range(4) if rank not in victims]
    works(left)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    model(torch.full((1, 2), float(left[dist.get_rank()]))).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None and torch.allclose(gradient, torch.full((1, 2), sum(left) / len(left)))
    if len(left) > 2:
        half = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            dist.all_reduce(torch.ones(3), group=half)
    dist.destroy_process_group()


@pytest.mark.parametrize("flags", [0, 1], ids=["default", "abort"])
@pytest.mark.parametrize("victims", [[1], [2, 3]])
def test_the_default_group_shrinks(victims: list[int], flags: int) -> None:
    with Job("cuda:2,rocm:2") as job:
        for rank, outcome in enumerate(job.outcomes(lose, victims, flags)):
            assert isinstance(outcome, EOFError) if rank in victims else outcome is None, f"rank {rank}: {outcome!r}"


def exclude_the_living(part: bool) -> None:
    """A rank that lives is left out; it does not call this. Also of a group beside the default one."""
    me = dist.get_rank()
    group = dist.new_group([0, 1, 3]) if part else None
    members, excluded = ([0, 1, 3], 2) if part else ([0, 1, 2, 3], 3)
    if me in members and me != members[excluded]:
        made = dist.distributed_c10d.shrink_group([excluded], group)
        works([rank for rank in members if rank != members[excluded]], made)
        if part:
            assert made is not dist.group.WORLD
    if part:
        works([0, 1, 2, 3])
    dist.destroy_process_group()


@pytest.mark.parametrize("part", [False, True], ids=["default", "group"])
def test_a_rank_that_lives_is_excluded(part: bool) -> None:
    with Job("cuda:2,rocm:2") as job:
        for outcome in job.outcomes(exclude_the_living, part):
            assert outcome is None


def shrink_with_options() -> None:
    if dist.get_rank() < 2:
        with pytest.warns(RuntimeWarning, match="pg_options have no effect"):
            dist.distributed_c10d.shrink_group([2], pg_options=object())
        works([0, 1])
    dist.destroy_process_group()


def test_options_have_no_effect() -> None:
    with Job("cuda:3") as job:
        assert job.outcomes(shrink_with_options) == [None] * 3


class Shrunk:
    """A communicator that shrinks, or does not."""

    def __init__(self, made: Any) -> None:
        self.made, self.closed = made, False

    def shrink(self, timeout: float, *, exclude: Any) -> Any:
        if isinstance(self.made, Exception):
            raise self.made
        return self.made

    def close(self) -> None:
        self.closed = True


def test_a_group_shrinks_whole_or_not() -> None:
    """If its communicator for host memory does not shrink, the new one for devices is closed."""
    made, lost = Shrunk(None), PeerLost("lost")
    planes: Any = SimpleNamespace(comms={"main": Shrunk(made), "host": Shrunk(lost)})
    with pytest.raises(PeerLost):
        Planes.shrink(planes, [1], "group", 1.0)
    assert made.closed


def abort_and_begin_anew() -> None:
    """After an abort of all groups a new default group can be made in the same processes."""
    group, others = dist.new_group(), dist.get_world_size()
    dist.barrier()
    dist.distributed_c10d._abort_process_group()
    assert not dist.is_initialized()
    with pytest.raises(Exception, match=r"abort|closed"):
        group.allreduce([torch.ones(2)]).wait()
    dist.init_process_group("xvcomm")
    works(list(range(others)))
    dist.destroy_process_group()


def test_abort_of_all_groups() -> None:
    with Job("cuda:2,rocm:1") as job:
        for outcome in job.outcomes(abort_and_begin_anew):
            assert outcome is None
