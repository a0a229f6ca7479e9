"""Which devices are opened, what is said of the others, and what their events mean for queue pairs, over the fake provider."""

from __future__ import annotations

import select
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from errno import EFAULT, ENODEV, ENOMEM
from ipaddress import IPv6Address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fabric import Fabric, FakeDevice

from xvcomm.abc.nic_memory import SupportsNicMemory
from xvcomm.backends.rdma import cards as module
from xvcomm.backends.rdma.cards import RdmaCards, open_cards
from xvcomm.backends.rdma.choice import PortChoice
from xvcomm.backends.rdma.devices import Device, Gid, Port
from xvcomm.backends.rdma.library import reason
from xvcomm.backends.rdma.regions import with_optional
from xvcomm.config import Config
from xvcomm.errors import ResourceError
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
    relaxed = 1

    def __init__(self, name: str) -> None:
        self.name, self.descriptors, self.context = name, [], 0
        self.opened.append(name)

    def ask(self) -> Device:
        """Its port."""
        return Device(self.name, ports(self.name))

    def register(
        self, address: int, nbytes: int, *, iova: int = 0, readable: bool = False, ordered: bool = True
    ) -> Any:  # fmt: skip
        """It registers no memory."""
        raise ResourceError(f"{self.name} does not register {nbytes} bytes")

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


class FakeGpu(SupportsNicMemory):
    """A GPU whose memory devices register by its address, if they register any."""

    needs_write = True

    def __init__(self, address: str = "0000:65:00.0") -> None:
        self._address = address

    def bus(self) -> str:
        """Its place, of which the kernel knows nothing."""
        return self._address

    def nic_memory(self, nbytes: int) -> int:
        """A page."""
        return 4096

    def return_nic_memory(self, address: int, nbytes: int) -> None:
        """Given back."""

    def dma_buf(self, address: int, nbytes: int) -> int:
        """Not given by the driver."""
        raise ResourceError("the driver exports no dma-buf")


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


@pytest.mark.parametrize(("gpu", "wanted"), [("0000:65:00.0", ["fake1"]), ("0000:66:00.0", ["fake0", "fake1"])])
@pytest.mark.parametrize("direct", [0, 1])
def test_a_file_gives_devices_to_a_gpu_whose_rings_lie_in_host_memory(
    host: Any, opened: list[str], tmp_path: Path, direct: int, gpu: str, wanted: list[str]
) -> None:
    """Because a setting wants that, or because no device reaches the GPU; GPUs that it does not name use all."""
    file = tmp_path / "affinity.json"
    file.write_text('{"0000:65:00.0": ["fake1"]}')
    config = Config(device_direct=direct, affinity=str(file))
    found = open_cards(config, host(2), FakeGpu(gpu), env={})  # type: ignore[arg-type]
    assert found is not None and not found.has_direct
    assert opened == wanted
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
    """An open device N whose ports have the addresses 10.N.1.1 and 10.N.2.1.

    Attributes:
        ports: by their numbers.
        ordered: of each memory that it was to register, whether in order.
        refuses, removed: it registers no memory; it does not answer any more either.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.ports = {number: port(f"10.{name[4:]}.{number}.1", number) for number in (1, 2)}
        self.refuses = self.removed = False
        self.ordered: list[bool] = []

    def ask(self) -> Device:
        """Both ports."""
        if self.removed:
            raise ResourceError(f"{self.name} does not tell its ports: No such device")
        return Device(self.name, tuple(self.ports.values()))

    def register(
        self, address: int, nbytes: int, *, iova: int = 0, readable: bool = False, ordered: bool = True
    ) -> Any:  # fmt: skip
        """Memory with keys that no other device has."""
        self.ordered.append(ordered)
        if self.removed or self.refuses:
            raise ResourceError(f"{self.name} does not register {nbytes} bytes")
        return SimpleNamespace(lkey=1 + int(self.name[4:]), rkey=11 + int(self.name[4:]))

    def release(self, region: Any) -> bool:
        """Registered no more."""
        return True


class FakeRail:
    """A queue pair as the devices count it."""

    def __init__(
        self, domain: Any, device: int, port: Port, gid: Gid, options: Any, closed: Any, *, direct: bool
    ) -> None:
        self.device, self.port, self.gid, self._closed, self.failed = device, port, gid, closed, False
        self.source = gid
        self.completions = FakeRail.devices[device].queue()
        self.fake = FakeRail.devices[device].pair(self.completions)
        self.number = self.fake.number
        self.numbers, self.completion_queues = [self.number], [self.completions.record.queue]

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
        self.domains = [TwoPorts(f"fake{i}") for i in range(2)]
        self.cards = RdmaCards(self.domains, ALL, Config(), {})  # type: ignore[arg-type]
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
    assert why.startswith("PORT_ERR: the link is down")
    assert pairs == world.numbers(1)
    first.report("PORT_ACTIVE", port=2)
    first.report("GID_CHANGE", port=1)
    assert world.hear() == []
    world.pairs[3].fake.report("QP_FATAL")
    second.report("DEVICE_FATAL")
    assert [pairs for _, pairs in world.hear()] == [world.numbers(3), world.numbers(2, 3)]


def test_a_completion_queue_that_overflows_concerns_its_rail_alone(world: World) -> None:
    world.pairs[1].completions.report()
    ((why, pairs),) = world.hear()
    assert why.startswith("CQ_ERR: a completion queue has overflowed") and pairs == world.numbers(1)


@pytest.mark.parametrize("place", [None, 7], ids=["gone", "moved"])
def test_a_gid_that_is_gone_or_has_moved(world: World, place: int | None) -> None:
    """The rails that use it, of this port alone; a GID that has come is no loss."""
    found, ports = world.domains[0].ports[2], world.domains[0].ports
    ports[2] = replace(found, gids=(*found.gids, *port("10.9.9.9", 2).gids))
    world.devices[0].report("GID_CHANGE", port=2)
    assert world.hear() == []
    ports[2] = replace(found, gids=() if place is None else (replace(found.gids[0], index=place),))
    world.devices[0].report("GID_CHANGE", port=1)
    assert world.hear() == []
    world.devices[0].report("GID_CHANGE", port=2)
    ((why, pairs),) = world.hear()
    assert why.startswith("GID_CHANGE: the GID has gone") and pairs == world.numbers(1)


def test_pairs_that_were_given_back_are_not_told_of(world: World) -> None:
    world.pairs[0].close()
    world.devices[0].report("DEVICE_FATAL")
    assert [pairs for _, pairs in world.hear()] == [world.numbers(1)]


def test_a_device_that_was_removed_is_not_asked_again(world: World) -> None:
    world.devices[0].remove()
    world.domains[0].removed = True
    ((why, pairs),) = world.hear()
    assert "was it removed" in why and pairs == world.numbers(0, 1)
    world.devices[1].report("PORT_ERR", port=1)
    assert [pairs for _, pairs in world.hear()] == [world.numbers(2)]


def test_the_others_serve_on_beside_a_device_that_was_removed(world: World) -> None:
    """They make rails and register memory; the removed one has no keys, and what it served is refused with its reason."""
    world.domains[0].removed = True
    assert world.cards.reaches("10.1.2.1") and world.cards.pair("10.1.2.1").device == 1
    assert not world.cards.reaches("10.0.2.1")
    with pytest.raises(ResourceError, match=r"no active port .* 10\.0\.2\.1; fake0 does not tell its ports"):
        world.cards.pair("10.0.2.1")
    assert world.cards.register(4096, 4096).keys == [(0, 0), (2, 12)]
    world.domains[1].removed = True
    with pytest.raises(ResourceError, match="does not register"):
        world.cards.register(4096, 4096)


def test_memory_that_one_device_refuses_is_registered_with_none(world: World) -> None:
    world.domains[0].refuses = True
    with pytest.raises(ResourceError, match="fake0 does not register"):
        world.cards.register(4096, 4096)


@pytest.mark.parametrize(("number", "helps"), [(ENOMEM, "ulimit -l"), (EFAULT, "mapped read-only"), (ENODEV, "device")])
def test_what_helps_where_memory_is_refused(number: int, helps: str) -> None:
    """The limit of locked memory is named only where it may be the cause."""
    assert helps in reason(number)
    assert ("ulimit -l" in reason(number)) == (number == ENOMEM)


def test_payload_may_come_in_any_order(world: World) -> None:
    """To rings, but for those of a GPU that sees it only once a WRITE has come behind it."""
    from xvcomm.backends.rdma.slots import DirectSlots

    gpu = FakeGpu()
    world.cards.register(4096, 4096).close()
    for gpu.needs_write in (True, False):
        DirectSlots(gpu, world.domains, 4096).close()  # type: ignore[arg-type]
    assert world.domains[0].ordered == world.domains[1].ordered == [False, True, False]


@pytest.mark.parametrize(("writes", "reads"), [("direct", "bytes"), ("registered", "direct")])
def test_each_direction_is_decided_on_its_own(
    world: World, monkeypatch: pytest.MonkeyPatch, writes: str, reads: str
) -> None:
    """One device that reads the memory badly keeps no ring from it that is received into, and the other way round."""
    from xvcomm.backends.rdma import direct, trials

    def try_device(device: Any, domain: Any, way: Any, options: Any) -> list[trials.Trial]:
        bad = domain.name == "fake1"
        return [
            trials.Trial(domain.name, direction, grade if bad else "direct", "")
            for direction, grade in ((trials.WRITES, writes), (trials.READS, reads))
        ]

    monkeypatch.setattr(direct, "try_device", try_device)
    memory = direct.DirectMemory(FakeGpu(), world.domains, [None, None], {})  # type: ignore[arg-type]
    assert memory.works
    for producer, grade in ((False, writes), (True, reads)):
        slots = memory.slots(4096, producer=producer)
        assert (slots is not None) == (grade == "direct")
        if slots is not None:
            slots.close()


@pytest.mark.parametrize(
    ("config", "env", "relaxed"),
    [
        ({}, {}, True), ({}, {"NCCL_IB_PCI_RELAXED_ORDERING": "0"}, False), ({"rdma_relaxed_ordering": 0}, {}, False),
        ({}, {"NCCL_IB_PCI_RELAXED_ORDERING": "2"}, True),
        ({"rdma_relaxed_ordering": 1}, {"NCCL_IB_PCI_RELAXED_ORDERING": "0"}, True),
    ],
)  # fmt: skip
def test_relaxed_ordering_is_a_setting(
    host: Any, opened: list[str], config: dict[str, int], env: dict[str, str], relaxed: bool
) -> None:
    found = open_cards(Config(**config), host(1), env=env)
    assert found is not None
    (domain,) = found._domains
    assert bool(domain.relaxed) == relaxed
    found.close()


RELAXED = 1 << 20


@pytest.mark.parametrize(("known", "refuses"), [(True, False), (False, False), (True, True)])
def test_memory_is_registered_where_a_flag_is_unknown(known: bool, refuses: bool) -> None:
    asked = []

    def register(access: int) -> str:
        asked.append(access)
        if refuses or (access & RELAXED and not known):
            raise ResourceError(f"access {access:#x} is refused")
        return "region"

    if refuses:
        with pytest.raises(ResourceError, match="access 0x3 is refused"):
            with_optional(register, 3, RELAXED)
    else:
        assert with_optional(register, 3, RELAXED) == ("region", RELAXED if known else 0)
    assert asked == [3 | RELAXED] + [3] * (refuses or not known)


def test_slots_beside_a_device_that_was_removed(world: World) -> None:
    from xvcomm.backends.rdma.slots import DirectSlots

    world.domains[0].removed = True
    slots = DirectSlots(FakeGpu(), world.domains, 4096)  # type: ignore[arg-type]
    assert slots.keys == [(0, 0), (2, 12)]
    slots.close()


def test_what_is_left_is_given_back_with_the_devices(world: World, opened: list[str]) -> None:
    world.pairs[1].close()
    world.cards.close()
    assert [pair.failed for pair in world.pairs] == [True, False, True, True]
    assert opened == []
