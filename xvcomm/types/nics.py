"""A list of network interfaces and RDMA devices, as `XVCOMM_NICS` and other libraries' variables have it."""

from __future__ import annotations

from ipaddress import ip_interface, ip_network
from typing import NamedTuple


class NicList(NamedTuple):
    """What a variable names.

    Attributes:
        source: the variable with its value.
        parts: names, beginnings of names, addresses, networks.
        excludes: whether what it names is left out, and not what it does not name.
        exact: whether names count as a whole only.
        below: network interfaces of the RDMA devices that it names.
    """

    source: str
    parts: tuple[str, ...]
    excludes: bool
    exact: bool
    below: tuple[str, ...] = ()

    @classmethod
    def parse(cls, source: str, text: str) -> NicList:
        """`text` in NCCL's spelling: `[^][=]part,part`."""
        excludes, text = text.startswith("^"), text.removeprefix("^")
        exact, text = text.startswith("="), text.removeprefix("=")
        return cls(source, tuple(filter(None, map(str.strip, text.split(",")))), excludes, exact)

    def names(self, name: str, address: str) -> bool:
        """Whether it has this address of a network interface."""
        return name in self.below or any(self._means(name, address, part) for part in self.parts)

    def names_device(self, device: str, port: int | None = None) -> bool:
        """Whether it has a port of an RDMA device, `mlx5_0` or `mlx5_0:1`; without a port any one of them."""
        found = (part.partition(":") for part in self.parts)
        return any(
            self._is(device, name) and (not number or port is None or number == str(port)) for name, _, number in found
        )

    def judge(self, *, named: bool) -> tuple[bool, str]:
        """Whether something is used that it names or does not name, and why."""
        verb = ("names it" if named else "does not name it", "excludes it" if named else "does not exclude it")
        return named is not self.excludes, f"{self.source} {verb[self.excludes]}"

    def _is(self, name: str, part: str) -> bool:
        return name == part or (not self.exact and bool(part) and name.startswith(part))

    def _means(self, name: str, address: str, part: str) -> bool:
        if self._is(name, part):
            return True
        try:
            return ip_interface(address).ip in ip_network(part, strict=False)
        except ValueError:
            return False
