"""Daemon threads start completely or not at all, whatever signal handlers raise meanwhile."""

import _thread
import queue
import random
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from xvcomm.engine.inflight.work import OrderedWorker
from xvcomm.errors import ResourceError
from xvcomm.system.threads import Daemon

SOON = 60.0
TIMES = 300


class Interrupt(Exception):
    """Raised by the signal handler."""


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What threads raised while signals interrupt this one."""
    found: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", found.append)
    before = signal.getsignal(signal.SIGALRM)
    yield found
    signal.signal(signal.SIGALRM, before)


def interrupt(*_: object) -> None:
    raise Interrupt


def interrupted(call: Callable[[], Any], seconds: float) -> Any:
    """Result of a call; None if a signal interrupted it after this many seconds.

    Another thread can still be receiving the signal when the call ends: it is ignored from then on.
    """
    try:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            return call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
    except Interrupt:
        return None


def test_a_start_that_a_signal_interrupts(noise: list[Any]) -> None:
    chance, raised = random.Random(1), 0
    for _ in range(TIMES):
        over: queue.SimpleQueue[int] = queue.SimpleQueue()
        thread = Daemon("tried", partial(over.put, 1))
        raised += interrupted(partial(started, thread), chance.uniform(1e-6, 3e-4)) is None
        thread.start()
        assert over.get(timeout=SOON) == 1
        thread.join()
        assert over.empty() and not thread.is_alive()
    assert raised and not noise


def started(thread: Daemon) -> bool:
    thread.start()
    return True


def test_a_worker_that_a_signal_interrupts(noise: list[Any]) -> None:
    chance = random.Random(2)
    for _ in range(TIMES):
        worker = OrderedWorker("tried")
        interrupted(partial(worker.submit, int, 0), chance.uniform(1e-6, 3e-4))
        assert worker.submit(lambda: 7, 0).result(SOON) == 7
        assert worker.close(SOON)
    assert not noise


def test_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    thread = Daemon("refused", lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", refuse)
        with pytest.raises(ResourceError, match=r"thread refused: can't start new thread; .*ulimit -u"):
            thread.start()
        patch.undo()
        patch.setattr(threading, "_start_new_thread", refuse, raising=False)
        patch.setattr(threading, "_start_joinable_thread", refuse, raising=False)
        with pytest.raises(ResourceError, match="ulimit -u"):
            thread.start()
    thread.start()
    thread.join()
    assert not thread.is_alive()


def test_a_thread_that_is_never_started() -> None:
    thread = Daemon("never", lambda: None)
    thread.join()
    thread.start()
    assert thread.ident is None
