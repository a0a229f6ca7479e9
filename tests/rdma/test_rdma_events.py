"""Events of devices, ports and queue pairs: of the fake provider, and of two hosts with Soft-RoCE whose links go down."""

from __future__ import annotations

import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fabric import Fabric

from xvcomm.backends.rdma.events import NAMES, Events
from xvcomm.errors import ResourceError

SECONDS = 60.0


@pytest.fixture
def fabric(fake_verbs: Path, fresh: Any) -> Iterator[Fabric]:
    with Fabric(fake_verbs, fresh()) as made:
        yield made


def ready(events: Events) -> bool:
    return bool(select.select([events.fd], [], [], 0)[0])


def test_events_are_read_without_blocking_and_in_order(fabric: Fabric) -> None:
    device = fabric.device()
    events = device.events()
    assert not ready(events)
    assert list(events.take()) == []
    device.report("PORT_ERR", port=2)
    device.report("PORT_ACTIVE", port=2)
    device.report("DEVICE_FATAL")
    assert ready(events)
    down, up, fatal = events.take()
    assert (down.name, down.port, down.queue_pair, down.completion_queue, down.loss) == ("PORT_ERR", 2, 0, 0, True)
    assert str(down).startswith("PORT_ERR: the link is down: the cable")
    assert (up.name, up.port, up.loss) == ("PORT_ACTIVE", 2, False)
    assert (fatal.name, fatal.port, fatal.loss) == ("DEVICE_FATAL", 0, True)
    assert "all its queue pairs are lost" in str(fatal)
    assert not ready(events)


@pytest.mark.parametrize("name", ["QP_FATAL", "QP_REQ_ERR", "QP_ACCESS_ERR", "COMM_EST"])
def test_events_of_queue_pairs_name_them_and_are_acknowledged(fabric: Fabric, name: str) -> None:
    device = fabric.device()
    events, queue = device.events(), device.queue()
    pairs = [device.pair(queue) for _ in range(3)]
    for pair in (pairs[1], pairs[2], pairs[1]):
        pair.report(name)
    found = list(events.take())
    assert [event.queue_pair for event in found] == [pairs[i].number for i in (1, 2, 1)]
    assert {(event.name, event.port, event.loss) for event in found} == {(name, 0, name != "COMM_EST")}
    pairs[1].close()  # waits for ever, or fails here, unless its events were acknowledged


def test_events_of_completion_queues_name_them_and_are_acknowledged(fabric: Fabric) -> None:
    device = fabric.device()
    events, queues = device.events(), [device.queue() for _ in range(2)]
    queues[1].report()
    (event,) = events.take()
    assert (event.name, event.completion_queue, event.loss) == ("CQ_ERR", queues[1].record.queue, True)
    assert (event.port, event.queue_pair) == (0, 0)  # the fixture fails unless it was acknowledged


def test_a_device_that_is_removed(fabric: Fabric) -> None:
    device = fabric.device()
    events = device.events()
    device.report("DEVICE_FATAL")
    device.remove()
    taken = events.take()
    assert next(taken).name == "DEVICE_FATAL"
    with pytest.raises(ResourceError, match=r"fake0 reports no events any more: .*was it removed"):
        next(taken)


def take_until(events: Events, wanted: set[str], known: list[Any]) -> list[Any]:
    """The events until all that are wanted have come; sleeps on the descriptor."""
    found, deadline = list(known), time.monotonic() + SECONDS
    while not wanted <= {event.name for event in found}:
        left = deadline - time.monotonic()
        assert left > 0, f"only {[str(event) for event in found]}"
        if select.select([events.fd], [], [], left)[0]:
            found += events.take()
    return found


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def domain() -> Iterator[Any]:
    """The device of the second NIC."""
    from xvcomm.backends.rdma.pairs import Domain

    made = Domain("rxe1")
    yield made
    made.close()


@pytest.mark.rdma
def test_the_names_are_those_of_the_library(other_host: Any) -> None:
    import ctypes

    import pyverbs.device  # noqa: F401  (loads the library)

    text = ctypes.CDLL("libibverbs.so.1").ibv_event_type_str
    text.restype = ctypes.c_char_p
    known = [text(number).decode() for number in range(len(NAMES) + 1)]
    assert known[-1] == "unknown"
    for number, words in (
        (0, "CQ error"),
        (8, "local catastrophic error"),
        (10, "port error"),
        (18, "GID table change"),
    ):
        assert words in known[number], known


@pytest.mark.rdma
def test_a_link_that_goes_down_and_up(other_host: Any, domain: Any) -> None:
    events = Events(domain.name, domain.context)
    assert list(events.take()) == []
    other_host.swap()
    if other_host.index == 1:
        ip("link", "set", "eth1", "down")
        found = take_until(events, {"PORT_ERR"}, [])
        ip("link", "set", "eth1", "up")
        found = take_until(events, {"PORT_ACTIVE"}, found)
        names = [event.name for event in found]
        assert names.index("PORT_ERR") < names.index("PORT_ACTIVE")
        assert {(event.port, event.queue_pair) for event in found} == {(1, 0)}
        assert str(next(e for e in found if e.name == "PORT_ERR")).startswith("PORT_ERR: the link is down")
    other_host.swap()


@pytest.mark.rdma
def test_addresses_that_come_and_go(other_host: Any, domain: Any) -> None:
    from xvcomm.backends.rdma.devices import devices

    events = Events(domain.name, domain.context)
    address = f"10.78.1.{other_host.index + 1}"
    for action, there in (("add", True), ("del", False)):
        ip("address", action, f"{address}/24", "dev", "eth1")
        (event, *_) = take_until(events, {"GID_CHANGE"}, [])
        assert (event.name, event.port, event.loss) == ("GID_CHANGE", 1, False)
        (port,) = next(device for device in devices() if device.name == "rxe1").ports
        assert (address in {gid.address for gid in port.gids}) == there
    other_host.swap()
