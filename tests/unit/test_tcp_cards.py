"""The transport over TCP opens the RDMA devices of its interfaces, publishes which addresses have some, and closes them."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

import msgspec
import pytest

from xvcomm.abc.store import PrefixStore
from xvcomm.abc.transport import Membership
from xvcomm.backends.tcp import TcpTransport
from xvcomm.backends.tcp.interfaces import Place, usable
from xvcomm.config import Config
from xvcomm.rendezvous.store import FileStore
from xvcomm.types.deadline import Deadline
from xvcomm.types.subnets import SubnetPort

CONFIG = Config(nics="lo")
PORT = SubnetPort("mlx5_0:1", "fe80::7")


class Cards:
    """The devices of all interfaces but those of the addresses in `without`."""

    without: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.watched = self.closed = False

    def reaches(self, address: str) -> bool:
        """Whether the address has one."""
        return address not in self.without

    def ports(self) -> list[SubnetPort]:
        """One of InfiniBand."""
        return [PORT]

    def watch(self, add: Any, lost: Any) -> None:
        """The network has begun to use them."""
        self.watched = True

    def close(self) -> None:
        """The network has ended."""
        self.closed = True


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[Any]:
    """A function that joins a job of one rank with these devices, and tells the arguments and the place that it publishes."""
    transport = TcpTransport(CONFIG, "host")

    def join(cards: Cards | None) -> tuple[TcpTransport, list[Any], Place]:
        asked: list[Any] = []
        store = FileStore(tmp_path / "job")

        def opens(*what: Any) -> Cards | None:
            asked.append(what)
            return cards

        transport.join(Membership(0, 1, 1, store, b"key", lambda *_: None, lambda _: None, None, opens))
        data = PrefixStore("tcp", store).get("place/0", Deadline.after(0))
        return transport, asked, msgspec.msgpack.decode(data, type=Place)

    yield join
    transport.close()


def hosts() -> dict[str, str]:
    return {str(ip_interface(address).ip): name for name, address in usable(CONFIG)}


def test_addresses_with_rdma_are_published(joined: Any) -> None:
    cards = Cards()
    cards.without = ("::1",)
    transport, asked, place = joined(cards)
    assert asked == [(CONFIG, hosts(), None)]
    assert {address.host: address.rdma for address in place.addresses} == {host: host != "::1" for host in hosts()}
    assert place.ports == [PORT]
    transport.close()
    assert cards.watched and cards.closed


def test_without_devices(joined: Any) -> None:
    _, _, place = joined(None)
    assert [address.rdma for address in place.addresses] == [False] * len(hosts())
    assert place.ports == []


def test_devices_are_closed_where_joining_fails(joined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no thread")

    cards = Cards()
    monkeypatch.setattr("xvcomm.wire.network.Network", fails)
    with pytest.raises(RuntimeError, match="no thread"):
        joined(cards)
    assert cards.closed
