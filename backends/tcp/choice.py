"""Which network interfaces of this host wires use, and why."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_address, ip_interface
from pathlib import Path

import psutil

from xvcomm.abc.transport import Interface
from xvcomm.config import Config
from xvcomm.types.nics import NicList

_SYSFS = Path("/sys/class")


def examine(config: Config, env: Mapping[str, str]) -> list[Interface]:
    """Every address of this host, and whether wires use it.

    `XVCOMM_NICS` chooses: names, beginnings of names, addresses, networks, and RDMA devices, for the interfaces above them. `^`
    before the list excludes what it names; `=` takes names as a whole. Else NCCL's, Gloo's or UCX's variables do. Else all that
    are up count, but loopback, bridges and link-local addresses; these are also left out of what is not excluded. An IPv6
    link-local address is never used, because it means nothing without the interface.
    """
    chosen = _chosen(config, env)
    return [Interface(name, address, *_judge(name, address, up, chosen)) for name, address, up in _addresses()]


def _chosen(config: Config, env: Mapping[str, str]) -> NicList | None:
    """What the first variable that is set chooses."""
    if config.nics:
        return _of_nics(config.nics)
    for variable, spelling in _OTHERS.items():
        text = env.get(variable)
        if text and (ours := spelling(text)):
            return NicList.parse(f"{variable}={text}", ours)
    return None


def _of_nics(text: str) -> NicList | None:
    """What XVCOMM_NICS chooses, with the interfaces of the RDMA devices that it names.

    None if it chooses devices alone, and none of them has an interface with an address, as on InfiniBand without IPoIB.
    """
    chosen = NicList.parse(f"XVCOMM_NICS={text}", text)
    chosen = chosen._replace(below=tuple(_below(chosen)))
    named = any(chosen.names(name, address) for name, address, _ in _addresses() if address)
    return None if not named and not chosen.excludes and any(map(chosen.names_device, _devices())) else chosen


def _of_ucx(text: str) -> str:
    """UCX's devices, `mlx5_0:1`, in NCCL's spelling, by the network interfaces that belong to them; empty if there are none."""
    mark = "^" if text.startswith("^") else ""
    names = [name for part in text.removeprefix("^").split(",") for name in _interfaces_of(part.strip())]
    return f"{mark}={','.join(names)}" if names else ""


def _of_hca(text: str) -> str:
    """NCCL's RDMA devices, `[^][=]mlx5_0:1,mlx5`, by the network interfaces that belong to them.

    Empty if none of these can be used, because NCCL needs none that has an address.
    """
    chosen = NicList.parse("", text)
    usable = {name for name, address, up in _addresses() if _judge(name, address, up, None)[0]}
    names = [name for name in _below(chosen) if name in usable]
    return f"{'^' if chosen.excludes else ''}={','.join(names)}" if names else ""


def _below(chosen: NicList) -> Iterator[str]:
    """The network interfaces of the RDMA devices that a list names."""
    for part in chosen.parts:
        _, _, port = part.partition(":")
        for device in _devices():
            if chosen._replace(parts=(part,)).names_device(device):
                yield from _interfaces_of(f"{device}:{port}")


def _devices() -> list[str]:
    return sorted(folder.name for folder in (_SYSFS / "infiniband").glob("*"))


def _interfaces_of(device: str) -> list[str]:
    """The network interfaces of an RDMA device's port, `mlx5_0:1`; any other word is one itself."""
    name, _, port = device.partition(":")
    if not (_SYSFS / "infiniband" / name).exists():
        return [] if name in ("", "all") else [name]
    found = sorted((_SYSFS / "infiniband" / name / "device" / "net").glob("*"))
    ports = {path.name: int((path / "dev_port").read_text()) for path in found}
    return [interface for interface, number in ports.items() if not port or len(found) == 1 or number == int(port) - 1]


_OTHERS: dict[str, Callable[[str], str]] = {
    "NCCL_SOCKET_IFNAME": lambda text: text,
    "GLOO_SOCKET_IFNAME": lambda text: f"={text}",
    "UCX_NET_DEVICES": _of_ucx,
    "NCCL_IB_HCA": _of_hca,
}
"""Other libraries' variables for the same, and how to read them: only NCCL's take beginnings of names."""


def _addresses() -> Iterator[tuple[str, str, bool]]:
    """Every interface's name, and every address of it, if it has any; and whether the interface is up."""
    state = {name: found.flags.split(",") for name, found in psutil.net_if_stats().items()}
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        # Not `isup`, which is false for a moment where an interface was just switched on.
        up = "up" in state.get(name, [])
        found = [a for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6) and a.netmask]
        for one in found:
            yield name, _with_prefix(one.address.partition("%")[0], one.netmask or ""), up
        if not found:
            yield name, "", up


def _with_prefix(address: str, netmask: str) -> str:
    bits = bin(int(ip_address(netmask.partition("/")[0]))).count("1")
    return f"{address}/{bits}"


def _judge(name: str, address: str, up: bool, chosen: NicList | None) -> tuple[bool, str]:
    """Whether an address is used, and why."""
    if not up:
        return False, "the interface is down"
    if not address:
        return False, "it has no address"
    ip = ip_interface(address).ip
    if ip.version == 6 and ip.is_link_local:
        return False, "link-local"
    named = chosen is not None and chosen.names(name, address)
    if chosen is not None and (named or not chosen.excludes):
        return chosen.judge(named=named)
    if ip.is_loopback:
        return False, "loopback"
    if ip.is_link_local:
        return False, "link-local"
    if (_SYSFS / "net" / name / "bridge").exists():
        return False, "a bridge"
    return (True, "up") if chosen is None else chosen.judge(named=False)
