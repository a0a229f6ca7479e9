"""Notices of a TCP store: read by all in order, with one for a process that ends without leaving."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from xvcomm.abc.store import PrefixStore
from xvcomm.errors import StoreError
from xvcomm.rendezvous.store import MemoryStore, TcpServer, TcpStore
from xvcomm.types.deadline import Deadline

pytestmark = pytest.mark.usefixtures("no_store_thread_left")
SOON = 10.0


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
