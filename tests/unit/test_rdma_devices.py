"""RDMA devices where there are none, and what is made of pyverbs' answers."""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import replace
from ipaddress import IPv6Address
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from xvcomm.abc.transport import Interface
from xvcomm.backends.rdma import layout, report
from xvcomm.backends.rdma.devices import Gid, ask, devices, pyverbs, refusal
from xvcomm.cli import app
from xvcomm.config import Config
from xvcomm.errors import BackendUnavailable


def install(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
    """Let `pyverbs.device` be a module with these members."""
    package, module = ModuleType("pyverbs"), ModuleType("pyverbs.device")
    vars(module).update(answers)
    monkeypatch.setitem(sys.modules, "pyverbs", package)
    monkeypatch.setitem(sys.modules, "pyverbs.device", module)


def test_pyverbs_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    reason, remedy = refusal() or ("", "")
    assert reason.startswith("pyverbs is missing")
    assert "xvcomm[rdma]" in remedy
    for call in (devices, lambda: pyverbs("pd")):
        with pytest.raises(BackendUnavailable, match=r"pyverbs is missing: .*xvcomm\[rdma\]"):
            call()


def test_libibverbs_of_another_version(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyverbs").mkdir()
    (tmp_path / "pyverbs" / "device.py").write_text('raise ImportError("version `IBVERBS_PRIVATE_59\' not found")')
    monkeypatch.delitem(sys.modules, "pyverbs", raising=False)
    monkeypatch.delitem(sys.modules, "pyverbs.device", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    reason, remedy = refusal() or ("", "")
    monkeypatch.delitem(sys.modules, "pyverbs", raising=False)
    assert "IBVERBS_PRIVATE_59" in reason
    assert "LD_LIBRARY_PATH" in remedy


def test_a_host_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, get_device_list=list)
    assert (refusal() or ("",))[0] == "this host has no RDMA device"
    with pytest.raises(BackendUnavailable, match="--device=/dev/infiniband"):
        devices()


def test_devices_that_cannot_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("Failed to get devices list")

    install(monkeypatch, get_device_list=fails)
    assert (refusal() or ("",))[0] == "RDMA devices cannot be listed: Failed to get devices list"


class Context:
    """A device of two ports; the second one has no GID."""

    def __init__(self, name: str) -> None:
        assert name == "mlx5_0"

    def query_device(self) -> Any:
        return SimpleNamespace(phys_port_cnt=2)

    def query_port(self, number: int) -> Any:
        state, link, lid = ((4, 2, 0), (1, 1, 17))[number - 1]
        return SimpleNamespace(gid_tbl_len=8, state=state, link_layer=link, lid=lid, active_mtu=5, flags=0)

    def query_gid_table(self, most: int) -> Any:
        assert most == 16
        return [entry("::ffff:10.1.2.3", 3, 2), entry("fe80::1", 4, 1)]

    def close(self) -> None:
        pass


def entry(address: str, index: int, kind: int) -> Any:
    prefix, interface = struct.unpack("=QQ", IPv6Address(address).packed)
    return SimpleNamespace(
        gid_subnet_prefix=prefix, gid_interface_id=interface, gid_index=index, port_num=1, gid_type=kind, ndev_ifindex=1
    )


def test_ports_and_gids(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, get_device_list=lambda: [SimpleNamespace(name=b"mlx5_0")], Context=Context)
    (device,) = devices()
    first, second = device.ports
    assert (first.state, first.link, first.mtu, first.lid) == ("active", "Ethernet", 4096, 0)
    assert first.gids == (
        Gid(3, IPv6Address("::ffff:10.1.2.3").packed, "RoCE v2", "lo", "10.1.2.3"),
        Gid(4, IPv6Address("fe80::1").packed, "RoCE v1", "lo", "fe80::1"),
    )
    assert (second.state, second.link, second.lid, second.gids) == ("down", "InfiniBand", 17, ())


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """The folder of /sys/class/infiniband of a host with the device above; the other port has no address yet."""
    bus = tmp_path / "devices" / "0000:3b:00.1"
    bus.mkdir(parents=True)
    root = tmp_path / "infiniband"
    files = {
        "fw_ver": "22.31.1014", "hca_type": "MT4125", "board_id": "MT_0000000436", "ports/1/state": "4: ACTIVE",
        "ports/1/link_layer": "Ethernet", "ports/1/lid": "0x0", "ports/1/gids/0": "fe80:0000:0000:0000:0000:0000:0000:0001",
        "ports/1/gid_attrs/types/0": "IB/RoCE v1", "ports/1/gid_attrs/ndevs/0": "eth4",
        "ports/1/gids/3": "0000:0000:0000:0000:0000:ffff:0a01:0203", "ports/1/gid_attrs/types/3": "RoCE v2",
        "ports/1/gid_attrs/ndevs/3": "eth4", "ports/1/gids/4": "0000:0000:0000:0000:0000:0000:0000:0000",
        "ports/2/state": "1: DOWN", "ports/2/link_layer": "Ethernet", "ports/2/lid": "0x0",
    }  # fmt: skip
    for name, text in files.items():
        file = root / "mlx5_0" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    (root / "mlx5_0" / "device").symlink_to(bus)
    (bus / "numa_node").write_text("1\n")
    return root


ETH4 = Interface("eth4", "10.1.2.3/24", True, "up")


def examine(kernel: Path, *interfaces: Interface, **settings: Any) -> report.DeviceReport:
    """The only device, with interface eth4 if nothing else is said."""
    (device,) = report.examine(Config(**settings), {}, interfaces or [ETH4], kernel)
    return device


def reasons(device: report.DeviceReport) -> str:
    return "; ".join(f"{o.reason}: {o.remedy}" for o in device.obstacles)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit of locked memory."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (-1, -1))


def test_what_the_kernel_tells_without_pyverbs(kernel: Path, room: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    device = examine(kernel)
    assert (device.name, device.pcie, device.numa_node) == ("mlx5_0", "0000:3b:00.1", 1)
    assert (device.firmware, device.card, device.used) == ("22.31.1014", "MT4125 MT_0000000436", False)
    assert reasons(device).startswith("pyverbs is missing")
    up, down = device.ports
    assert (up.state, up.link, up.interfaces) == ("active", "Ethernet", ["eth4 (10.1.2.3)"])
    assert [(g.index, g.version, g.interface, g.address) for g in up.gids] == [
        (0, "RoCE v1", "eth4", "fe80::1"), (3, "RoCE v2", "eth4", "10.1.2.3"),
    ]  # fmt: skip
    assert [o.reason for o in down.obstacles] == ["port 2 is down", "port 2 has no GID of RoCE v2"]


def test_the_file_of_a_device_is_missing(kernel: Path, room: None, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, get_device_list=list)
    (kernel.with_name("infiniband_verbs") / "uverbs77").mkdir(parents=True)
    assert "offers mlx5_0 to no process: modprobe ib_uverbs" in reasons(examine(kernel))
    (kernel.with_name("infiniband_verbs") / "uverbs77" / "ibdev").write_text("mlx5_0\n")
    device = examine(kernel)
    assert "/dev/infiniband/uverbs77 of mlx5_0 is missing: modprobe ib_uverbs; in containers pass" in reasons(device)


def test_a_port_that_is_used(kernel: Path, room: None, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, get_device_list=lambda: [SimpleNamespace(name=b"mlx5_0")], Context=Context)
    monkeypatch.setattr("xvcomm.backends.rdma.pairs.Domain", Context)
    device = examine(kernel)
    assert (device.used, device.obstacles, device.numa_node) == (True, [], 1)
    assert [(port.interfaces, port.mtu) for port in device.ports] == [(["eth4 (10.1.2.3)"], 4096), ([], 4096)]
    monkeypatch.setattr("resource.getrlimit", lambda _: (1 << 20, 1 << 20))
    monkeypatch.setattr(report, "may_lock_all", lambda: False)
    device = examine(kernel)
    assert not device.used
    assert "only 1024 KiB of memory may be registered (RLIMIT_MEMLOCK)" in reasons(device)
    assert "--ulimit memlock=-1, in Kubernetes LimitMEMLOCK=infinity for containerd" in reasons(device)


@pytest.mark.parametrize(
    ("settings", "interface", "told"),
    [
        ({"rdma": 0}, ETH4, "XVCOMM_RDMA=0"),
        ({"tls": 1}, ETH4, "XVCOMM_TLS=1, and RDMA is not encrypted"),
        ({}, replace(ETH4, used=False, reason="XVCOMM_NICS=e0 does not name it"), "eth4 (10.1.2.3) is not used: XVCOMM_NICS=e0"),
        ({}, replace(ETH4, address="10.1.2.4/24"), "no network interface has an address that belongs to port 1"),
        ({}, replace(ETH4, address=""), "no network interface has an address that belongs to port 1"),
        ({"rdma_partition_key": 0x8001}, ETH4, "port 1 of mlx5_0 is not in the partition XVCOMM_RDMA_PARTITION_KEY=0x8001"),
    ],
)  # fmt: skip
def test_a_port_that_is_not_used(
    kernel: Path, room: None, monkeypatch: pytest.MonkeyPatch, settings: Any, interface: Interface, told: str
) -> None:
    install(monkeypatch, get_device_list=lambda: [SimpleNamespace(name=b"mlx5_0")], Context=Context)
    monkeypatch.setattr("xvcomm.backends.rdma.pairs.Domain", Context)
    device = examine(kernel, interface, **settings)
    assert not device.used
    assert told in "; ".join(o.reason for o in (*device.obstacles, *device.ports[0].obstacles))


@pytest.fixture
def subnet(kernel: Path, room: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same device as two ports of InfiniBand, of which the subnet manager has not seen the second; without an interface."""
    install(monkeypatch, get_device_list=lambda: [SimpleNamespace(name=b"mlx5_0")], Context=Hca)
    monkeypatch.setattr("xvcomm.backends.rdma.pairs.Domain", Hca)
    for file in kernel.glob("mlx5_0/ports/*/link_layer"):
        file.write_text("InfiniBand\n")
    return kernel


class Hca(Context):
    """See `subnet`."""

    def query_port(self, number: int) -> Any:
        return SimpleNamespace(
            gid_tbl_len=8, state=4, link_layer=1, lid=(17, 0)[number - 1], active_mtu=5, flags=number - 1
        )

    def query_gid_table(self, most: int) -> Any:
        found = [entry("fe80::11", 0, 0), entry("fec0:0:3e8:7::11", 1, 0), entry("fe80::12", 0, 0)]
        for one in found:
            one.ndev_ifindex = 0
        found[2].port_num = 2
        return found


def test_a_port_of_infiniband_without_an_address(subnet: Path) -> None:
    device = examine(subnet)
    assert device.used
    first, second = device.ports
    assert (first.interfaces, first.obstacles) == (["LID 17 of subnet fe80::/64, FLID 1000 from others"], [])
    assert [(o.reason, o.remedy) for o in second.obstacles] == [("port 2 has no LID", "start the subnet manager")]
    assert [port.grh for port in ask("mlx5_0").ports] == [False, True]


@pytest.mark.parametrize(
    ("nics", "used"), [("mlx5_0", True), ("^mlx5", False), ("eth4", False), ("eth4,mlx5_0:1", True)]
)
def test_a_port_of_infiniband_that_is_chosen(subnet: Path, nics: str, used: bool) -> None:
    device = examine(subnet, nics=nics)
    assert device.used == used
    if not used:
        (why,) = device.ports[0].obstacles
        assert why.reason.startswith(f"port 1 is not used: XVCOMM_NICS={nics} ")


def test_libibverbs_is_laid_out_in_another_way(kernel: Path, room: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(name: str) -> None:
        raise layout.refused("another ABI")

    install(monkeypatch, get_device_list=lambda: [SimpleNamespace(name=b"mlx5_0")], Context=Context)
    monkeypatch.setattr("xvcomm.backends.rdma.pairs.Domain", differs)
    device = examine(kernel)
    assert not device.used
    assert "another ABI; use rdma-core 44 to 65" in reasons(device)


def test_the_right_to_lock_all_memory(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nCapEff:\t0000000000004000\n")
    (tmp_path / "uid_map").write_text("         0          0 4294967295\n")
    assert report.may_lock_all(tmp_path)
    (tmp_path / "uid_map").write_text("         0       1000          1\n")
    assert not report.may_lock_all(tmp_path)
    (tmp_path / "status").write_text("Name:\tpython\nCapEff:\t00000000a80425fb\n")
    (tmp_path / "uid_map").write_text("         0          0 4294967295\n")
    assert not report.may_lock_all(tmp_path), "docker's default"


def test_doctor_shows_devices(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    examined = examine(kernel)
    monkeypatch.setattr(report, "examine", lambda *_: [examined])
    shown = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "300"})
    assert shown.exit_code == 0
    for text in (
        "RDMA devices between hosts",
        "0000:3b:00.1",
        "NUMA node 1",
        "3: 10.1.2.3 RoCE v2 eth4",
        "port 2 is down",
    ):
        assert text in shown.output
    told = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)["rdma"]
    assert not told[0]["used"]
    assert told[0]["ports"][0]["gids"][1]["address"] == "10.1.2.3"


def test_doctor_has_one_line_where_there_is_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    assert report.examine(Config(), {}, [ETH4], tmp_path / "infiniband") == []
    monkeypatch.setattr(report, "examine", lambda *_: [])
    shown = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    (line,) = [line for line in shown.output.splitlines() if "RDMA" in line]
    assert line == "RDMA: this host has no device."
