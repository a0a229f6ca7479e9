"""What a rank posts in the job's store for the ranks of other hosts, and what it hears of them."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any
from unittest import mock

import msgspec
import pytest

from xvcomm.abc.store import Notices, Store
from xvcomm.engine.session.elsewhere import Departure, Elsewhere, Stop
from xvcomm.errors import DeadlineExceeded, ResourceError, StoreError
from xvcomm.rendezvous.store import MemoryStore
from xvcomm.rendezvous.store.moving import MovingStore
from xvcomm.rendezvous.store.tcp import TcpStore
from xvcomm.types.deadline import NEVER, Deadline

SOON = 60.0
DEPARTURE = Departure("0", 3)


class SlowStore(MemoryStore, Notices):
    """A store with notices: posts end when the test lets them, and `next` gives what the test has put into `coming`."""

    def __init__(self) -> None:
        super().__init__()
        self.posting, self.leaving, self.go_on = threading.Event(), threading.Event(), threading.Event()
        self.posted: list[Any] = []
        self.coming: SimpleQueue[Any] = SimpleQueue()
        self.quiet, self.given_up = 0.0, False

    def notices(
        self, place: str, will: bytes, silence: bytes = b"", patience: float = math.inf, deadline: Deadline = NEVER
    ) -> Notices:
        return self

    def next(self) -> bytes:
        if (notice := self.coming.get()) is None:
            raise StoreError("left")
        return msgspec.msgpack.encode(notice)

    def post(self, notice: bytes, deadline: Deadline) -> None:
        self.posted.append(msgspec.msgpack.decode(notice))
        self.posting.set()
        assert self.go_on.wait(SOON)

    def silence(self) -> float:
        return self.quiet

    def give_up(self) -> None:
        self.given_up = True

    def leave(self) -> None:
        self.leaving.set()
        self.coming.put(None)


class StuckStore(MemoryStore):
    """A store that does not answer who wants to follow its notices, before the test lets it, and then fails."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def notices(
        self, place: str, will: bytes, silence: bytes = b"", patience: float = math.inf, deadline: Deadline = NEVER
    ) -> Notices:
        assert self.go_on.wait(SOON)
        raise StoreError("lost")


def test_a_store_that_cannot_be_followed() -> None:
    """A rank goes on with its start meanwhile, and learns of it in the end."""
    store = StuckStore()
    elsewhere = follow(store)
    elsewhere.look()
    elsewhere.post(DEPARTURE)
    assert not elsewhere.tells
    store.go_on.set()
    with pytest.raises(StoreError, match="lost"):
        elsewhere.ready()
    assert not elsewhere.tells
    elsewhere.close()


_SERVING = """
import time
from xvcomm.rendezvous.store import TcpServer
print(TcpServer("127.0.0.1", 0, "secret").port, flush=True)
time.sleep(600)
"""


def test_a_stopped_store_is_followed_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the store may take to answer otherwise."""
    monkeypatch.setattr("xvcomm.rendezvous.store.tcp.ANSWER_SECONDS", 2 * SOON)
    with subprocess.Popen([sys.executable, "-c", _SERVING], stdout=subprocess.PIPE) as serving:
        try:
            assert serving.stdout is not None
            store = TcpStore("127.0.0.1", int(serving.stdout.readline()), "secret", Deadline.after(SOON))
            serving.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, serving.pid, os.WSTOPPED)
            begun = time.monotonic()
            elsewhere = follow(store, Deadline.after(0.1))
            with pytest.raises(DeadlineExceeded, match="stopped"):
                elsewhere.ready()
            elsewhere.close()
            assert time.monotonic() - begun < SOON
            store.close()
        finally:
            serving.kill()


def follow(store: Store, deadline: Deadline = NEVER, **calls: Any) -> Elsewhere:
    """Begin to follow a store as rank 0 of two, on a host of its own."""
    given = {"server": None, "transport": mock.Mock(), "losses": (), "lost": mock.Mock(), "told": mock.Mock(), **calls}
    return Elsewhere(store, 0, (0,), others=[1], timeout=10, deadline=deadline, **given)


def rank_0(store: Store, **calls: Any) -> Elsewhere:
    """The same, once it follows the store and all ranks have started."""
    elsewhere = follow(store, **calls)
    elsewhere.ready()
    elsewhere.meet()
    return elsewhere


@contextlib.contextmanager
def posting_fails(store: SlowStore, elsewhere: Elsewhere) -> Iterator[None]:
    """A departure could not be posted at first, and nothing can be meanwhile."""
    failed = threading.Event()

    def fail(notice: bytes, deadline: Deadline) -> None:
        failed.set()
        raise ResourceError("too many open files")

    with mock.patch.object(store, "post", side_effect=fail):
        elsewhere.post(DEPARTURE)
        assert failed.wait(SOON)
        yield


def test_a_stop_that_could_not_be_posted_before_the_job_moves_to_another_store() -> None:
    store = SlowStore()
    elsewhere = rank_0(store)
    with posting_fails(store, elsewhere):
        elsewhere.abandon(served=True)
        elsewhere.post(Stop("0", 1, "why"))
        elsewhere.join()
    assert elsewhere.unposted() == [Stop("0", 1, "why")]


@pytest.mark.parametrize("leaves", [True, False])
def test_what_could_not_be_posted_is_posted_again(leaves: bool) -> None:
    """For instance because the process can open no connection to the store for a while."""
    store = SlowStore()
    elsewhere = rank_0(store)
    with posting_fails(store, elsewhere):
        pass
    store.go_on.set()
    if not leaves:
        assert store.posting.wait(SOON)
    elsewhere.close()
    told = [msgspec.to_builtins(DEPARTURE)]
    assert store.posted in ([[0, True, False, told]], [[0, False, False, told], [0, True, False, []]])
    assert leaves or len(store.posted) == 2


def test_what_gathers_while_the_store_is_slow_goes_out_at_once() -> None:
    """So a rank that leaves waits for two posts at most, however many communicators it has closed."""
    store = SlowStore()
    elsewhere = rank_0(store)
    elsewhere.post(DEPARTURE)
    assert store.posting.wait(SOON)
    for number in range(100):
        elsewhere.post(Stop(str(number), 1, "why"))
    leaving = threading.Thread(target=elsewhere.close)
    leaving.start()
    assert store.leaving.wait(SOON)
    store.go_on.set()
    leaving.join(SOON)
    assert not leaving.is_alive()
    assert [(rank, left, len(news)) for rank, left, _, news in store.posted] == [(0, False, 1), (0, True, 100)]


class BusyStore(SlowStore):
    """A store that cannot be reached for the first two posts."""

    def post(self, notice: bytes, deadline: Deadline) -> None:
        self.posted.append(msgspec.msgpack.decode(notice))
        if len(self.posted) < 3:
            raise StoreError("no descriptor is free")


def test_news_that_could_not_be_posted_go_out_before_the_rank_leaves() -> None:
    store = BusyStore()
    elsewhere = rank_0(store)
    elsewhere.post(Stop("0", 1, "why"))
    elsewhere.flush()
    assert [(left, len(news)) for _, left, _, news in store.posted] == [(False, 1)] * 3
    elsewhere.close()
    assert store.posted[-1] == [0, True, False, []]


def test_news_of_a_communicator_is_no_death() -> None:
    """Ranks of other hosts are lost only by a notice that tells nothing else."""
    store, heard = SlowStore(), SimpleQueue[Any]()
    elsewhere = rank_0(store, told=lambda *news: heard.put(news), lost=lambda rank, _: heard.put(rank))
    store.go_on.set()
    for news in ([["Departure", "0", 3]], []):
        store.coming.put([1, False, False, news])
    assert heard.get(timeout=SOON) == (1, DEPARTURE)
    assert heard.get(timeout=SOON) == 1
    elsewhere.close()


def test_a_silent_store_of_this_host() -> None:
    """It is waited for, though a rank of another host is lost: its process is slow, and its end would be noticed."""
    store = SlowStore()
    store.go_on.set()
    elsewhere = rank_0(store, server=0, losses={1})
    store.quiet = SOON
    elsewhere.look()
    assert not store.given_up
    elsewhere.close()


@pytest.mark.parametrize("silent_first", [True, False])
def test_a_store_that_is_out_of_reach_like_its_rank(silent_first: bool) -> None:
    """What waits for the store ends if that does not answer and the rank that is tried is lost; for neither alone."""
    store = SlowStore()
    store.go_on.set()
    losses = set[int]()
    elsewhere = rank_0(store, losses=losses)
    for silence in (silent_first, not silent_first):
        assert not store.given_up
        if silence:
            store.quiet = SOON
        else:
            losses.add(1)
        elsewhere.look()
    assert store.given_up
    elsewhere.close()


def test_a_store_that_the_job_has_left() -> None:
    """Its silence does not concern the successor, which the job uses before a new `Elsewhere` follows it."""
    silent, successor = SlowStore(), SlowStore()
    silent.go_on.set()
    store = MovingStore(silent, lambda: None)
    elsewhere = rank_0(store, losses={1})
    silent.quiet = SOON
    elsewhere.abandon(served=False)
    store.move(successor)
    elsewhere.look()
    assert not successor.given_up
    silent.leave()
    elsewhere.join()
