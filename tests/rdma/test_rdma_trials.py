"""Devices of two hosts that are tried, joined and given back, over the fake provider; both hosts are networks of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hosts import HOST, Hosts, close

from xvcomm.abc.cards import QueueEnd
from xvcomm.errors import ResourceError


@pytest.fixture
def hosts(fake_verbs: Path, fresh: Any) -> Iterator[Hosts]:
    with contextlib.ExitStack() as stack:
        yield Hosts(stack, fake_verbs, fresh())


def tried(hosts: Hosts) -> tuple[QueueEnd | None, QueueEnd | None, str]:
    """What the first host finds; all queue pairs are given back, and no connection stays."""
    (found,) = hosts.networks[0].try_pairs([1])[1]
    assert hosts.networks[0].rails() == hosts.networks[1].rails() == []
    return found.here, found.there, found.refusal


def ends() -> tuple[QueueEnd, QueueEnd]:
    return QueueEnd("fake0", 1, HOST), QueueEnd("fake7", 1, HOST)


def test_devices_that_work(hosts: Hosts) -> None:
    """Several times, and also once rings have made rails."""
    for _ in range(3):
        assert tried(hosts) == (*ends(), "")
    rings = hosts.rings()
    hosts.meet()
    (found,) = hosts.networks[1].try_pairs([0])[0]
    assert (found.there, found.here, found.refusal) == (*ends(), "")
    assert hosts.rails(0) == hosts.rails(1) == hosts.numbers
    close(*rings)


def test_a_device_that_gives_no_queue_pair(hosts: Hosts) -> None:
    hosts.cards[0].refusal = "fake0 gives no queue pair"
    assert tried(hosts) == (*ends(), "fake0 gives no queue pair")
    hosts.cards[0].refusal, hosts.cards[1].refusal = "", "fake7 gives no queue pair"
    assert tried(hosts) == (*ends(), "at the other end fake7 gives no queue pair")


def test_a_device_that_serves_the_address_no_more(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(address: str) -> QueueEnd:
        raise ResourceError(f"no active port of fake7 has a GID of the address {address}")

    monkeypatch.setattr(hosts.cards[1], "end", gone)
    why = f"at the other end no active port of fake7 has a GID of the address {HOST}"
    assert tried(hosts) == (ends()[0], None, why)


def test_frames_that_do_not_arrive(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a firewall drops what goes between the devices, but not TCP."""
    made = hosts.cards[1].pair

    def silent(address: str) -> Any:
        pair = made(address)
        pair.connect = lambda theirs: None
        return pair

    monkeypatch.setattr(hosts.cards[1], "pair", silent)
    here, there, why = tried(hosts)
    assert (here, there) == ends() and why


def test_a_host_that_has_gone(hosts: Hosts) -> None:
    hosts.networks[1].close()
    here, there, why = tried(hosts)
    assert (here, there, why) == (None, None, "no connection over TCP, by which they are joined: Connection refused")
