"""Errors: killed ranks, missing ranks, mismatches, aborts; raised wherever the operation is waited for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torchchecks import loss_of, me, perceptron, same
from torchjobs import BACKEND, Job

from xvcomm.adapters.torch import communicator
from xvcomm.errors import PeerLost

SOON = 60.0
BORDER = "cuda:1,rocm:1"


def attempt(call: Callable[[], Any]) -> tuple[str, str, float, bool]:
    """Class, text and seconds of the error of a call, and whether it is a class that torch programs catch."""
    begun = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begun, isinstance(error, RuntimeError)
    return "", "nothing was raised", time.monotonic() - begun, False


def failing(kind: str) -> Callable[[], Any]:
    """An operation of all ranks in which the others do not take part."""
    x = torch.ones(4)
    model = nn.parallel.DistributedDataParallel(perceptron()) if kind in ("DDP", "DDP hook") else None
    if kind == "DDP hook":
        assert model is not None
        model.register_comm_hook(None, lambda _, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future())
    calls: dict[str, Callable[[], Any]] = {
        "blocking": lambda: dist.all_reduce(x),
        "wait": lambda: dist.all_reduce(x, async_op=True).wait(),
        "future": lambda: dist.all_reduce(x, async_op=True).get_future().wait(),
        "then": lambda: dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] * 2).wait(),
        "barrier": dist.barrier,
        "object": lambda: dist.all_gather_object([None] * dist.get_world_size(), 1),
        "recv": lambda: dist.recv(x, 1),
        "recv from any": lambda: dist.recv(x),
        "irecv": lambda: dist.irecv(x, 1).wait(),
        "functional": lambda: funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD)) + 1,
        "DDP": lambda: loss_of(model, me()).backward(),  # type: ignore[arg-type]
        "DDP hook": lambda: loss_of(model, me()).backward(),  # type: ignore[arg-type]
    }
    return calls[kind]


KINDS = (
    "blocking", "wait", "future", "then", "barrier", "object", "recv", "recv from any", "irecv", "functional", "DDP", "DDP hook",
)  # fmt: skip


def needs_all(kind: str) -> tuple[str, str, float, bool]:
    call = failing(kind)
    dist.barrier()
    return attempt(call)


def dies(kind: str) -> None:
    failing(kind)
    dist.barrier()
    time.sleep(0.2)
    os._exit(1)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if BACKEND != "gloo" or kind != "recv from any"])
def test_a_peer_is_killed(start: Callable[..., Job], kind: str) -> None:
    job = start(BORDER)
    job.submit(1, dies, kind)
    job.submit(0, needs_all, kind)
    name, text, seconds, caught = job.collect(0)[0]
    assert name and caught and seconds < SOON, (name, text, seconds)
    if name != "RuntimeError" or "gloo" not in text.lower():
        assert "rank 1" in text and ("died" in text or "lost" in text or "left" in text), text


def died_in_backward() -> list[tuple[str, str, float, bool]]:
    model = nn.parallel.DistributedDataParallel(perceptron())
    loss = loss_of(model, me())
    dist.barrier()
    if me() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    found = [
        attempt(loss.backward),
        attempt(communicator().check),
        attempt(lambda: dist.all_reduce(torch.ones(1))),
        attempt(lambda: dist.recv(torch.ones(1), 1)),
    ]
    with pytest.raises(PeerLost) as caught:
        communicator().check()
    assert caught.value.peer == 1
    return found


@pytest.mark.not_gloo("the class of the error")
def test_the_class_of_an_error_in_backward(start: Callable[..., Job]) -> None:
    """torch's C++ keeps only the text of an error; the next call, and `check`, raise its class."""
    job = start(BORDER)
    for rank in (0, 1):
        job.submit(rank, died_in_backward)
    backward, *later = job.collect(0)[0]
    assert "PeerLost" in f"{backward[0]}: {backward[1]}" and "rank 1" in backward[1] and backward[2] < SOON, backward
    for name, text, seconds, _ in later:
        assert name == "PeerLost" and "rank 1" in text and seconds < SOON, (name, text, seconds)


def needs_all_soon(kind: str) -> tuple[str, str, float, bool]:
    call = failing(kind)
    dist.barrier()
    dist.group.WORLD.set_timeout(timedelta(seconds=1.0))
    return attempt(call)


def absent(kind: str) -> None:
    failing(kind)
    dist.barrier()
    time.sleep(2.5)


@pytest.mark.not_gloo("the name of the missing rank")
@pytest.mark.parametrize("kind", ["blocking", "future", "object", "recv", "functional", "DDP"])
def test_a_timeout_names_the_missing_rank(start: Callable[..., Job], kind: str) -> None:
    job = start(BORDER)
    job.submit(1, absent, kind)
    job.submit(0, needs_all_soon, kind)
    name, text, seconds, caught = job.collect(0, 1)[0]
    assert "DeadlineExceeded" in f"{name}: {text}", (name, text)  # futures keep an error's text, not its class
    assert caught and 0.8 < seconds < SOON, (name, seconds)
    assert "rank 1" in text, text


def timed_group() -> Any:
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.barrier()
    if me() == 0:
        return attempt(lambda: dist.all_reduce(torch.ones(2), group=group))
    time.sleep(2)
    return None


def test_a_group_has_its_own_timeout(start: Callable[..., Job]) -> None:
    name, text, seconds, caught = start(BORDER).run(timed_group)[0]
    assert name and caught and 0.8 < seconds < SOON, text


def with_another_timeout(kind: str) -> Any:
    group = None if kind == "default" else dist.new_group()
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    if me() == 0:
        return attempt(lambda: dist.all_reduce(torch.ones(2), group=group))
    time.sleep(2)
    return None


@pytest.mark.parametrize("kind", ["default", "another"])
def test_the_timeout_of_a_group_can_be_changed(start: Callable[..., Job], kind: str) -> None:
    name, text, seconds, caught = start(BORDER).run(with_another_timeout, kind)[0]
    assert name and caught and 0.8 < seconds < SOON, text


def monitored_without(missing: list[int]) -> Any:
    dist.barrier()
    if me() in missing:
        time.sleep(3)
        return None
    return attempt(lambda: dist.group.WORLD.monitored_barrier(timedelta(seconds=1), wait_all_ranks=True))


def test_monitored_barrier_names_the_missing(start: Callable[..., Job]) -> None:
    answers = start("cuda:2,rocm:1").run(monitored_without, [1, 2])
    name, text, _, caught = answers[0]
    assert name and caught
    assert "1" in text and "2" in text and "onitored" in text, text


def aborted(after: float) -> Any:
    dist.barrier()
    if me() == 1:
        time.sleep(after + 1.5)
        return None
    threading.Timer(after, dist.distributed_c10d._abort_process_group).start()
    return attempt(lambda: dist.all_reduce(torch.ones(4)))


@pytest.mark.not_gloo("abort")
def test_abort_from_another_thread(start: Callable[..., Job]) -> None:
    name, text, seconds, caught = start(BORDER).run(aborted, 0.5)[0]
    assert name and caught and seconds < 5.0, (name, text, seconds)
    assert "abort" in text.lower()


def after_the_end() -> list[tuple[str, str, float, bool]]:
    group = dist.new_group()
    works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    dist.barrier()
    group.shutdown()
    group.shutdown()
    found = [attempt(lambda: group.allreduce([torch.ones(2)]).wait())]
    dist.all_reduce(x := torch.ones(1))
    same(x, [2.0])
    return found


@pytest.mark.not_gloo("shutdown")
def test_operations_after_shutdown(start: Callable[..., Job]) -> None:
    for ((name, text, _, caught),) in start(BORDER).run(after_the_end):
        assert name and caught and "closed" in text, (name, text)


def unlike(kind: str) -> tuple[str, str, float, bool]:
    n = 3 + me()
    calls: dict[str, Callable[[], Any]] = {
        "count": lambda: dist.all_reduce(torch.ones(n)),
        "dtype": lambda: dist.all_reduce(torch.ones(4, dtype=[torch.float32, torch.float64][me()])),
        "operation": lambda: [dist.all_reduce, lambda x: dist.broadcast(x, 0)][me()](torch.ones(4)),
        "reduction": lambda: dist.all_reduce(torch.ones(4), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][me()]),
        "root": lambda: dist.broadcast(torch.ones(4), me()),
    }
    found = attempt(calls[kind])
    return found if found[0] else attempt(dist.barrier)


@pytest.mark.not_gloo("the check of what ranks call")
@pytest.mark.parametrize("kind", ["count", "dtype", "operation", "reduction", "root"])
def test_mismatched_operations(start: Callable[..., Job], kind: str) -> None:
    """Both ranks raise: at once, or in the next operation if a rank only sends."""
    for rank, (name, text, seconds, caught) in enumerate(start(BORDER).run(unlike, kind)):
        assert name == "MismatchError" and caught and seconds < SOON, (rank, name, text)
        assert "rank 0" in text and "rank 1" in text, text


def unlike_messages() -> list[tuple[str, str, float, bool]]:
    if me() == 0:
        return [attempt(lambda: dist.send(torch.ones(8), 1)), attempt(lambda: dist.recv(torch.ones(8), 1))]
    return [attempt(lambda: dist.recv(torch.ones(4), 0)), attempt(lambda: dist.send(torch.ones(8), 0))]


@pytest.mark.not_gloo("the check of what ranks call")
def test_mismatched_message_sizes(start: Callable[..., Job]) -> None:
    """A sender whose message was buffered in the ring raises in the next call."""
    sender, receiver = start(BORDER).run(unlike_messages)
    assert receiver[0][0] == "MismatchError" and "8 x float32" in receiver[0][1] and "4 x float32" in receiver[0][1]
    assert sender[1][0] and sender[1][3], sender


def sends_and_leaves() -> None:
    works = [dist.isend(torch.ones(8), 1, tag=tag) for tag in (1, 33)]
    for work in works:
        work.wait()
    dist.destroy_process_group()


def receives_in_another_order() -> list[tuple[str, str, float, bool]]:
    return [
        attempt(lambda: dist.recv(torch.ones(8), 0, tag=33)),
        attempt(lambda: dist.irecv(torch.ones(8), 0, tag=1).wait()),
    ]


@pytest.mark.not_gloo("tags that share a channel")
def test_tags_of_one_channel_out_of_order(start: Callable[..., Job]) -> None:
    """The receiver raises also if the sender has already closed."""
    job = start(BORDER)
    job.submit(0, sends_and_leaves)
    job.collect(0)
    job.submit(1, receives_in_another_order)
    for name, text, _, caught in job.collect(1)[0]:
        assert name == "MismatchError" and caught and "tag 1;" in text and "tag 33 (channel 1)" in text, (name, text)


def exits_without_destroying() -> None:
    dist.all_reduce(torch.ones(1))
    threading.Timer(0.2, os._exit, (7,)).start()


def test_ranks_that_leave_without_destroying_the_group(start: Callable[..., Job]) -> None:
    job = start(BORDER)
    assert job.outcomes(exits_without_destroying) == [None, None]


def one_leaves_early() -> Any:
    dist.barrier()
    if me() == 1:
        dist.destroy_process_group()
        return None
    return attempt(lambda: dist.all_reduce(torch.ones(1)))


def test_a_rank_that_destroys_the_group_early(start: Callable[..., Job]) -> None:
    name, text, seconds, caught = start(BORDER).run(one_leaves_early)[0]
    assert name and caught and seconds < SOON, (name, text, seconds)


def fails_inside_backward(kind: str) -> tuple[str, bool]:
    """An error in a communication hook reaches the caller of backward, and the process survives."""
    model = nn.parallel.DistributedDataParallel(perceptron())

    def hook(_, bucket):  # type: ignore[no-untyped-def]
        if kind == "raises":
            raise ValueError("from the hook")
        future: Any = torch.futures.Future()
        future.set_exception(ValueError("from the future"))
        return future

    model.register_comm_hook(None, hook)
    name, text, _, _ = attempt(lambda: loss_of(model, me()).backward())
    return f"{name}: {text}", bool(dist.all_reduce(torch.ones(1)) is None)


@pytest.mark.parametrize("kind", ["raises", "future"])
def test_errors_of_hooks(start: Callable[..., Job], kind: str) -> None:
    for text, alive in start(BORDER).run(fails_inside_backward, kind):
        assert "from the" in text and alive
