"""What a process brings into a job: the backend of its device, its transports, and how it describes itself to the others."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from xvcomm.abc.backend import Backend
from xvcomm.abc.device import Device
from xvcomm.abc.transport import Transport
from xvcomm.config import Config
from xvcomm.engine.session import plugins
from xvcomm.errors import BackendUnavailable
from xvcomm.types.topology import RankInfo


def choose_backend(config: Config) -> Backend:
    """The backend that `XVCOMM_DEVICE` names, else that of a GPU, else that of host memory.

    Raises:
        BackendUnavailable: it does not work here; with the remedy.
    """
    if config.device is not None:
        return plugins.backend(config.device)
    usable = [found for found in plugins.backends() if found.usable]
    usable.sort(key=lambda found: found.name == "host")
    return plugins.backend(usable[0].name if usable else "host")


def open_transports(config: Config, host: str) -> list[Transport]:
    """All transports that work here.

    Raises:
        BackendUnavailable: there is none.
    """
    opened = [found.load()(config, host) for found in plugins.transports() if found.usable]
    if not opened:
        raise BackendUnavailable("no transport works here; `xvcomm doctor` tells why")
    return opened


def describe(config: Config, device: Device, rank: int, host: str) -> RankInfo:
    """What the other ranks learn of this one."""
    able = device.capabilities()
    return RankInfo(
        rank=rank, host=host, hostname=config.host or socket.gethostname(), pid=os.getpid(), device=able.kind,
        island=config.island or able.island, rehearsal=bool(config.island or config.host),
    )  # fmt: skip


def collective_label(infos: Sequence[RankInfo], rank: int) -> str:
    """The island label of a rank, made distinct if ranks with equal labels cannot join natively.

    Args:
        infos: of all ranks of the job.
    """
    info = infos[rank]
    hosts = list(dict.fromkeys(i.host for i in infos))
    if info.device == "host" and len(hosts) > 1:
        return f"{info.island}@{hosts.index(info.host)}"
    return info.island
