"""Device-Direct: rings in the memory of this process's GPU, where all its RDMA devices reach that, which is found out by trying.

Source: "Joint Training on AMD and NVIDIA GPUs", where the CPU posts what network cards move between GPUs of both vendors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from ipaddress import ip_interface
from typing import Any

from xvcomm.abc.device import Device
from xvcomm.abc.nic_memory import SupportsNicMemory
from xvcomm.abc.transport import Interface
from xvcomm.backends.rdma.devices import Gid, Port
from xvcomm.backends.rdma.pairs import Domain
from xvcomm.backends.rdma.slots import DirectSlots
from xvcomm.backends.rdma.trials import DIRECT, READS, WRITES, Trial, try_device, try_export
from xvcomm.config import Config
from xvcomm.errors import XvcommError
from xvcomm.system.notice import notice
from xvcomm.trace.snapshot import Grades


class DirectMemory:
    """The memory of this process's GPU, for its RDMA devices.

    Attributes:
        trials: of each device in both directions.
        writes, reads: whether all devices write to it, and read it, well.
    """

    def __init__(
        self, device: Device, domains: Sequence[Domain], ways: Sequence[tuple[Port, Gid] | None],
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Try all devices, in some milliseconds each.

        Args:
            device: a GPU that `SupportsNicMemory`.
            domains: of the devices.
            ways: an active port of each, and its GID; None if there is none.
            options: of queue pairs, see `pairs.Path`.
        """
        self._device, self._domains = device, domains
        self.trials: list[Trial] = []
        for domain, way in zip(domains, ways, strict=True):
            self.trials += try_device(device, domain, way, options)
        self.writes, self.reads = (
            all(trial.grade == DIRECT for trial in self.trials if trial.direction == direction)
            for direction in (WRITES, READS)
        )

    @property
    def works(self) -> bool:
        """Whether rings lie there, in any direction."""
        return self.writes or self.reads

    @property
    def grades(self) -> list[Grades]:
        """Of each device, as the trace has them."""
        reached = {(trial.device, trial.direction): trial.grade for trial in self.trials}
        return [Grades(d.name, reached[d.name, WRITES], reached[d.name, READS]) for d in self._domains]

    def slots(self, nbytes: int, *, producer: bool) -> DirectSlots | None:
        """See `abc.cards.Cards.direct`."""
        if not (self.reads if producer else self.writes):
            return None
        try:
            return DirectSlots(self._device, self._domains, nbytes)
        except XvcommError as error:
            notice(f"a ring lies in host memory, because the GPU's cannot be used: {error}")
            return None


def examine(
    config: Config, env: Mapping[str, str], interfaces: Sequence[Interface], device: Device
) -> list[Trial]:  # fmt: skip
    """Try the memory of a device with the RDMA devices of the network interfaces in use, as a job would; for `xvcomm doctor`.

    Args:
        interfaces: all of this host, and whether they are used between hosts.
    """
    from xvcomm.backends.rdma.cards import open_cards

    if not isinstance(device, SupportsNicMemory):
        return []
    cards = open_cards(config, addresses(interfaces), device, env)
    if cards is None:
        return [Trial("none in use", f"{WRITES}, {READS}", *try_export(device))]
    with contextlib.closing(cards):
        return list(cards.trials)


def addresses(interfaces: Sequence[Interface]) -> dict[str, str]:
    """Names of the network interfaces that are used, by their addresses, as `open_cards` takes them."""
    return {str(ip_interface(i.address).ip): i.name for i in interfaces if i.used and i.address}
