"""Backends, transports and RDMA, found through entry points and loaded on use. An unusable one has a reason and a remedy.

Third parties register theirs in the entry point groups `xvcomm.backends`, `xvcomm.transports` and `xvcomm.cards`, as xvcomm does.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any

from xvcomm.abc.backend import Backend
from xvcomm.abc.cards import Cards
from xvcomm.abc.device import Device
from xvcomm.config import Config
from xvcomm.errors import BackendUnavailable, ConfigError
from xvcomm.memory import vendors
from xvcomm.system.notice import notice

BACKENDS = "xvcomm.backends"
TRANSPORTS = "xvcomm.transports"
CARDS = "xvcomm.cards"

BUILT_IN = EntryPoints(
    (
        EntryPoint("cuda", "xvcomm.backends.cuda:CudaBackend", BACKENDS),
        EntryPoint("rocm", "xvcomm.backends.rocm:RocmBackend", BACKENDS),
        EntryPoint("host", "xvcomm.backends.host:HostBackend", BACKENDS),
        EntryPoint("shm", "xvcomm.backends.shm:ShmTransport", TRANSPORTS),
        EntryPoint("tcp", "xvcomm.backends.tcp:TcpTransport", TRANSPORTS),
        EntryPoint("rdma", "xvcomm.backends.rdma.cards:open_cards", CARDS),
    )
)
"""xvcomm's own entry points, for a source tree on PYTHONPATH without installed metadata."""


@dataclass(frozen=True, slots=True)
class Found:
    """A plug-in, and whether it works on this machine.

    Attributes:
        name: name of the entry point: the device type, or the transport's scheme.
        usable: whether it works.
        reason: why it does not work; otherwise empty.
        remedy: how to fix that.
    """

    name: str
    usable: bool
    reason: str
    remedy: str
    load: Callable[[], Any]


def backends() -> list[Found]:
    """All registered backends, usable ones first."""
    return _look(BACKENDS)


def transports() -> list[Found]:
    """All registered transports, usable ones first."""
    return _look(TRANSPORTS)


def backend(kind: str) -> Backend:
    """Create the backend for a device type.

    Raises:
        BackendUnavailable: none of this name works here; lists all backends with reason and remedy.
    """
    for point in _points(BACKENDS):
        if point.name == kind and _examine(point).usable:  # without loading the kernels of the others
            instance: Backend = point.load()()
            vendors.register(type(instance))
            return instance
    lines = [f"no backend for device {kind!r} works here"]
    for f in backends():
        lines.append(f"  {f.name}: works" if f.usable else f"  {f.name}: {f.reason}; {f.remedy}")
    raise BackendUnavailable("\n".join(lines))


def cards(config: Config, interfaces: Mapping[str, str], device: Device | None = None) -> Cards | None:
    """The RDMA devices of network interfaces, opened by the first plug-in that has some; None if none has.

    Args:
        interfaces: names of those that are used between hosts, by their addresses.
        device: of this process, whose memory they may reach.

    Raises:
        ConfigError: a setting makes no sense.
    """
    for point in _points(CARDS):
        try:
            found: Cards | None = point.load()(config, interfaces, device)
        except ConfigError:
            raise
        except Exception as error:  # a broken plug-in must not keep TCP from carrying
            notice(f"no RDMA by {point.value}: {type(error).__name__}: {error}")
            continue
        if found is not None:
            return found
    return None


def packages() -> list[str]:
    """Distributions that the registered backends use, each once."""
    return list(dict.fromkeys(name for kind in _classes() for name in kind.packages))


def _classes() -> Iterator[type[Backend]]:
    """Every registered backend that can be loaded, also those that do not work here."""
    for point in _points(BACKENDS):
        with contextlib.suppress(Exception):  # a broken plug-in must not take the working ones down
            yield point.load()


def _register_all() -> None:
    for kind in _classes():
        vendors.register(kind)


vendors.on_unknown(_register_all)


def installed(group: str) -> EntryPoints:
    """The entry points of a group on the import path. They are read once: the metadata of all packages takes milliseconds."""
    return _installed(group, tuple(sys.path))


@cache
def _installed(group: str, path: tuple[str, ...]) -> EntryPoints:
    return entry_points(group=group)


def _points(group: str) -> list[EntryPoint]:
    """The entry points of a group, including xvcomm's own if its metadata is not installed."""
    found = list(installed(group))
    names = {point.name for point in found}
    return [*found, *(point for point in BUILT_IN.select(group=group) if point.name not in names)]


def _look(group: str) -> list[Found]:
    found = [_examine(point) for point in _points(group)]
    return sorted(found, key=lambda f: (not f.usable, f.name))


def _examine(point: EntryPoint) -> Found:
    try:
        kind = point.load()
        refused = kind().refusal() if point.group == BACKENDS else kind.refusal()
    except Exception as error:  # a broken plug-in must not affect the others
        package = point.dist.name if point.dist else point.value
        return Found(point.name, False, f"{type(error).__name__}: {error}", f"reinstall {package}", point.load)
    if refused is None:
        return Found(point.name, True, "", "", point.load)
    reason, remedy = refused
    return Found(point.name, False, reason, remedy, point.load)
