"""Refuses default groups in a process that is to rejoin a job: torch makes them of all ranks at once, and cannot let one in."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from xvcomm.config import replacement


def refuse(ours: str) -> None:
    """Let `init_process_group` raise ConfigError for this backend before torch's rendezvous, where it would hang.

    Until `xvcomm.init` has joined the job. Idempotent.
    """
    real = c10d.init_process_group
    if hasattr(real, "refuses"):
        return

    @functools.wraps(real)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        if {part.rpartition(":")[2].lower() for part in str(backend).split(",")} & {ours, replacement()}:
            from xvcomm.adapters.torch.errors import mapped
            from xvcomm.comm.rejoining import refuse_rejoining

            with mapped():
                refuse_rejoining("a process group of torch.distributed")
        real(backend, *args, **kwargs)

    init_process_group.refuses = True  # type: ignore[attr-defined]
    dist.init_process_group = c10d.init_process_group = init_process_group
