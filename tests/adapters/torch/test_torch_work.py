"""`Work`, the result of asynchronous operations, and its future."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torchchecks import me, noise, same, size
from torchjobs import Job


def until(condition, seconds: float = 20.0) -> None:  # type: ignore[no-untyped-def]
    """Wait until a condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.001)


def waiting() -> None:
    work = dist.all_reduce(x := torch.ones(4), async_op=True)
    assert isinstance(work, dist.Work)
    assert work.wait()
    assert work.is_completed() and work.is_success()
    same(x, torch.full((4,), float(size())))
    assert work.wait() and work.wait(timedelta(seconds=1))
    same(x, torch.full((4,), float(size())))


def test_wait(pair: Job) -> None:
    pair.run(waiting)


def asking_only() -> None:
    work = dist.all_reduce(x := torch.ones(4), async_op=True)
    until(work.is_completed)
    same(x, torch.full((4,), float(size())))
    work.wait()


def test_operations_complete_without_wait(pair: Job) -> None:
    pair.run(asking_only)


def not_done_before_its_peer() -> None:
    dist.barrier()
    if me() == 0:
        work = dist.all_reduce(x := torch.ones(4), async_op=True)
        assert not work.is_completed()
        with pytest.raises(Exception, match=r"(?i)time"):
            work.wait(timedelta(milliseconds=200))
        dist.new_group([0])  # the other rank goes on when this key is there
        dist.distributed_c10d._get_default_store().set("go on", "1")
        until(work.is_completed)
        same(x, torch.full((4,), 2.0))
    else:
        dist.new_group([0])
        dist.distributed_c10d._get_default_store().wait(["go on"])
        dist.all_reduce(torch.ones(4))


@pytest.mark.not_gloo("a wait that can be repeated after its timeout")
def test_wait_with_a_timeout_can_be_repeated(pair: Job) -> None:
    pair.run(not_done_before_its_peer)


def futures() -> None:
    n = float(size())
    work = dist.all_reduce(torch.ones(4), async_op=True)
    future = work.get_future()
    same(future.then(lambda f: f.value()[0] * 10).wait(), torch.full((4,), 10 * n))
    same(future.wait()[0], torch.full((4,), n))
    assert future.done()
    work = dist.all_gather_into_tensor(out := torch.zeros(size()), torch.full((1,), float(me())), async_op=True)
    same(work.get_future().wait()[0].flatten()[:1], [0.0])
    same(out, torch.arange(n))
    done = threading.Event()
    dist.broadcast(torch.ones(2), 0, async_op=True).get_future().add_done_callback(lambda f: done.set())
    assert done.wait(20)
    late = dist.all_reduce(torch.ones(2), async_op=True)
    late.wait()
    same(late.get_future().wait()[0], torch.full((2,), n))


def test_futures(pair: Job) -> None:
    pair.run(futures)


def results() -> None:
    work = dist.all_reduce(x := torch.ones(4), async_op=True)
    work.wait()
    same(work.result()[0], x)
    dist.all_gather(out := [torch.zeros(2) for _ in range(size())], noise(me(), 2), async_op=True).wait()
    for rank, found in enumerate(out):
        same(found, noise(rank, 2))


def test_results(pair: Job) -> None:
    pair.run(results)


def arrays_die_first() -> None:
    works = [dist.all_reduce(torch.full((100_000,), float(i)), async_op=True) for i in range(20)]
    for i, work in enumerate(works):
        same(work.get_future().wait()[0], torch.full((100_000,), float(i * size())))


def test_tensors_live_until_the_work_is_done(pair: Job) -> None:
    pair.run(arrays_die_first)


def dropped() -> None:
    for _ in range(20):
        dist.all_reduce(torch.ones(1000), async_op=True)
    dist.barrier()
    dist.all_reduce(x := torch.ones(3))
    same(x, torch.full((3,), float(size())))


def test_discarded_works(pair: Job) -> None:
    pair.run(dropped)


def waited_for_elsewhere() -> None:
    work = dist.all_reduce(x := torch.ones(4), async_op=True)
    waiters = [threading.Thread(target=work.wait) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join(20)
        assert not waiter.is_alive()
    same(x, torch.full((4,), float(size())))


def test_wait_from_other_threads(pair: Job) -> None:
    pair.run(waited_for_elsewhere)


def count_during_wait() -> int:
    """How far another thread counts while this one waits for a peer that comes half a second later."""
    counted, stop = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.wait(0.005):
            counted += 1

    dist.barrier()
    thread = threading.Thread(target=count)
    if me() == 0:
        thread.start()
        dist.all_reduce(torch.ones(4))
        dist.recv(torch.zeros(4), 1)
        stop.set()
        thread.join()
    else:
        time.sleep(0.3)
        dist.all_reduce(torch.ones(4))
        time.sleep(0.3)
        dist.send(torch.zeros(4), 0)
    return counted


def test_wait_releases_the_gil(pair: Job) -> None:
    assert pair.run(count_during_wait)[0] > 20
