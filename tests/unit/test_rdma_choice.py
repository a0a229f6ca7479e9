"""By which GID and in which partition a port serves an address, with which options, and what queue pairs tell of themselves."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

import msgspec
import pytest

from xvcomm.backends.rdma.cards import open_cards
from xvcomm.backends.rdma.choice import PortChoice
from xvcomm.backends.rdma.devices import Gid, Port
from xvcomm.backends.rdma.gids import apart, gid_of, partition, partition_key
from xvcomm.backends.rdma.rails import Description
from xvcomm.backends.rdma.settings import options, refusal
from xvcomm.config import Config
from xvcomm.errors import ResourceError


def gid(index: int, address: str, version: str = "RoCE v2", interface: str = "eth4") -> Gid:
    value = IPv6Address(address if ":" in address else f"::ffff:{address}").packed
    return Gid(index, value, version, interface, address)


ETHERNET = Port(1, "active", "Ethernet", 1024, 0, (
    gid(0, "fe80::1", "RoCE v1"), gid(1, "fe80::1"), gid(2, "10.1.2.3", "RoCE v1"), gid(3, "10.1.2.3"),
    gid(4, "10.9.2.3", interface="eth4.9"), gid(5, "fd00::3"), gid(7, "10.1.2.4"),
))  # fmt: skip


@pytest.mark.parametrize(
    ("address", "index"),
    [("10.1.2.3", 3), ("10.9.2.3", 4), ("10.1.2.4", 7), ("fd00:0::3", 5), ("10.1.2.5", None), ("fd00::4", None)],
)
def test_roce_v2_of_the_very_address(address: str, index: int | None) -> None:
    found = gid_of(ETHERNET, address)
    assert (found and found.index) == index


def test_roce_v1_alone_is_of_no_use() -> None:
    port = Port(1, "active", "Ethernet", 1024, 0, (gid(2, "10.1.2.3", "RoCE v1"),))
    assert gid_of(port, "10.1.2.3") is None


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """The folder of /sys/class/infiniband with a device of InfiniBand, whose two ports are ib0 and ib1."""
    files = {"device/net/ib0/dev_port": "0", "device/net/ib1/dev_port": "1"}
    files |= {f"ports/1/pkeys/{i}": key for i, key in enumerate(("0xffff", "0x0001", "0x8001", "0x8002", "0x0000"))}
    files |= {"ports/2/pkeys/10": "0x7fff"}
    for name, text in files.items():
        (tmp_path / "mlx4_0" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mlx4_0" / name).write_text(f"{text}\n")
    return tmp_path


SUBNET = Port(1, "active", "InfiniBand", 4096, 7, (
    gid(0, "fe80::7", "InfiniBand", ""), gid(1, "fe80::8", "InfiniBand", ""),
))  # fmt: skip


@pytest.mark.parametrize(
    ("address", "lid", "index"),
    [("fe80:0::7", 7, 0), ("fe80::8", 7, None), ("10.3.0.7", 7, None), ("fe80::7", 0, None)],
)
def test_a_port_of_infiniband_by_its_first_gid(address: str, lid: int, index: int | None) -> None:
    """Once the subnet manager has given it a LID."""
    found = gid_of(replace(SUBNET, lid=lid), address)
    assert (found and found.index) == index


@pytest.mark.parametrize(
    ("nics", "env", "used", "told"),
    [
        (None, {}, {1, 2}, "up"),
        ("mlx4", {}, {1, 2}, "XVCOMM_NICS=mlx4 names it"),
        ("=mlx4", {}, set(), "XVCOMM_NICS==mlx4 does not name it"),
        ("eth0,mlx4_0:2", {}, {2}, "XVCOMM_NICS=eth0,mlx4_0:2 does not name it"),
        ("^mlx4_0:2", {}, {1}, "XVCOMM_NICS=^mlx4_0:2 does not exclude it"),
        ("ib1", {}, {2}, "XVCOMM_NICS=ib1 does not name it"),
        ("^ib1", {}, {1}, "XVCOMM_NICS=^ib1 does not exclude it"),
        ("10.3.0.0/24", {}, {1}, "XVCOMM_NICS=10.3.0.0/24 names it"),
        ("eth0", {"NCCL_IB_HCA": "mlx4_0"}, set(), "XVCOMM_NICS=eth0 does not name it"),
        (None, {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}, {1, 2}, "up"),
        (None, {"NCCL_IB_HCA": "=mlx4_0:1", "UCX_NET_DEVICES": "mlx4_0:2"}, {1}, "NCCL_IB_HCA==mlx4_0:1 names it"),
        (None, {"NCCL_IB_HCA": "mlx5"}, set(), "NCCL_IB_HCA=mlx5 does not name it"),
        (None, {"UCX_NET_DEVICES": "all"}, {1, 2}, "up"),
        (None, {"UCX_NET_DEVICES": "mlx4_0:1,eth0"}, {1}, "UCX_NET_DEVICES=mlx4_0:1,eth0 names it"),
        (None, {"UCX_NET_DEVICES": "mlx4"}, set(), "UCX_NET_DEVICES=mlx4 does not name it"),
    ],
)
def test_ports_of_infiniband_that_lists_choose(
    kernel: Path, nics: str | None, env: dict[str, str], used: set[int], told: str
) -> None:
    """By themselves, or by their network interfaces; lists for sockets leave them alone."""
    choice = PortChoice.of(Config(nics=nics), env, {"10.3.0.7": "ib0", "10.4.0.7": "eth0"})
    judged = {number: choice.judge("mlx4_0", number, kernel) for number in (1, 2)}
    assert {number for number, (is_used, _) in judged.items() if is_used} == used
    assert judged[1][1] == told


@pytest.mark.parametrize(("key", "index"), [(None, 0), (0xFFFF, 0), (0x8001, 2), (0x0001, 1), (0x0002, 3), (0x7FFF, 0)])
def test_partitions(kernel: Path, key: int | None, index: int) -> None:
    assert partition("mlx4_0", 1, key, kernel) == index


def test_a_partition_that_a_port_is_not_in(kernel: Path) -> None:
    with pytest.raises(
        ResourceError,
        match=r"port 1 of mlx4_0 .*KEY=0x8003; its keys are 0xffff, 0x0001, 0x8001, 0x8002$",
    ):
        partition("mlx4_0", 1, 0x8003, kernel)
    assert partition("mlx4_0", 2, 0xFFFF, kernel) == 10


@pytest.mark.parametrize(
    ("settings", "env", "told"),
    [
        ({}, {}, ""),
        ({}, {"NCCL_IB_DISABLE": "0"}, ""),
        ({}, {"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE=1; XVCOMM_RDMA=1 overrides it"),
        ({"rdma": 1}, {"NCCL_IB_DISABLE": "1"}, ""),
        ({"rdma": 0}, {}, "XVCOMM_RDMA=0"),
        ({"rdma": 1, "tls": 1}, {}, "XVCOMM_TLS=1, and RDMA is not encrypted"),
    ],
)
def test_when_rdma_is_not_used(settings: dict[str, Any], env: dict[str, str], told: str) -> None:
    assert refusal(Config(**settings), env) == told
    if told:
        assert open_cards(Config(**settings), {"10.0.0.1": "eth0"}, env=env) is None


def test_options_are_nccls_where_ours_are_unset() -> None:
    plain = {"timeout": 14, "retries": 6, "traffic_class": 0, "service_level": 0, "grh": False}
    assert options(Config(), {}) == plain
    env = {"NCCL_IB_TC": "106", "NCCL_IB_SL": "0x3"}
    assert options(Config(), env) == plain | {"traffic_class": 106, "service_level": 3}
    ours = Config(rdma_traffic_class=0, rdma_service_level=5, rdma_timeout=20, rdma_retries=3, rdma_grh=1)
    assert options(ours, env) == {
        "timeout": 20, "retries": 3, "traffic_class": 0, "service_level": 5, "grh": True,
    }  # fmt: skip
    for wrong in ("256", "-1", "high", ""):
        assert options(Config(), {"NCCL_IB_TC": wrong}) == plain


@pytest.mark.parametrize(
    ("ours", "theirs", "due"),
    [
        (0xFFFF, 0xFFFF, False), (0xFFFF, 0x7FFF, False), (0x7FFF, 0x7FFF, True), (0x8001, 0xFFFF, True),
        (0x8001, 0x0001, False), (0, 0x8001, False), (0x7FFF, 0, False),
    ],
)  # fmt: skip
def test_partitions_that_do_not_go_together(ours: int, theirs: int, due: bool) -> None:
    """Of two partitions, or both limited members; a key that is not known is no reason."""
    assert apart(ours, theirs) == apart(theirs, ours) == due


def test_the_key_at_a_place(kernel: Path) -> None:
    assert [partition_key("mlx4_0", 1, index, kernel) for index in (0, 2, 4, 9)] == [0xFFFF, 0x8001, 0, 0]


def described(address: str, lid: int, key: int = 0xFFFF) -> Description:
    return Description(1, gid(0, address).value, lid, 4096, 0, key)


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (described("fe80::8", 8), ""),
        (described("fe80::8", 8, 0), ""),
        (described("10.1.2.3", 0), "one of the two is InfiniBand, the other is Ethernet"),
        (described("fd00::8", 8), "the ports are in two subnets, fe80::/64 here and fd00::/64 there, and have no"),
        (described("fe80::8", 8, 0x8001), "the partitions do not go together, 0xffff here, 0x8001 there"),
    ],
    ids=str,
)
def test_queue_pairs_that_cannot_be_joined(theirs: Description, told: str) -> None:
    found = described("fe80::7", 7).objection(theirs)
    assert found.startswith(told) and bool(found) == bool(told)
    assert bool(theirs.objection(described("fe80::7", 7))) == bool(told)


@pytest.mark.parametrize(("ours", "theirs"), [("10.1.2.3", "10.9.2.3"), ("fd00::1", "fd01::1")])
def test_networks_of_ethernet_may_differ(ours: str, theirs: str) -> None:
    assert not described(ours, 0).objection(described(theirs, 0))


DESCRIPTION = Description(0xABCDEF, ETHERNET.gids[3].value, 0, 4096, 2)


def test_a_description_goes_to_the_other_side() -> None:
    sent = msgspec.msgpack.encode(DESCRIPTION)
    assert len(sent) < 64
    assert Description.decode(sent) == DESCRIPTION
    assert DESCRIPTION.address == "10.1.2.3"


@pytest.mark.parametrize(
    "changes",
    [
        {"number": 0},
        {"number": 1 << 24},
        {"gid": b"short"},
        {"lid": -1},
        {"lid": 1 << 16},
        {"mtu": 128},
        {"device": 8},
        {"key": 1 << 16},
    ],
    ids=str,
)
def test_a_description_that_makes_no_sense(changes: dict[str, Any]) -> None:
    sent = msgspec.msgpack.encode(msgspec.structs.replace(DESCRIPTION, **changes))
    with pytest.raises(ResourceError, match="makes no sense"):
        Description.decode(sent)


@pytest.mark.parametrize("data", [b"", b"\x00", b"\xc1 no msgpack", msgspec.msgpack.encode([1, 2])])
def test_a_description_that_is_none(data: bytes) -> None:
    with pytest.raises(ResourceError, match="makes no sense"):
        Description.decode(data)
