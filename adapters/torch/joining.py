"""Creates the communicators of a group of `torch.distributed`.

The default group joins a job through torch's store. Later groups are subgroups of that job: only their members take part, as
torch requires.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from xvcomm.adapters.torch.errors import mapped
from xvcomm.adapters.torch.planes import HostPlane, Plane, StreamPlane
from xvcomm.adapters.torch.versions import Making
from xvcomm.comm.communicator import Communicator
from xvcomm.comm.init import init
from xvcomm.config import Config
from xvcomm.memory import vendors

_MAIN, _HOST = "main", "host"


class Planes:
    """The planes of one group.

    Attributes:
        comms: its communicators: `main` for the ranks' devices, and `host` if these are all GPUs.
        host, gpu: planes for tensors in host memory, and on a GPU; None if this rank has none.
    """

    def __init__(self, comms: dict[str, Communicator], name: str) -> None:
        self.comms = comms
        self.name = name
        main = comms[_MAIN]
        place = None if main.device == "host" else torch.device(vendors.of(main.device).torch_device, main.device_index)
        self.gpu: StreamPlane | None = StreamPlane(main, place, bring=False) if place is not None else None
        self.host: Plane
        if _HOST in comms:
            self.host = HostPlane(comms[_HOST], name)
        elif place is not None:
            self.host = StreamPlane(main, place, bring=True)
        else:
            self.host = HostPlane(main, name)

    def subgroup(self, ranks: Sequence[int], name: str, timeout: float) -> Planes:
        """Create planes of some of this group's ranks; only they call this. Blocks until all have."""
        comms = {}
        for kind, comm in self.comms.items():
            comms[kind] = comm.subgroup(ranks, f"{name}/{kind}", timeout=timeout)
            comms[kind].timeout = timeout
        return Planes(comms, name)

    def shrink(self, excluded: Sequence[int], name: str, timeout: float) -> Planes:
        """Create planes of this group's ranks but some, and those that are lost; these are closed."""
        comms = dict[str, Communicator]()
        try:
            for kind, comm in self.comms.items():
                comms[kind] = comm.shrink(timeout, exclude=excluded)
        except BaseException:
            for made in comms.values():
                made.close()
            raise
        self.close()
        return Planes(comms, name)

    def abort(self, reason: str) -> None:
        """Make every rank leave its operation."""
        for comm in self.comms.values():
            comm.abort(reason)

    def close(self) -> None:
        """Close all communicators. Idempotent."""
        for plane in (self.host, self.gpu):
            if plane is not None:
                plane.close()
        for comm in self.comms.values():
            comm.close()


def join(store: Any, rank: int, size: int, timeout: float, making: Making) -> Planes:
    """Create planes for a group that torch is about to create; blocks until all its ranks have called this.

    Args:
        rank, size: in the group.
        timeout: seconds to join, and the default timeout of operations.
        making: the group that torch has been asked to create.

    Raises:
        DeadlineExceeded: names the ranks that did not come.
        ConfigError: two processes have the same rank, or a variable is invalid.
    """
    with mapped():
        world = default_planes()
        if making.ranks and world is not None:
            return world.subgroup(making.ranks, making.name, timeout)
        return _meet(store, rank, size, making, timeout)


def default_planes() -> Planes | None:
    """The planes of torch's default group, if it is of xvcomm."""
    if not dist.is_initialized():
        return None
    return getattr(dist.distributed_c10d._get_default_group(), "planes", None)


def _meet(store: Any, rank: int, size: int, making: Making, timeout: float) -> Planes:
    place = dist.PrefixStore(_MAIN, store)
    main = init(rank=rank, size=size, store=place, device=_device(making.device), timeout=timeout)
    comms = {_MAIN: main}
    if "host" not in main.devices:
        place = dist.PrefixStore(_HOST, store)
        comms[_HOST] = init(rank=rank, size=size, store=place, device="host", timeout=timeout)
    return Planes(comms, making.name)


def _device(bound: torch.device | None) -> str | None:
    """This rank's device for `init`: torch's current GPU, unless the environment selects another."""
    config = Config.from_env()
    if not torch.accelerator.is_available() or config.device == "host":
        return config.device or "host"
    kind = config.device or vendors.kind_where(lambda vendor: vendor.serves(torch))
    return "host" if kind is None else f"{kind}:{_index(config) if bound is None else bound.index}"


def _index(config: Config) -> int:
    """The current GPU; if none has been selected, the launcher's local rank, as in `init_process_group`."""
    if config.device_index is not None:
        return config.device_index
    current, local = torch.accelerator.current_device_index(), os.environ.get("LOCAL_RANK", "")
    guess = config.local_rank if config.local_rank is not None else int(local) if local.isdigit() else 0
    return guess if current == 0 and guess < torch.accelerator.device_count() else current
