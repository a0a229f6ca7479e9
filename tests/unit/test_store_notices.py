"""Notices of a TCP store: read by all in order, with one for a process that ends without leaving."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from xvcomm.abc.store import PrefixStore
from xvcomm.errors import StoreError
from xvcomm.rendezvous.store import MemoryStore, TcpServer, TcpStore
from xvcomm.testing.signals import await_that
from xvcomm.types.deadline import Deadline

pytestmark = pytest.mark.usefixtures("no_store_thread_left")
SOON = 60.0


def client(server: TcpServer) -> TcpStore:
    return TcpStore("127.0.0.1", server.port, "secret", Deadline.after(SOON))


def test_everyone_reads_all_notices_in_order(server: TcpServer) -> None:
    stores = [client(server) for _ in range(2)]
    one, other = (PrefixStore("job", store).notices("place", b"lost") for store in stores)
    assert one is not None and other is not None
    for notice in (b"a", b"b"):
        one.post(notice, Deadline.after(SOON))
    assert [one.next(), one.next()] == [other.next(), other.next()] == [b"a", b"b"]
    for store in stores:
        store.close()


def test_a_process_that_is_killed_leaves_its_will(server: TcpServer) -> None:
    text = (
        "from xvcomm.rendezvous.store import TcpStore\nfrom xvcomm.types.deadline import Deadline\n"
        f"store = TcpStore('127.0.0.1', {server.port}, 'secret', Deadline.after({SOON}))\n"
        "store.notices('place', b'died')\nprint('there', flush=True)\ninput()"
    )
    store = client(server)
    following = store.notices("place", b"")
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        process.kill()
        assert following.next() == b"died"
    store.close()


def test_notices_are_read_without_following_them(server: TcpServer) -> None:
    store = client(server)
    following, place = store.notices("p/place", b""), PrefixStore("p", store)
    assert place.posted("place", 0) == []
    for notice in (b"a", b"b"):
        following.post(notice, Deadline.after(SOON))
    assert place.posted("place", 0) == [b"a", b"b"] and place.posted("place", 1) == [b"b"]
    assert MemoryStore().posted("place", 0) == []
    store.close()


def test_many_notices_come_in_several_answers(server: TcpServer) -> None:
    store = client(server)
    following, big = store.notices("place", b""), [bytes([number]) * 600_000 for number in range(4)]
    for notice in big:
        following.post(notice, Deadline.after(SOON))
    some = store.posted("place", 0)
    assert 1 <= len(some) < len(big) and some + store.posted("place", len(some)) == big
    assert [following.next() for _ in big] == big
    store.close()


@pytest.mark.parametrize("decided", [False, True])
def test_a_process_that_ends_decides(server: TcpServer, decided: bool) -> None:
    """Unless the key was decided before. The connection serves other requests as well, so none is added."""
    staying, leaving = client(server), client(server)
    before = len(os.listdir("/proc/self/fd"))
    for key in ("verdict", "another"):
        assert PrefixStore("job", leaving).decide_at_end(key, b"ended")
        assert leaving.add("n", 1) >= 1
    assert len(os.listdir("/proc/self/fd")) == before
    if decided:
        assert staying.decide("job/verdict", b"done") == b"done"
    leaving.close()
    assert staying.get("job/another", Deadline.after(SOON)) == b"ended"
    assert staying.get("job/verdict", Deadline.after(SOON)) == (b"done" if decided else b"ended")
    assert not MemoryStore().decide_at_end("verdict", b"")
    staying.close()


def test_who_leaves_posts_nothing(server: TcpServer) -> None:
    staying, leaving = client(server), client(server)
    following, left = staying.notices("place", b""), leaving.notices("place", b"died")
    left.leave()
    left.leave()
    leaving.close()
    following.post(b"next", Deadline.after(SOON))
    assert following.next() == b"next"
    staying.close()


@pytest.mark.parametrize("end", ["server", "self"])
def test_an_end_wakes_who_follows(server: TcpServer, end: str) -> None:
    store = client(server)
    following = store.notices("place", b"")
    ended = threading.Timer(0.2, server.close if end == "server" else following.leave)
    ended.start()
    with pytest.raises(StoreError):
        following.next()
    ended.join()
    store.close()


def test_a_store_that_sees_no_ends_has_no_notices() -> None:
    assert MemoryStore().notices("place", b"") is None


def test_a_store_that_is_far_away_has_a_second_connection(server: TcpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made ahead, since to make it takes several round trips; the notices keep one for themselves."""
    monkeypatch.setattr("xvcomm.rendezvous.store.tcp._FAR_SECONDS", 0.0)
    before = len(os.listdir("/proc/self/fd"))
    store = client(server)
    await_that(lambda: all(thread.name != "xvcomm-dial" for thread in threading.enumerate()))
    assert len(os.listdir("/proc/self/fd")) == before + 4  # both ends lie in this process
    store.notices("place", b"")
    assert store.add("n", 1) == 1
    assert len(os.listdir("/proc/self/fd")) == before + 4
    store.close()
