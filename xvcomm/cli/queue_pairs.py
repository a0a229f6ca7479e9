"""What `xvcomm doctor --reach` tells of RDMA: which devices of two hosts form queue pairs, and which are not in use, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from xvcomm.abc.cards import QueueEnd
from xvcomm.abc.transport import PairTrial
from xvcomm.backends.rdma import report
from xvcomm.config import Config
from xvcomm.engine.session import plugins
from xvcomm.types.route import Route
from xvcomm.wire.reachability import disjoint, free

REMEDY = 'what each reason asks for is in docs/rdma.md, under "What the texts mean"; XVCOMM_NICS chooses devices'
_LISTED = 64
"""Most lines of one kind."""


class Devices(msgspec.Struct, frozen=True):
    """The RDMA devices of a host.

    Attributes:
        used: those that are in use between hosts, `mlx5_0 port 1`.
        unused: the others, each with the reason and the remedy.
    """

    used: tuple[str, ...] = ()
    unused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class QueuePairs:
    """What the ranks of a job have found.

    Attributes:
        hosts: their names.
        devices: of each host.
        trials: of the first of two hosts, by their indices, with the second one. Preferred ones come first.
    """

    hosts: Sequence[str] = ()
    devices: Sequence[Devices] = ()
    trials: Mapping[tuple[int, int], Sequence[PairTrial]] = field(default_factory=dict)

    def joined(self, pair: tuple[int, int]) -> list[PairTrial]:
        """Those that a job would use between two hosts, each device once."""
        works = {trial.route: trial for trial in self.trials[pair] if not trial.refusal}
        return [works[route] for route in disjoint(works)]

    def missing(self, pair: tuple[int, int]) -> list[PairTrial]:
        """Those that would add to them if they worked."""
        routes = {trial.route: trial for trial in self.trials[pair]}
        return [routes[route] for route in free(routes, [trial.route.interfaces for trial in self.joined(pair)])]

    def lines(self) -> Iterator[str]:
        """All of it, for users; nothing where no host has a device."""
        if not any(host.used or host.unused for host in self.devices):
            return
        works = [f"{self._where(pair)}: {_ends(trial)}" for pair in self.trials for trial in self.joined(pair)]
        missing = [f"{where}: {what}" for where, what in self.refusals()]
        yield from _listed("Queue pairs of RDMA devices:", works)
        yield from _listed("Devices that form none, and would add one each:", missing)
        if missing:
            yield f"Remedy: {REMEDY}"
        yield from _listed("RDMA devices that are not in use:", list(self._unused()))

    def refusals(self) -> Iterator[tuple[str, str]]:
        """The hosts of what is `missing`, and the devices with the reason."""
        for pair in self.trials:
            for trial in self.missing(pair):
                yield self._where(pair), f"{_ends(trial)}: {trial.refusal}"

    def _where(self, pair: tuple[int, int]) -> str:
        return " to ".join(self.hosts[host] for host in pair)

    def _unused(self) -> Iterator[str]:
        for name, host in zip(self.hosts, self.devices, strict=True):
            for device, why in host.unused:
                yield f"{name}: {device}: {why}"
            if not host.used and not host.unused:
                yield f"{name} has none"

    def plain(self) -> dict[str, Any]:
        """All of it, for programs, also the trials that `lines` leaves out."""
        return {
            "devices": {
                name: {"used": list(host.used), "unused": [{"device": device, "reason": why} for device, why in host.unused]}
                for name, host in zip(self.hosts, self.devices, strict=True)
            },
            "pairs": [
                {
                    "from": self.hosts[pair[0]], "to": self.hosts[pair[1]], "local": trial.route.local,
                    "remote": trial.route.remote, "interfaces": trial.route.interfaces, "via": trial.route.via,
                    "here": _plain(trial.here), "there": _plain(trial.there), "refusal": trial.refusal,
                }
                for pair, trials in self.trials.items()
                for trial in trials
            ],
        }  # fmt: skip


def devices(config: Config, env: Mapping[str, str]) -> Devices:
    """The RDMA devices of this host."""
    usable = (transport for transport in plugins.transports() if transport.usable)
    interfaces = [interface for transport in usable for interface in transport.load().interfaces(config, env)]
    used: list[str] = []
    unused: list[tuple[str, str]] = []
    for device in report.examine(config, env, interfaces):
        if not device.ports:
            unused.append((device.name, _why(device.obstacles)))
        for port in device.ports:
            name, obstacles = f"{device.name} port {port.number}", device.obstacles + port.obstacles
            if obstacles:
                unused.append((name, _why(obstacles)))
            else:
                used.append(name)
    return Devices(tuple(used), tuple(unused))


def _why(obstacles: Sequence[report.Obstacle]) -> str:
    return "; ".join(text for obstacle in obstacles for text in (obstacle.reason, obstacle.remedy) if text)


def merge(
    names: Sequence[str], places: Sequence[int], found: Sequence[Sequence[tuple[int, Sequence[PairTrial]]]],
    owned: Sequence[Devices],
) -> QueuePairs:  # fmt: skip
    """What the ranks have found, by hosts: devices are joined if all ranks of one of the two hosts could join them.

    Args:
        names: of the hosts.
        places: the index of each rank's host.
        found: by each rank, with a rank of each other host.
        owned: the devices that each rank has found on its host.
    """
    ways: dict[tuple[int, int], dict[tuple[str, str], PairTrial]] = {}
    for rank, tried in enumerate(found):
        for member, trials in tried:
            before = ways.setdefault((places[rank], places[member]), {})
            for trial in trials:
                ends = trial.route.local, trial.route.remote
                if trial.refusal or ends not in before:
                    before[ends] = trial
    merged = {}
    for (here, there), known in sorted(ways.items()):
        if here < there and known:
            back = ways.get((there, here), {})
            merged[here, there] = [_better(trial, back.get((ends[1], ends[0]))) for ends, trial in known.items()]
    return QueuePairs(names, [owned[places.index(host)] for host in range(len(names))], merged)


def _better(trial: PairTrial, back: PairTrial | None) -> PairTrial:
    """One of two trials of the same devices, the second of which was made from the other host."""
    if not trial.refusal or back is None or (back.refusal and (trial.here or not back.here)):
        return trial
    local, remote, port, interfaces, number, via = back.route
    turned = Route(remote, local, port, interfaces[::-1], number, via and (via[1], via[0]))
    return PairTrial(turned, back.there, back.here, back.refusal)


def _ends(trial: PairTrial) -> str:
    """Both devices, or their addresses where they are not known."""
    route = trial.route
    here, there = (f"{address} ({name})" for address, name in zip(route[:2], route.interfaces, strict=True))
    return f"{trial.here or here}, to {trial.there or there}"


def _plain(end: QueueEnd | None) -> dict[str, Any] | None:
    return None if end is None else end._asdict()


def _listed(title: str, lines: Sequence[str]) -> Iterator[str]:
    """So many lines below a title; nothing if there are none."""
    if lines:
        yield title
        yield from lines[:_LISTED]
    if len(lines) > _LISTED:
        yield f"and {len(lines) - _LISTED} others; --json lists all"
