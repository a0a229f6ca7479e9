"""RDMA devices where there are none, and what is made of pyverbs' answers."""

from __future__ import annotations

import struct
import sys
from ipaddress import IPv6Address
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from xvcomm.backends.rdma.devices import Gid, devices, pyverbs, refusal
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
        return SimpleNamespace(gid_tbl_len=8, state=state, link_layer=link, lid=lid, active_mtu=5)

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
