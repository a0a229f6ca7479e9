"""Every store satisfies the contract, between threads and between processes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from xvcomm.abc.store import Add, Decide, Look, Post, PrefixStore, Set, Store
from xvcomm.errors import DeadlineExceeded, XvcommError
from xvcomm.rendezvous.store import FileStore, TcpServer, TcpStore
from xvcomm.rendezvous.store.moving import MovingStore
from xvcomm.types.deadline import NEVER, Deadline

pytestmark = pytest.mark.usefixtures("no_store_thread_left")
SOON = 60.0
Opener = Callable[[], Store]


def test_values_cross_and_are_replaced(opener: Opener) -> None:
    here, there = opener(), opener()
    for value in (b"", b"\0\xff" * 3, b"x" * 100_000):
        here.set("a/b c", value)
        assert there.get("a/b c", Deadline.after(SOON)) == value


def test_get_and_wait_block_until_the_key_comes(opener: Opener) -> None:
    here, there = opener(), opener()
    with ThreadPoolExecutor(2) as pool:
        got = pool.submit(here.get, "late", Deadline.after(SOON))
        waited = pool.submit(here.wait, ["late", "later"], NEVER)
        time.sleep(0.05)
        assert not got.done() and not waited.done()
        there.set("late", b"1")
        assert got.result(SOON) == b"1"
        there.add("later", 1)
        assert waited.result(SOON) is None


def test_one_client_gets_and_sets_at_once(opener: Opener) -> None:
    store = opener()
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(store.get, "own", Deadline.after(SOON))
        time.sleep(0.05)
        store.set("own", b"1")
        assert got.result(SOON) == b"1"


def test_deadlines_name_the_missing_keys(opener: Opener) -> None:
    store = opener()
    store.set("there", b"")
    with pytest.raises(DeadlineExceeded, match="'nowhere'"):
        store.get("nowhere", Deadline.after(0.05))
    with pytest.raises(DeadlineExceeded) as caught:
        store.wait(["there", "k1", "k2"], Deadline.after(0.05))
    assert "'k1'" in str(caught.value) and "'k2'" in str(caught.value) and "there'" not in str(caught.value)
    store.wait(["there"], Deadline.after(0))
    store.wait([], Deadline.after(0))
    assert store.get("there", Deadline.after(0)) == b""


def test_has_tells_what_is_set(opener: Opener) -> None:
    store = opener()
    place = PrefixStore("p", store)
    assert not place.has("k")
    store.set("p/k", b"")
    assert place.has("k") and not store.has("k")


def test_add_is_atomic_between_threads(opener: Opener) -> None:
    stores = [opener() for _ in range(4)]

    def count(store: Store) -> list[int]:
        return [store.add("n", 1) for _ in range(50)]

    with ThreadPoolExecutor(4) as pool:
        sums = [total for part in pool.map(count, stores) for total in part]
    assert sorted(sums) == list(range(1, 201))
    assert stores[0].add("n", -300) == -100
    assert stores[0].add("n", 0) == -100
    assert stores[0].get("n", Deadline.after(SOON)) == b"-100"


def test_the_first_caller_decides(opener: Opener) -> None:
    stores = [opener() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: stores[i].decide("d", b"%d" % i, Deadline.after(SOON)), range(4)))
    assert len(set(found)) == 1 and found[0] in (b"0", b"1", b"2", b"3")
    assert stores[0].get("d", Deadline.after(SOON)) == PrefixStore("p", stores[1]).decide("d", found[0]) == found[0]
    assert stores[2].decide("d", b"late") == found[0]


def test_an_exchange_carries_out_steps_in_order_and_then_waits(opener: Opener) -> None:
    here, there = (PrefixStore("p", opener()) for _ in range(2))
    assert here.exchange([]) == ([], [])
    steps = [
        Set("k", b"1"), Look("k"), Look("nowhere"), Add("n", 5), Add("n", -2), Decide("d", b"first"), Decide("d", b"late"),
        Post("place", b"a"), Post("place", b"b"),
    ]  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(here.exchange, steps, ["late", "place/2"], Deadline.after(SOON))
        assert there.get("place/2", Deadline.after(SOON)) == b"b"  # the steps are not held back by the wait
        assert not asked.done()
        there.set("late", b"x")
        given, found = asked.result(SOON)
    assert given == [b"", b"1", b"", b"5", b"3", b"first", b"first", b"1", b"2"] and found == [b"x", b"b"]


def test_an_exchange_tells_which_keys_nobody_has_set_in_time(opener: Opener) -> None:
    store = opener()
    begun = time.monotonic()
    given, found = store.exchange([Set("k", b"1")], ["k", "nowhere"], Deadline.after(SOON), patience=0.05)
    assert time.monotonic() - begun < SOON / 2
    assert (given, found) == ([b""], [b"1", None])
    assert store.exchange([], ["nowhere", "k"], Deadline.after(0)) == ([], [None, b"1"])


def test_what_is_published_is_there_after_an_exchange(opener: Opener) -> None:
    store, other = opener(), opener()
    moving = MovingStore(PrefixStore("p", store), lambda: None)
    PrefixStore("q", moving).publish("k", b"1")
    assert PrefixStore("part", moving).exchange([Add("n", 1)]) == ([b"1"], [])
    assert other.get("p/q/k", Deadline.after(0)) == b"1"
    assert other.get("p/part/n", Deadline.after(0)) == b"1"
    store.publish("directly", b"2")
    store.exchange([])
    assert other.get("directly", Deadline.after(SOON)) == b"2"


def test_what_is_published_goes_to_the_next_store_if_an_exchange_fails(opener: Opener) -> None:
    first, second = opener(), opener()
    moving = MovingStore(PrefixStore("first", first), lambda: None)
    moving.publish("k", b"v")
    first.set("first/text", b"not a number")
    with pytest.raises((XvcommError, ValueError)):
        moving.exchange([Add("text", 1)], deadline=Deadline.after(10))
    moving.move(PrefixStore("second", second))
    moving.exchange([], deadline=Deadline.after(10))
    assert second.get("second/k", Deadline.after(0)) == b"v"


def test_prefixes_keep_apart(opener: Opener) -> None:
    store = opener()
    one, other = PrefixStore("one", store), PrefixStore("other", store)
    one.set("k", b"1")
    assert other.add("n", 5) == 5
    assert one.add("n", 1) == 1
    assert store.get("one/k", Deadline.after(SOON)) == b"1"
    with pytest.raises(DeadlineExceeded, match="other/k"):
        other.wait(["k"], Deadline.after(0))


def _child_adds(folder: str, port: int, count: int) -> None:
    tcp = TcpStore("127.0.0.1", port, "secret", Deadline.after(SOON))
    file = FileStore(folder)
    for _ in range(count):
        file.add("n", 1)
        tcp.add("n", 1)
    tcp.close()


def test_add_is_atomic_between_processes(server: TcpServer, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=_child_adds, args=(str(tmp_path), server.port, 50)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
        child.close()
    store = TcpStore("127.0.0.1", server.port, "secret", Deadline.after(SOON))
    assert store.add("n", 0) == FileStore(tmp_path).add("n", 0) == 150
    store.close()
