"""Rails between ports of InfiniBand without IP over InfiniBand, over the fake provider; TCP goes over another interface.

Both hosts are networks of this process, and each has devices whose ports have LIDs.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fabric import Fabric
from fake_hosts import HOST, Hosts, carry, close, until
from subnet import Library, SubnetDomain, SubnetEnd

from xvcomm.abc.cards import QueueEnd
from xvcomm.backends.host.device import HostDevice
from xvcomm.backends.rdma import cards as module
from xvcomm.backends.rdma import gids, pairs, settings
from xvcomm.backends.rdma.cards import open_cards
from xvcomm.backends.tcp import interfaces
from xvcomm.backends.tcp.interfaces import Address, Place
from xvcomm.config import Config
from xvcomm.types.route import RDMA
from xvcomm.wire.network import Network

MANAGEMENT = "eth0"
HERE, THERE = SubnetEnd("mlx5_0", "fe80::11", 5), SubnetEnd("mlx5_2", "fe80::22", 9)


class SubnetHosts(Hosts):
    """Two networks with devices of InfiniBand, which are joined over a connection of the management network.

    Attributes:
        library: below the devices of both.
    """

    def __init__(
        self, stack: contextlib.ExitStack, fabric: Fabric, ends: Sequence[Sequence[SubnetEnd]], patch: pytest.MonkeyPatch,
        each: Sequence[dict[str, Any]] = ({}, {}), refusing: int = 0,
    ) -> None:  # fmt: skip
        """Make them.

        Args:
            ends: the ports of each.
            each: of each one's Config.
            refusing: how many addresses of the second one nobody listens at, before the one where it does.
        """
        self.library = Library(fabric, [end for each in ends for end in each])
        patch.setattr(pairs, "libibverbs", lambda: self.library)
        patch.setattr(pairs, "Domain", lambda name: SubnetDomain(self.library, name))
        patch.setattr(module.sysfs, "ports", lambda name, *_: (self.library.ends[name].port(),))
        patch.setattr(gids.sysfs, "partition_keys", lambda name, *_: dict(enumerate(self.library.ends[name].keys)))
        patch.setattr(module, "locked", list)
        patch.setattr(module, "Events", lambda name, context: self._domain(name).events.events())
        self.lost, self.networks, self.cards, places = [[], []], [], [], []
        listeners = [socket.create_server((HOST, 0)) for _ in range(2)]
        for index in range(2):
            patch.setattr(module.sysfs, "names", lambda index=index: [end.device for end in ends[index]])
            found = open_cards(Config(**each[index]), {HOST: MANAGEMENT}, env={})
            assert found is not None
            stack.callback(found.close)
            self.cards.append(found)
            gone = [Address(f"gone{i}", f"{HOST}/8", 1) for i in range(refusing * index)]
            listening = Address(MANAGEMENT, f"{HOST}/8", listeners[index].getsockname()[1])
            places.append(Place(f"host{index}", [*gone, listening], 0).with_rdma(found.reaches, found.ports()))
        for index in range(2):
            routes = interfaces.routes(places[index], places[1 - index], 1, 1)
            network = Network(
                index, 2, b"key", [listeners[index]], lambda _, routes=routes: routes, 5.0, 0, 1, None,
                lambda rank, why, index=index: self.lost[index].append(why), lambda rank: None, cards=self.cards[index],
            )  # fmt: skip
            self.networks.append(network)
            stack.callback(network.close)
        self.numbers = [0, RDMA]
        self.devices = [HostDevice(Config()) for _ in range(2)]

    def _domain(self, name: str) -> Any:
        return next(domain for cards in self.cards for domain in cards._domains if domain.name == name)

    def report(self, device: str, name: str) -> None:
        """Let a device report an event of its port."""
        self._domain(device).events.report(name, port=1)

    def remove(self, device: str) -> None:
        """Remove a device."""
        self.library.removed.add(device)
        self._domain(device).events.remove()

    def by_rdma(self, index: int = 0) -> set[tuple[str, str]]:
        """The GIDs of the rails between ports of InfiniBand."""
        return {(rail.local, rail.remote) for rail in self.networks[index].rails() if rail.scheme == "rdma"}


@pytest.fixture
def make(fake_verbs: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SubnetHosts]]:
    with contextlib.ExitStack() as stack:
        fabric = stack.enter_context(Fabric(fake_verbs, fresh()))
        monkeypatch.setattr("xvcomm.system.notice.speaks", lambda: True)
        yield lambda here, there, **how: SubnetHosts(stack, fabric, [here, there], monkeypatch, **how)


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def test_messages_go_between_ports_without_addresses(make: Any) -> None:
    """By their LIDs, without a GRH."""
    hosts = make([HERE], [THERE])
    ends = hosts.rings()
    hosts.meet()
    carry(hosts, ends)
    assert hosts.by_rdma(0) == {("fe80::11", "fe80::22")} and hosts.by_rdma(1) == {("fe80::22", "fe80::11")}
    assert hosts.bytes_by_rdma() > 300_000
    assert sorted(hosts.library.routes.values()) == [(5, False, 0), (9, False, 0)]
    close(*ends)


def test_each_port_has_a_rail(make: Any) -> None:
    """The ports of one subnet are joined, whatever their order."""
    others = SubnetEnd("mlx5_1", "fd00::12", 5), SubnetEnd("mlx5_3", "fd00::23", 9)
    hosts = make([HERE, others[0]], [others[1], THERE])
    ends = hosts.rings()
    until(lambda: hosts.by_rdma() == {("fe80::11", "fe80::22"), ("fd00::12", "fd00::23")})
    carry(hosts, ends)
    close(*ends)


def test_ports_of_different_subnets_are_refused(make: Any, caplog: Any) -> None:
    hosts = make([HERE], [replace(THERE, gid="fd00::22")])
    ends = hosts.rings()
    until(lambda: "the ports are in two subnets" in said(caplog))
    assert "no GIDs with a FLID by which routers of InfiniBand find both" in said(caplog)
    carry(hosts, ends)
    assert hosts.by_rdma() == set()
    (found,) = hosts.networks[0].try_pairs([1])[1]
    assert (found.here, found.there) == (QueueEnd("mlx5_0", 1, "fe80::11", 5), QueueEnd("mlx5_2", 1, "fd00::22", 9))
    assert "the ports are in two subnets, " in found.refusal
    close(*ends)


HERE_ROUTED = replace(HERE, gid="fe80:0:0:1::11", routed="fec0:0:3e8:1::11")
THERE_ROUTED = replace(THERE, gid="fe80:0:0:2::22", routed="fec0:0:7d0:2::22", fabric="b")


def test_routers_join_subnets(make: Any) -> None:
    """By the FLID of the other port's second GID, with a GRH. Both of an own fabric."""
    hosts = make([HERE_ROUTED], [THERE_ROUTED])
    ends = hosts.rings()
    hosts.meet()
    carry(hosts, ends)
    assert hosts.by_rdma() == {(HERE_ROUTED.gid, THERE_ROUTED.gid)}
    assert sorted(hosts.library.routes.values()) == [(1000, True, 0), (2000, True, 0)]
    hosts.library.ends["mlx5_2"] = replace(THERE_ROUTED, routed="")
    hosts.report("mlx5_2", "GID_CHANGE")
    until(lambda: hosts.by_rdma(0) == hosts.by_rdma(1) == set())
    close(*ends)


@pytest.mark.parametrize("routed", ["", "fd00:0:7d0:2::22", "fec0:0:0:2::22"])
def test_a_port_that_routers_do_not_know(make: Any, routed: str) -> None:
    """It has no second GID, or one without a FLID."""
    hosts = make([HERE_ROUTED], [replace(THERE_ROUTED, routed=routed)])
    (found,) = hosts.networks[0].try_pairs([1])[1]
    assert "the ports are in two subnets, fe80:0:0:1::/64 here and fe80:0:0:2::/64 there, and have no" in found.refusal


@pytest.mark.parametrize("by_setting", [False, True])
def test_a_grh_in_one_subnet(make: Any, by_setting: bool) -> None:
    """Where one of the two wants it, by its port or by a setting: both have one then, with their first GIDs."""
    hosts = make([replace(HERE, grh=not by_setting)], [THERE], each=({"rdma_grh": int(by_setting)}, {}))
    ends = hosts.rings()
    hosts.meet()
    carry(hosts, ends)
    assert sorted(hosts.library.routes.values()) == [(5, True, 0), (9, True, 0)]
    close(*ends)


def test_partitions(make: Any) -> None:
    """The chosen one's place in the table counts; ports of two are refused."""
    keys = (0xFFFF, 0x8001)
    hosts = make(
        [replace(HERE, keys=keys)], [replace(THERE, keys=keys)],
        each=({"rdma_partition_key": 0x8001}, {"rdma_partition_key": 0x8001}),
    )  # fmt: skip
    (found,) = hosts.networks[0].try_pairs([1])[1]
    assert found.refusal == ""
    assert {place for _, _, place in hosts.library.routes.values()} == {1}


def test_partitions_that_differ(make: Any) -> None:
    hosts = make([replace(HERE, keys=(0x8001,))], [replace(THERE, keys=(0x8002,))])
    (found,) = hosts.networks[0].try_pairs([1])[1]
    assert "the partitions do not go together" in found.refusal


@pytest.mark.parametrize(("link", "lids"), [("InfiniBand", (5, 9)), ("Ethernet", (0, 0))])
def test_traffic_class_and_service_level(
    fake_verbs: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch, link: str, lids: tuple[int, int]
) -> None:
    """Both are set, but packets of InfiniBand have no GRH, which has the traffic class."""
    from xvcomm.backends.rdma.rails import RailPair

    places = [replace(end, lid=lid, link=link) for end, lid in zip((HERE, THERE), lids, strict=True)]
    options = settings.options(Config(rdma_traffic_class=106, rdma_service_level=3), {}) | {"partition": 0}
    with Fabric(fake_verbs, fresh()) as fabric:
        library = Library(fabric, places)
        monkeypatch.setattr(pairs, "libibverbs", lambda: library)
        made: list[RailPair] = []
        for end in places:
            port = end.port()
            domain: Any = SubnetDomain(library, end.device)
            made.append(RailPair(domain, 0, port, port.gids[0], options, lambda pair: None))
        for here, there in (made, made[::-1]):
            here.connect(there.description)
        assert {library.classes[pair.number] for pair in made} == {(106, 3)}
        grh = link == "Ethernet"
        assert [library.routes[pair.number] for pair in made] == [(lid, grh, 0) for lid in reversed(lids)]
        for pair in made:
            pair.close()


def test_two_fabrics_with_one_prefix(make: Any) -> None:
    """As where each port of a host has a fabric of its own: the devices cannot tell, but nothing arrives."""
    hosts = make([HERE], [replace(THERE, fabric="b")])
    (found,) = hosts.networks[0].try_pairs([1])[1]
    assert "are the two ports in one fabric?" in found.refusal or "RETRY_EXC_ERR" in found.refusal


def test_another_connection_joins_them(make: Any) -> None:
    """Where nobody answers at the first addresses of the other host."""
    hosts = make([HERE], [THERE], refusing=1)
    (found,) = hosts.networks[0].try_pairs([1])[1]
    assert found.refusal == "" and found.route.via == (HOST, HOST)
    ends = hosts.rings()
    until(lambda: hosts.by_rdma() == {("fe80::11", "fe80::22")})
    close(*ends)


def test_a_lid_that_changes(make: Any) -> None:
    """The subnet manager gives a port another one: queue pairs are made anew, with the new LID."""
    hosts = make([HERE], [THERE])
    ends = hosts.rings()
    hosts.meet()
    hosts.library.ends["mlx5_2"] = replace(THERE, lid=33)
    hosts.report("mlx5_2", "LID_CHANGE")
    until(lambda: (33, False, 0) in hosts.library.routes.values())
    hosts.meet()
    carry(hosts, ends)
    close(*ends)


def test_a_gid_that_goes_and_comes_back(make: Any, caplog: Any) -> None:
    """Its rails are lost at once, by name, and made anew when it is there again."""
    hosts = make([HERE], [THERE])
    ends = hosts.rings()
    hosts.meet()
    hosts.library.ends["mlx5_2"] = replace(THERE, gid="fe80::99")
    hosts.report("mlx5_2", "GID_CHANGE")
    until(lambda: hosts.by_rdma(0) == hosts.by_rdma(1) == set())
    assert "mlx5_2 port 1, GID fe80::22 to fe80::11: GID_CHANGE: the GID has gone" in said(caplog)
    carry(hosts, ends)
    hosts.library.ends["mlx5_2"] = THERE
    hosts.meet()
    carry(hosts, ends)
    close(*ends)


def test_a_device_is_removed_and_the_other_serves_on(make: Any) -> None:
    """New rings go over it, and its rails are made anew."""
    second = SubnetEnd("mlx5_1", "fd00::12", 6), SubnetEnd("mlx5_3", "fd00::23", 10)
    hosts = make([HERE, second[0]], [THERE, second[1]])
    old, left = hosts.rings(), ("fd00::12", "fd00::23")
    until(lambda: len(hosts.by_rdma(0)) == len(hosts.by_rdma(1)) == 2)
    hosts.remove("mlx5_0")
    until(lambda: hosts.by_rdma() == {left})
    for lose in (False, True):
        if lose:
            (rail,) = (rail for rail in hosts.networks[0].rails() if rail.scheme == "rdma")
            hosts.networks[0].lose(1, (rail.local, rail.remote, rail.number))
            until(lambda: hosts.by_rdma() == set())
            until(lambda: hosts.by_rdma(0) == {left} and hosts.by_rdma(1) == {left[::-1]})
        new, before = hosts.rings(), hosts.bytes_by_rdma()
        for ends in (old, new):
            carry(hosts, ends)
        assert hosts.bytes_by_rdma() - before > 600_000
        close(*new)
    close(*old)


def test_a_lost_rank_names_the_ends_and_the_event(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device, port, both GIDs, status and cause of the last rail stand in what is told of the loss."""

    async def refuse(route: Any) -> Any:
        raise ConnectionRefusedError

    hosts = make([HERE], [THERE])
    ends = hosts.rings()
    hosts.meet()
    monkeypatch.setattr("xvcomm.wire.links.connect", refuse)
    for network in hosts.networks:
        for rail in network.rails():
            if rail.scheme == "tcp":
                network.lose(rail.rank, (rail.local, rail.remote, rail.number))
    until(lambda: hosts.rails(0) == hosts.rails(1) == [RDMA])
    hosts.report("mlx5_0", "PORT_ERR")
    until(lambda: all(hosts.lost))
    (why,) = hosts.lost[0]
    assert "; RDMA: mlx5_0 port 1, GID fe80::11 to fe80::22: PORT_ERR: the link is down: the cable" in why, why
    close(*ends)


def test_ports_that_are_published(make: Any) -> None:
    """Those with a LID that XVCOMM_NICS names."""
    ends = [HERE, SubnetEnd("mlx5_1", "fe80::12", 6), SubnetEnd("mlx4_0", "fe80::13", 7)]
    hosts = make(ends, [THERE], each=({"nics": "mlx5"}, {}))
    assert [port.name for port in hosts.cards[0].ports()] == ["mlx5_0:1", "mlx5_1:1"]
    hosts.library.ends["mlx5_1"] = replace(ends[1], lid=0)
    assert [port.name for port in hosts.cards[0].ports()] == ["mlx5_0:1"]
