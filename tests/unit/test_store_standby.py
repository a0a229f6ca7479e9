"""Another process serves a store in place of one that has ended, at an address that was known before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from xvcomm.abc.store import Standby
from xvcomm.config import Config
from xvcomm.engine.session.succession import spare_ports
from xvcomm.errors import DeadlineExceeded, StoreError
from xvcomm.rendezvous.store import MemoryStore, TcpServer, TcpStore
from xvcomm.types.deadline import Deadline

pytestmark = pytest.mark.usefixtures("no_store_thread_left")
SOON = 60.0
ANY_PORT = (0,)


def client(server: TcpServer) -> TcpStore:
    return TcpStore("127.0.0.1", server.port, "secret", Deadline.after(SOON))


def opened(store: TcpStore) -> Standby:
    standby = store.standby(ANY_PORT)
    assert standby is not None
    return standby


def test_the_successor_is_served_when_it_is_wanted(server: TcpServer) -> None:
    """Clients that ask before wait for it; it is empty, and outlives the first server."""
    first, other = client(server), client(server)
    standby = opened(first)
    assert standby.local and not standby.wanted()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(other.successor, standby.address, Deadline.after(SOON))
        while not standby.wanted():
            assert not asked.done()
        standby.serve()
        there = asked.result(SOON)
    assert not standby.wanted()
    first.set("k", b"old")
    for store in (first, other):
        store.close()
    server.close()
    here = other.successor(standby.address, Deadline.after(SOON))
    with pytest.raises(DeadlineExceeded):
        here.get("k", Deadline.after(0))
    there.set("k", b"new")
    assert here.get("k", Deadline.after(SOON)) == b"new"
    for store in (here, there):
        store.close()
    standby.close()


def test_one_that_is_not_served_yet(server: TcpServer) -> None:
    store = client(server)
    standby = opened(store)
    with pytest.raises(DeadlineExceeded):
        store.successor(standby.address, Deadline.after(0.1))
    standby.close()
    store.close()


def test_one_that_has_ended(server: TcpServer) -> None:
    """It is known at once, also whether others have."""
    store = client(server)
    kept, gone = opened(store), opened(store)
    gone.close()
    assert not gone.wanted()
    with pytest.raises(StoreError):
        store.successor(gone.address, Deadline.after(SOON))
    assert store.ended([kept.address, gone.address]) == [gone.address]
    assert store.ended([]) == []
    kept.close()
    store.close()


def test_who_looks_whether_it_has_ended_does_not_want_it(server: TcpServer) -> None:
    store = client(server)
    standby = opened(store)
    assert store.ended([standby.address]) == [] and not standby.wanted()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(store.successor, standby.address, Deadline.after(SOON))
        while not standby.wanted():
            assert not asked.done()
        standby.serve()
        asked.result(SOON).close()
    standby.close()
    store.close()


def test_stores_without_a_successor() -> None:
    store = MemoryStore()
    assert store.standby(ANY_PORT) is None
    with pytest.raises(StoreError):
        store.successor("127.0.0.1 1", Deadline.after(SOON))


@pytest.mark.parametrize(
    ("ports", "local_size", "spare"),
    [
        (None, 4, range(1)),
        ("29600-29607", 4, range(29604, 29608)),
        ("29600-29606", 4, ()),
        ("29600", 1, ()),
        ("29600-29699", None, ()),
    ],
)
def test_ports_that_connections_do_not_need(
    ports: str | None, local_size: int | None, spare: range | tuple[()]
) -> None:
    assert list(spare_ports(Config(ports=ports, local_size=local_size))) == list(spare)
