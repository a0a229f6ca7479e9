"""Which network interfaces wires use, by xvcomm's variable and those of other libraries."""

import socket
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from xvcomm.backends.tcp import choice, interfaces
from xvcomm.cli import app
from xvcomm.config import Config
from xvcomm.errors import ConfigError

HOST = {
    "lo": ["127.0.0.1/8", "::1/128"],
    "eth1": ["10.1.0.7/24", "fd01::7/64", "fe80::7%eth1/64"],
    "eth10": ["10.2.0.7/24"],
    "ib0": ["10.3.0.7/24"],
    "ib1": ["10.4.0.7/24"],
    "docker0": ["172.17.0.1/16"],
    "zeroconf": ["169.254.3.4/16"],
    "wlan0": ["10.9.0.7/24"],
    "tun0": [],
}
PLAIN = {"eth1", "eth10", "ib0", "ib1"}


@pytest.fixture(autouse=True)
def host(monkeypatch, tmp_path):
    """A host with these interfaces, of which one is down, and an RDMA device whose two ports are ib0 and ib1."""

    def address(text):
        ip, _, bits = text.partition("/")
        six = ":" in ip
        mask = (2 ** int(bits) - 1) << ((128 if six else 32) - int(bits))
        netmask = socket.inet_ntop(socket.AF_INET6 if six else socket.AF_INET, mask.to_bytes(16 if six else 4, "big"))
        return SimpleNamespace(family=socket.AF_INET6 if six else socket.AF_INET, address=ip, netmask=netmask)

    monkeypatch.setattr(
        choice.psutil, "net_if_addrs", lambda: {name: list(map(address, found)) for name, found in HOST.items()}
    )
    monkeypatch.setattr(
        choice.psutil,
        "net_if_stats",
        lambda: {name: SimpleNamespace(flags="broadcast" if name == "wlan0" else "up,running") for name in HOST},
    )
    monkeypatch.setattr(choice, "_SYSFS", tmp_path)
    (tmp_path / "net" / "docker0" / "bridge").mkdir(parents=True)
    for port in range(2):
        net = tmp_path / "infiniband" / "mlx5_0" / "device" / "net" / f"ib{port}"
        net.mkdir(parents=True)
        (net / "dev_port").write_text(f"{port}\n")
    (tmp_path / "infiniband" / "mlx5_9").mkdir()  # without a network interface
    (tmp_path / "infiniband" / "mlx5_8" / "device" / "net" / "tun0").mkdir(parents=True)  # one without an address
    (tmp_path / "infiniband" / "mlx5_8" / "device" / "net" / "tun0" / "dev_port").write_text("0\n")


def used(nics=None, **env):
    return {interface.name for interface in choice.examine(Config(nics=nics), env) if interface.used}


def reasons(nics=None, **env):
    return {(i.name, i.address.partition("/")[0]): i.reason for i in choice.examine(Config(nics=nics), env)}


@pytest.mark.parametrize(
    ("nics", "expected"),
    [
        (None, PLAIN),
        ("eth1", {"eth1", "eth10"}),
        ("=eth1", {"eth1"}),
        ("eth", {"eth1", "eth10"}),
        ("=eth", set()),
        ("=eth1,ib0", {"eth1", "ib0"}),
        (" eth10 , ib0 ", {"eth10", "ib0"}),
        ("eth10,", {"eth10"}),
        (",", set()),
        ("10.2.0.7", {"eth10"}),
        ("10.0.0.0/8", PLAIN),
        ("fd01::/16", {"eth1"}),
        ("10.3.0.0/24,10.4.0.7", {"ib0", "ib1"}),
        ("10.9.0.7", set()),
        ("lo", {"lo"}),
        ("docker0", {"docker0"}),
        ("zeroconf", {"zeroconf"}),
        ("tun0", set()),
        ("^ib", {"eth1", "eth10"}),
        ("^eth1", {"ib0", "ib1"}),
        ("^=eth1", {"eth10", "ib0", "ib1"}),
        ("^10.3.0.0/16", PLAIN - {"ib0"}),
        ("^", PLAIN),
        ("mlx5_0", {"ib0", "ib1"}),
        ("mlx5_0:2", {"ib1"}),
        ("eth10,mlx5_0:1", {"eth10", "ib0"}),
        ("^mlx5_0:1", PLAIN - {"ib0"}),
        ("^=mlx5_0", {"eth1", "eth10"}),
        ("=mlx5_9", PLAIN),
        ("mlx5_9:1", PLAIN),
        ("eth10,mlx5_9", {"eth10"}),
        ("mlx5_8", PLAIN),
        ("mlx4", set()),
    ],
)
def test_own_variable(nics, expected):
    assert used(nics) == expected


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("NCCL_SOCKET_IFNAME", "eth1", {"eth1", "eth10"}),
        ("NCCL_SOCKET_IFNAME", "=eth1", {"eth1"}),
        ("NCCL_SOCKET_IFNAME", "=eth1,ib1", {"eth1", "ib1"}),
        ("NCCL_SOCKET_IFNAME", "^=eth1,ib1", {"eth10", "ib0"}),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", PLAIN),
        ("GLOO_SOCKET_IFNAME", "eth1", {"eth1"}),
        ("GLOO_SOCKET_IFNAME", "eth1,ib0", {"eth1", "ib0"}),
        ("UCX_NET_DEVICES", "all", PLAIN),
        ("UCX_NET_DEVICES", "eth1", {"eth1"}),
        ("UCX_NET_DEVICES", "mlx5_0:1", {"ib0"}),
        ("UCX_NET_DEVICES", "mlx5_0:2,eth10", {"ib1", "eth10"}),
        ("UCX_NET_DEVICES", "mlx5_0", {"ib0", "ib1"}),
        ("UCX_NET_DEVICES", "^mlx5_0:1", PLAIN - {"ib0"}),
        ("UCX_NET_DEVICES", "mlx5_9:1", PLAIN),
        ("NCCL_IB_HCA", "mlx5_0:1", {"ib0"}),
        ("NCCL_IB_HCA", "mlx5", {"ib0", "ib1"}),
        ("NCCL_IB_HCA", "=mlx5", PLAIN),
        ("NCCL_IB_HCA", "=mlx5_0:2", {"ib1"}),
        ("NCCL_IB_HCA", "^mlx5_0:2", PLAIN - {"ib1"}),
        ("NCCL_IB_HCA", "^=mlx5_0", {"eth1", "eth10"}),
        ("NCCL_IB_HCA", "mlx4", PLAIN),
        ("NCCL_IB_HCA", "mlx5_8", PLAIN),
    ],
)
def test_other_libraries_variables(variable, text, expected):
    assert used(**{variable: text}) == expected
    assert used("ib1", **{variable: text}) == {"ib1"}


def test_the_first_of_several_variables_counts():
    assert used(NCCL_SOCKET_IFNAME="ib0", GLOO_SOCKET_IFNAME="ib1", UCX_NET_DEVICES="eth1") == {"ib0"}
    assert used(NCCL_SOCKET_IFNAME="", UCX_NET_DEVICES="mlx5_9:1", GLOO_SOCKET_IFNAME="ib1") == {"ib1"}


def test_reasons():
    plain = reasons()
    assert plain["lo", "127.0.0.1"] == "loopback"
    assert plain["eth1", "fe80::7"] == plain["zeroconf", "169.254.3.4"] == "link-local"
    assert plain["docker0", "172.17.0.1"] == "a bridge"
    assert plain["wlan0", "10.9.0.7"] == "the interface is down"
    assert plain["tun0", ""] == "it has no address"
    assert plain["ib0", "10.3.0.7"] == "up"
    named = reasons("=eth1")
    assert named["eth1", "10.1.0.7"] == "XVCOMM_NICS==eth1 names it"
    assert named["eth1", "fe80::7"] == "link-local"
    assert named["eth10", "10.2.0.7"] == "XVCOMM_NICS==eth1 does not name it"
    excluded = reasons(NCCL_SOCKET_IFNAME="^ib0")
    assert excluded["ib0", "10.3.0.7"] == "NCCL_SOCKET_IFNAME=^ib0 excludes it"
    assert excluded["ib1", "10.4.0.7"] == "NCCL_SOCKET_IFNAME=^ib0 does not exclude it"


def test_no_interface():
    with pytest.raises(
        ConfigError, match=r"set XVCOMM_NICS; there are .*eth1 \(10.1.0.7/24\): XVCOMM_NICS=nic9 does not name it"
    ):
        interfaces.usable(Config(nics="nic9"), {})


def test_doctor_gives_the_reasons(monkeypatch):
    monkeypatch.setenv("XVCOMM_NICS", "=eth1")
    shown = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"}).output
    assert "XVCOMM_NICS==eth1 names it" in shown
    monkeypatch.setenv("XVCOMM_NICS", "nic9")
    assert "no network interface can be used" in CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"}).output
