"""Forked children of a torch program: they can compute, communication raises, and the parent's job continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchchecks import me, same, size
from torchjobs import Job, launch

pytestmark = pytest.mark.not_gloo("its children hang")
SECONDS = 60

CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
    "asynchronous": lambda: dist.all_reduce(torch.ones(4), async_op=True).wait(),
    "future": lambda: dist.all_reduce(torch.ones(4), async_op=True).get_future().wait(),
    "broadcast": lambda: dist.broadcast(torch.ones(4), 0),
    "all_gather": lambda: dist.all_gather_into_tensor(torch.ones(8), torch.ones(4)),
    "objects": lambda: dist.all_gather_object([None, None], "text"),
    "barrier": dist.barrier,
    "monitored_barrier": dist.monitored_barrier,
    "send": lambda: dist.send(torch.ones(4), 1 - me()),
    "recv": lambda: dist.recv(torch.ones(4), 1 - me()),
    "recv from any": lambda: dist.recv(torch.ones(4)),
    "irecv": lambda: dist.irecv(torch.ones(4), 1 - me()).wait(),
    "new_group": lambda: dist.new_group([0, 1]),
    "split_group": lambda: dist.group.WORLD.split_group([0, 1]),
}


def goes_on() -> None:
    """Check that the parents' job still works."""
    for _ in range(3):
        dist.all_reduce(x := torch.full((5,), me() + 1.0))
        same(x, torch.full((5,), size() * (size() + 1) / 2))
    work = dist.all_reduce(x := torch.ones(5), async_op=True)
    work.wait()
    same(x, torch.full((5,), float(size())))
    dist.barrier()


def child_of(function: Callable[[], None]) -> int:
    """Run a function in a forked child; returns its exit code, 3 if it raised."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            signal.alarm(SECONDS)
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def is_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match="in a forked child: the communicator is its parent's"):
        call()


def refused() -> None:
    def tried() -> None:
        for call in CALLS.values():
            is_refused(call)
        dist.destroy_process_group()

    goes_on()
    assert child_of(tried) == 0
    goes_on()


def test_every_call_raises_closed_error(start: Callable[..., Job]) -> None:
    """In a separate job: a child that destroys a Gloo group of another test hangs in Gloo."""
    start("cuda:1,rocm:1").run(refused)


def fork_during_operations() -> None:
    """During an all-reduce in the group's thread, and receives from any rank."""
    goes_on()
    received = torch.empty(4)
    if me() == 0:
        works = [
            dist.all_reduce(x := torch.ones(4), async_op=True),
            dist.irecv(received, 1),
            dist.irecv(torch.ones(4), tag=7),
        ]

        def tried() -> None:
            for work in works:
                is_refused(work.wait)
                assert work.is_completed()
            for name in ("all_reduce", "asynchronous", "recv from any"):
                is_refused(CALLS[name])

        assert child_of(tried) == 0
        dist.send(torch.ones(1), 1, tag=1)
    else:
        dist.recv(torch.ones(1), 0, tag=1)
        works = [dist.all_reduce(x := torch.ones(4), async_op=True)]
        dist.send(torch.full((4,), 5.0), 0)
        dist.send(torch.ones(4), 0, tag=7)
    for work in works:
        work.wait()
    same(x, torch.full((4,), 2.0))
    if me() == 0:
        same(received, torch.full((4,), 5.0))
    goes_on()


def test_works_in_a_forked_child(pair: Job) -> None:
    pair.run(fork_during_operations)


def runs_programs() -> None:
    goes_on()
    found = subprocess.run([sys.executable, "-c", "print(3)"], capture_output=True, text=True, preexec_fn=os.setsid)
    assert found.stdout == "3\n"
    assert child_of(lambda: os.execv("/bin/true", ["true"])) == 0
    goes_on()


def test_a_child_that_becomes_another_program(pair: Job) -> None:
    pair.run(runs_programs)


PROGRAM = """
import multiprocessing, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

def squared(x):
    return int((torch.full((3,), x) ** 2)[0])

def goes_on():
    for _ in range(100):
        dist.all_reduce(x := torch.full((3,), dist.get_rank() + 1.0))
        assert (x == 3).all()
    dist.all_reduce(x, async_op=True).wait()
    assert (x == 6).all()

def ends(child):
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def exit():
    if (child := os.fork()) == 0:
        sys.exit(0)
    ends(child)

def destroy():
    if (child := os.fork()) == 0:
        dist.destroy_process_group()
        sys.exit(0)
    ends(child)

def daemon():
    if (child := os.fork()) == 0:
        if os.fork() == 0:
            os.setsid()
        sys.exit(0)
    ends(child)

def loader():
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    numbers = torch.arange(1.0, 9.0).reshape(-1, 1)
    for start in ("fork", "forkserver"):
        loader = DataLoader(TensorDataset(numbers), batch_size=2, num_workers=2, multiprocessing_context=start)
        for step, (batch,) in enumerate(loader):
            model.zero_grad()
            model(batch * (dist.get_rank() + 1)).mean().backward()  # its gradient is the mean of the batch
            assert (model.module.weight.grad == 1.5 * numbers[2 * step : 2 * step + 2].mean()).all()
        assert step == 3

def processes():
    for start in ("fork", "forkserver", "spawn"):
        with multiprocessing.get_context(start).Pool(2) as pool:
            squares = pool.map_async(squared, range(6))
            goes_on()
            assert squares.get(60) == [0, 1, 4, 9, 16, 25]

if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["torch"])
    dist.init_process_group("xvcomm")
    for part in (exit, destroy, daemon, loader, processes):
        goes_on()
        part()
        goes_on()
        sys.stdout.write(f"right: {part.__name__}\\n")  # in one piece
    dist.barrier()
    dist.destroy_process_group()
"""
PARTS = ("exit", "destroy", "daemon", "loader", "processes")


def test_program(tmp_path: Path, python: str) -> None:
    """Children that exit normally, daemons, data loader workers beside DDP, pools of all kinds."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    text = launch(python, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program), timeout=250.0)
    assert [text.count(f"right: {part}") for part in PARTS] == [2] * len(PARTS), text
