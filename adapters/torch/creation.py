"""Creates process groups for torch, and finds the communicator of one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from xvcomm.adapters.torch import dispatch, options, versions
from xvcomm.adapters.torch.errors import as_torch
from xvcomm.adapters.torch.group import ProcessGroup
from xvcomm.adapters.torch.joining import join
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import ArgumentError

_SECONDS = dist.distributed_c10d.default_pg_timeout.total_seconds()


def create(given: Any, backend_options: Any) -> ProcessGroup:
    """Called by torch to create a group of the backend `xvcomm`; blocks until all its ranks call it.

    Args:
        given: c10d's options for extended backends: store, rank, size, timeout and more.
        backend_options: the user's `pg_options`; none are supported.
    """
    return make(given.store, given.group_rank, given.group_size, given.timeout, "xvcomm")


def make(store: Any, rank: int, size: int, timeout: timedelta | None, backend: str) -> ProcessGroup:
    """Create a group for the current call of `torch.distributed`; blocks until all its ranks call it.

    Args:
        rank, size: in the group.
        timeout: of its operations; None for the default.
        backend: the backend name that the program passed.
    """
    dispatch.install()
    making = versions.making()
    seconds = options.seconds(timeout) or _SECONDS
    group = ProcessGroup(join(store, rank, size, seconds, making), store, rank, size, seconds, backend)
    if making.device is not None:
        group.bound_device_id = making.device
    return group


def communicator(group: Any, device: torch.device | str | None) -> Communicator:
    """See `xvcomm.adapters.torch.communicator`."""
    if group is None:
        if not dist.is_initialized():
            raise as_torch(ArgumentError("torch's default group is not initialized; call init_process_group first"))
        group = dist.group.WORLD
    if not isinstance(group, ProcessGroup):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise as_torch(ArgumentError("this rank is not a member of the group; call this on its members"))
        kind = group.name() if isinstance(group, dist.ProcessGroup) else type(group).__name__
        raise as_torch(
            ArgumentError(f"expected a process group of xvcomm, not {kind}; create it with the backend 'xvcomm'")
        )
    planes = group.planes
    if device is None:
        return (planes.gpu or planes.host).comm
    kind = torch.device(device).type
    plane = planes.host if kind == "cpu" else planes.gpu if planes.gpu and planes.gpu.place.type == kind else None
    if plane is None:
        raise as_torch(ArgumentError(f"this rank serves no tensors on {kind} in the group; omit device"))
    return plane.comm
