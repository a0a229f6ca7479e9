"""Which devices are opened, what is said of the others, and what their events mean for queue pairs, over the fake provider."""

from __future__ import annotations

import select
import sys
from collections.abc import Callable, Iterator
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

import pytest
from fabric import Fabric, FakeDevice

from xvcomm.backends.rdma import cards as module
from xvcomm.backends.rdma.cards import RdmaCards, open_cards
from xvcomm.backends.rdma.choice import PortChoice
from xvcomm.backends.rdma.devices import Device, Gid, Port
from xvcomm.config import Config
from xvcomm.wire.frames import MAX_DEVICES

ALL = PortChoice(None, {})


def port(address: str, number: int = 1, state: str = "active") -> Port:
    """A port whose network interface has an address."""
    gid = Gid(3, IPv6Address(f"::ffff:{address}").packed, "RoCE v2", "eth0", address)
    return Port(number, state, "Ethernet", 1024, 0, (gid,))


def ports(name: str, down: str = "") -> tuple[Port, ...]:
    """Those of device fakeN: one, with the address 10.0.N.1."""
    return (port(f"10.0.{name[4:]}.1", state="down" if name == down else "active"),)


class FakeDomain:
    """An open device, see `ports`."""

    opened: list[str]

    def __init__(self, name: str) -> None:
        self.name, self.descriptors, self.context = name, [], 0
        self.opened.append(name)

    def ask(self) -> Device:
        """Its port."""
        return Device(self.name, ports(self.name))

    def close(self) -> None:
        """It is not open any more."""
        if self.name in self.opened:
            self.opened.remove(self.name)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """A function that gives the host so many devices, and names its interfaces by their addresses."""

    def devices(count: int, down: str = "") -> dict[str, str]:
        monkeypatch.setattr(module.sysfs, "names", lambda: [f"fake{i}" for i in range(count)])
        monkeypatch.setattr(module.sysfs, "ports", lambda name: ports(name, down))
        monkeypatch.setattr(module, "locked", list)
        monkeypatch.setattr("xvcomm.system.notice.speaks", lambda: True)
        return {f"10.0.{i}.1": f"eth{i}" for i in range(count)}

    return devices


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices that are open."""
    FakeDomain.opened = []
    monkeypatch.setattr("xvcomm.backends.rdma.pairs.Domain", FakeDomain)
    return FakeDomain.opened


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_devices_of_the_interfaces_in_use_are_opened(host: Any, opened: list[str], caplog: Any) -> None:
    addresses = host(4, down="fake2")
    del addresses["10.0.1.1"]
    found = open_cards(Config(), addresses, env={})
    assert found is not None
    assert opened == ["fake0", "fake3"]
    assert [address for address in ("10.0.0.1", "10.0.1.1", "10.0.3.1", "10.0.9.1") if found.reaches(address)] == [
        "10.0.0.1",
        "10.0.3.1",
    ]
    found.close()
    found.close()
    assert opened == said(caplog) == []


def test_no_device_is_looked_at_where_rdma_is_off(host: Any, opened: list[str]) -> None:
    assert open_cards(Config(rdma=0), host(1), env={}) is None
    assert open_cards(Config(), host(1), env={"NCCL_IB_DISABLE": "1"}) is None
    assert open_cards(Config(tls=1), host(1), env={}) is None
    assert open_cards(Config(), {}, env={}) is None
    assert opened == []


def test_more_devices_than_a_process_uses(host: Any, opened: list[str], caplog: Any) -> None:
    found = open_cards(Config(), host(MAX_DEVICES + 1), env={})
    assert found is not None
    assert opened == [f"fake{i}" for i in range(MAX_DEVICES)]
    (text,) = said(caplog)
    assert f"no RDMA over fake{MAX_DEVICES}, but TCP: a process uses at most {MAX_DEVICES} devices" in text
    found.close()


def test_one_warning_where_pyverbs_is_missing(host: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    assert open_cards(Config(), host(2), env={}) is None
    (text,) = said(caplog)
    assert "no RDMA over fake0, fake1, but TCP: pyverbs is missing" in text and "XVCOMM_RDMA=0" in text


def test_a_partition_that_is_missing(host: Any, opened: list[str], caplog: Any) -> None:
    assert open_cards(Config(rdma_partition_key=0x8001), host(1), env={}) is None
    assert "not in the partition XVCOMM_RDMA_PARTITION_KEY=0x8001" in said(caplog)[0]


class TwoPorts(FakeDomain):
    """An open device N whose ports have the addresses 10.N.1.1 and 10.N.2.1."""

    def ask(self) -> Device:
        """Both ports."""
        return Device(self.name, tuple(port(f"10.{self.name[4:]}.{number}.1", number) for number in (1, 2)))


class FakeRail:
    """A queue pair as the devices count it."""

    def __init__(
        self, domain: Any, device: int, port: Port, gid: Gid, options: Any, closed: Any, *, direct: bool
    ) -> None:
        self.device, self.port, self._closed, self.failed = device, port, closed, False
        self.fake = FakeRail.devices[device].pair(FakeRail.devices[device].queue())
        self.number = self.fake.number

    devices: list[FakeDevice]

    def fail(self) -> None:
        """It carries nothing any more."""
        self.failed = True

    def close(self) -> None:
        """Given back."""
        self._closed(self)


class World:
    """Two devices of the fake provider with a queue pair on each of two ports, and what is told of them."""

    def __init__(self, fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
        self.devices = FakeRail.devices = [fabric.device() for _ in range(2)]
        monkeypatch.setattr(module, "Events", lambda name, context: self.devices[int(name[4:])].events())
        monkeypatch.setattr("xvcomm.backends.rdma.rails.RailPair", FakeRail)
        self.cards = RdmaCards([TwoPorts(f"fake{i}") for i in range(2)], ALL, Config(), {})  # type: ignore[arg-type]
        self.pairs: list[Any] = [self.cards.pair(f"10.{device}.{number}.1") for device in range(2) for number in (1, 2)]
        self.told: list[tuple[str, list[int]]] = []
        self.cards.watch(self._add, lambda why, pairs: self.told.append((why, sorted(p.number for p in pairs))))

    def _add(self, fd: int, call: Callable[[], None]) -> None:
        self.fd, self.call = fd, call

    def hear(self) -> list[tuple[str, list[int]]]:
        """What has been told since the last time; what there was to read was read."""
        if select.select([self.fd], [], [], 0)[0]:
            self.call()
        assert not select.select([self.fd], [], [], 0)[0]
        found, self.told[:] = list(self.told), []
        return found

    def numbers(self, *pairs: int) -> list[int]:
        """Of these queue pairs."""
        return sorted(self.pairs[pair].number for pair in pairs)


@pytest.fixture
def world(fake_verbs: Path, fresh: Any, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with Fabric(fake_verbs, fresh()) as fabric:
        made = World(fabric, monkeypatch)
        yield made
        made.cards.close()


def test_whom_an_event_concerns(world: World) -> None:
    assert world.hear() == []
    first, second = world.devices
    first.report("PORT_ERR", port=2)
    ((why, pairs),) = world.hear()
    assert why.startswith("fake0 port 2: PORT_ERR: the link is down")
    assert pairs == world.numbers(1)
    first.report("PORT_ACTIVE", port=2)
    first.report("GID_CHANGE", port=1)
    assert world.hear() == []
    world.pairs[3].fake.report("QP_FATAL")
    second.report("DEVICE_FATAL")
    assert [pairs for _, pairs in world.hear()] == [world.numbers(3), world.numbers(2, 3)]


def test_pairs_that_were_given_back_are_not_told_of(world: World) -> None:
    world.pairs[0].close()
    world.devices[0].report("DEVICE_FATAL")
    assert [pairs for _, pairs in world.hear()] == [world.numbers(1)]


def test_a_device_that_was_removed_is_not_asked_again(world: World) -> None:
    world.devices[0].remove()
    ((why, pairs),) = world.hear()
    assert "was it removed" in why and pairs == world.numbers(0, 1)
    world.devices[1].report("PORT_ERR", port=1)
    assert [pairs for _, pairs in world.hear()] == [world.numbers(2)]


def test_what_is_left_is_given_back_with_the_devices(world: World, opened: list[str]) -> None:
    world.pairs[1].close()
    world.cards.close()
    assert [pair.failed for pair in world.pairs] == [True, False, True, True]
    assert opened == []
