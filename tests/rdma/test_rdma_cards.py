"""The devices as the wire has them, between two hosts with Soft-RoCE."""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.rdma

SECONDS = 60.0
FRAME = 200


def own_addresses(host: Any) -> dict[str, str]:
    """Interfaces of this host by their addresses, of IPv4 and IPv6."""
    names = [(name, nic) for name in ("HOST_ADDR", "HOST_ADDR6") for nic in range(host.nics)]
    return {os.environ[f"{name}_{host.index}_{nic}"]: f"eth{nic}" for name, nic in names}


@pytest.fixture
def cards(other_host: Any) -> Iterator[Any]:
    from xvcomm.backends.rdma.cards import open_cards
    from xvcomm.config import Config

    made = open_cards(Config(rdma_timeout=12, rdma_retries=3), own_addresses(other_host), env={})
    assert made is not None
    yield made
    made.close()


@pytest.fixture
def join(other_host: Any, cards: Any) -> Iterator[Callable[[str], Any]]:
    """A function that joins this host's queue pair of an interface's address with the other host's."""
    pairs = []

    def joined(variable: str) -> Any:
        pair = cards.pair(os.environ[variable.format(other_host.index)])
        pairs.append(pair)
        theirs = other_host.swap([pair.description.hex(), pair.number, pair.device])
        pair.connect(bytes.fromhex(theirs[0]))
        other_host.swap()
        assert [pair.peer, pair.there] == theirs[1:]
        return pair

    yield joined
    for pair in pairs:
        pair.fail()
        pair.close()


def queue_of(pair: Any) -> Any:
    from xvcomm.wire.verbs import Queue

    return Queue.from_address(pair.queue)


def wait(pair: Any, over: Callable[[Any], bool]) -> Any:
    """Take completions until the queue pair's record says that it is over; the record."""
    import frames_driver

    queue, deadline = queue_of(pair), time.monotonic() + SECONDS
    while not over(queue):
        assert time.monotonic() < deadline, pair.failure() or f"{queue.received} frames have come"
        if not frames_driver.take(pair.completions):
            time.sleep(0)  # lets the kernel's part of Soft-RoCE run
    return queue


def test_the_addresses_that_devices_serve(other_host: Any, cards: Any) -> None:
    from xvcomm.errors import ResourceError

    assert all(map(cards.reaches, own_addresses(other_host)))
    there = os.environ[f"HOST_ADDR_{1 - other_host.index}_0"]
    assert not any(map(cards.reaches, ("127.0.0.1", "10.99.0.1", there)))
    with pytest.raises(ResourceError, match=r"no active port of rxe0, rxe1 has a GID of the address 10.99.0.1"):
        cards.pair("10.99.0.1")


@pytest.mark.parametrize("variable", ["HOST_ADDR_{}_0", "HOST_ADDR_{}_1", "HOST_ADDR6_{}_1"])
def test_frames_go_both_ways(other_host: Any, join: Any, variable: str) -> None:
    """As many as there are buffers, which are posted before the other side can send; the odd ones are taken along."""
    import frames_driver

    from xvcomm.wire.frames import BUFFER_BYTES, BUFFERS

    pair = join(variable)
    for number in range(BUFFERS):
        place = pair.outbox + number * BUFFER_BYTES
        ctypes.memset(place, 100 * other_host.index + number, FRAME)
        if number % 2 and pair.inline >= FRAME - 40:
            assert frames_driver.send_inline(pair.queue, place, FRAME - 40)
        else:
            assert frames_driver.send(pair.queue, place, pair.outbox_key, FRAME - 40 * (number % 2))
    queue = wait(pair, lambda queue: queue.received == BUFFERS and queue.ended == queue.posted)
    assert queue.written == queue.posted == BUFFERS
    for number in range(BUFFERS):
        came = ctypes.string_at(pair.inbox + number * BUFFER_BYTES, FRAME)
        size = FRAME - 40 * (number % 2)
        assert came == bytes([100 * (1 - other_host.index) + number]) * size + bytes(FRAME - size)
    assert pair.failure() == ""
    other_host.swap()


def test_registered_memory_is_there_for_all_devices(other_host: Any, cards: Any, join: Any) -> None:
    import frames_driver

    memory = np.zeros(2 * 4096, np.uint8)
    registered = cards.register(memory.ctypes.data, memory.nbytes)
    source = np.full(4096, 7 + other_host.index, np.uint8)
    sent = cards.register(source.ctypes.data, source.nbytes)
    assert len(registered.keys) == len(sent.keys) == other_host.nics
    for nic in range(other_host.nics):
        pair = join(f"HOST_ADDR_{{}}_{nic}")
        address, keys = other_host.swap([memory.ctypes.data + nic * 4096, [key.remote for key in registered.keys]])
        key = sent.keys[pair.device].local
        assert frames_driver.write(pair.queue, source.ctypes.data, key, address, keys[pair.there], 4096)
        wait(pair, lambda queue: queue.ended == queue.posted)
        assert pair.failure() == ""
        other_host.swap()
        assert (memory[nic * 4096 :][:4096] == 8 - other_host.index).all()
    for region in (registered, sent):
        region.close()
        region.close()
    other_host.swap()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def test_a_link_that_is_cut(other_host: Any, cards: Any, join: Any) -> None:
    """One side hears of it from its device, the other side's queue pair fails."""
    import frames_driver

    kept, cut = (join(f"HOST_ADDR_{{}}_{nic}") for nic in (0, 1))
    told: list[Any] = []
    watched: list[tuple[int, Callable[[], None]]] = []
    cards.watch(lambda fd, call: watched.append((fd, call)), lambda why, pairs: told.append((why, pairs)))
    other_host.swap()
    if other_host.index == 1:
        ip("link", "set", "eth1", "down")
        other_host.swap()
        deadline = time.monotonic() + SECONDS
        while not told:
            assert time.monotonic() < deadline
            for fd, call in watched:
                if select.select([fd], [], [], 0.1)[0]:
                    call()
        assert told[0][0].startswith("PORT_ERR: the link is down")
        assert told[0][1] == [cut]
        here, there = (other_host.address(host, 1) for host in (1, 0))
        assert cut.where == f"rxe1 port 1, GID {here} to {there}"
        other_host.swap()
        ip("link", "set", "eth1", "up")
    else:
        other_host.swap()
        assert frames_driver.send(cut.queue, cut.outbox, cut.outbox_key, FRAME)
        wait(cut, lambda queue: queue.status != 0)
        here, there = (other_host.address(host, 1) for host in (0, 1))
        why = f"rxe1 port 1, GID {here} to {there}: RETRY_EXC_ERR: the other side does not answer"
        assert cut.failure().startswith(why)
        assert kept.failure() == ""
        other_host.swap()
    other_host.swap()


def test_a_pair_that_is_given_back_early(other_host: Any, cards: Any) -> None:
    from xvcomm.errors import ResourceError

    pair = cards.pair(other_host.address(other_host.index, 0))
    with pytest.raises(ResourceError, match="makes no sense"):
        pair.connect(b"nonsense")
    for _ in range(2):
        pair.fail()
    for _ in range(2):
        pair.close()
    pair.fail()
    with pytest.raises(ResourceError, match="given back"):
        pair.connect(pair.description)
    assert pair.failure() == ""
    other_host.swap()


def test_a_forked_child_leaves_the_devices_to_its_parent(other_host: Any, cards: Any) -> None:
    pair = cards.pair(other_host.address(other_host.index, 0))
    child = os.fork()
    if child == 0:
        opened = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 256) if os.path.lexists(f"/proc/self/fd/{fd}")]
        left = os.readlink(f"/proc/self/fd/{pair.fd}") == os.devnull
        os._exit(0 if left and not any("infiniband" in name or "uverbs" in name for name in opened) else 1)
    assert os.waitpid(child, 0)[1] == 0
    pair.close()
    other_host.swap()
