"""Which ports of InfiniBand are used between hosts, and why. They need no IP over InfiniBand, and no other network interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from xvcomm.backends.rdma import sysfs
from xvcomm.backends.rdma.gids import subnet_gid
from xvcomm.config import Config
from xvcomm.types.nics import NicList


@dataclass(frozen=True)
class PortChoice:
    """What a list chooses of the ports.

    Attributes:
        names: the list; None if all are used.
        interfaces: names of the network interfaces that are used between hosts, by their addresses.
    """

    names: NicList | None
    interfaces: Mapping[str, str]

    @classmethod
    def of(cls, config: Config, env: Mapping[str, str], interfaces: Mapping[str, str]) -> PortChoice:
        """By `XVCOMM_NICS`, else by what NCCL and UCX take for RDMA devices. Lists for sockets alone say nothing of them."""
        if config.nics:
            return cls(NicList.parse(f"XVCOMM_NICS={config.nics}", config.nics), interfaces)
        for variable in ("NCCL_IB_HCA", "UCX_NET_DEVICES"):
            text = env.get(variable)
            if text and not (variable == "UCX_NET_DEVICES" and text == "all"):
                exact = "" if variable == "NCCL_IB_HCA" or text.startswith("^") else "="
                return cls(NicList.parse(f"{variable}={text}", exact + text), interfaces)
        return cls(None, interfaces)

    def judge(self, device: str, port: int, root: Path = sysfs.ROOT) -> tuple[bool, str]:
        """Whether a port is used, and why: it may be named itself, or its network interface of IP over InfiniBand."""
        if self.names is None:
            return True, "up"
        above = [name for name, number in sysfs.interfaces(device, root).items() if number == port]
        addresses = [(name, address) for address, name in self.interfaces.items()]
        named = self.names.names_device(device, port) or any(
            self.names.names(name, address) for name, address in [*addresses, *((name, "") for name in above)]
            if name in above
        )  # fmt: skip
        return self.names.judge(named=named)

    def subnet_ports(self, device: str, root: Path = sysfs.ROOT) -> dict[int, str]:
        """The active ports of InfiniBand of a device that are used, with the GIDs by which they have their places in subnets."""
        found = {port.number: subnet_gid(port) for port in sysfs.ports(device, root) if port.state == "active"}
        return {number: gid.address for number, gid in found.items() if gid and self.judge(device, number, root)[0]}
