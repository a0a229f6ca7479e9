"""By which GID and in which partition a port serves an address, with which options, and what queue pairs tell of themselves."""

from __future__ import annotations

from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

import msgspec
import pytest

from xvcomm.backends.rdma.cards import open_cards
from xvcomm.backends.rdma.devices import Gid, Port
from xvcomm.backends.rdma.gids import gid_of, partition
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
def test_roce_v2_of_the_very_address(address: str, index: int | None, tmp_path: Path) -> None:
    found = gid_of("mlx5_0", ETHERNET, "eth4", address, tmp_path)
    assert (found and found.index) == index


def test_roce_v1_alone_is_of_no_use(tmp_path: Path) -> None:
    port = Port(1, "active", "Ethernet", 1024, 0, (gid(2, "10.1.2.3", "RoCE v1"),))
    assert gid_of("mlx5_0", port, "eth4", "10.1.2.3", tmp_path) is None


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


@pytest.mark.parametrize(
    ("number", "interface", "index"), [(1, "ib0", 0), (2, "ib1", 0), (2, "ib0", None), (1, "eth0", None)]
)
def test_the_port_of_infiniband_under_an_interface(
    kernel: Path, number: int, interface: str, index: int | None
) -> None:
    port = Port(
        number, "active", "InfiniBand", 4096, 7, (gid(0, "fe80::7", "InfiniBand", ""), gid(1, "fe80::8", "", ""))
    )
    found = gid_of("mlx4_0", port, interface, "10.3.0.7", kernel)
    assert (found and found.index) == index


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
    plain = {"timeout": 14, "retries": 6, "traffic_class": 0, "service_level": 0}
    assert options(Config(), {}) == plain
    env = {"NCCL_IB_TC": "106", "NCCL_IB_SL": "0x3"}
    assert options(Config(), env) == plain | {"traffic_class": 106, "service_level": 3}
    ours = Config(rdma_traffic_class=0, rdma_service_level=5, rdma_timeout=20, rdma_retries=3)
    assert options(ours, env) == {"timeout": 20, "retries": 3, "traffic_class": 0, "service_level": 5}
    for wrong in ("256", "-1", "high", ""):
        assert options(Config(), {"NCCL_IB_TC": wrong}) == plain


DESCRIPTION = Description(0xABCDEF, ETHERNET.gids[3].value, 0, 4096, 2)


def test_a_description_goes_to_the_other_side() -> None:
    sent = msgspec.msgpack.encode(DESCRIPTION)
    assert len(sent) < 64
    assert Description.decode(sent) == DESCRIPTION
    assert DESCRIPTION.address == "10.1.2.3"


@pytest.mark.parametrize(
    "changes",
    [{"number": 0}, {"number": 1 << 24}, {"gid": b"short"}, {"lid": -1}, {"lid": 1 << 16}, {"mtu": 128}, {"device": 8}],
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
