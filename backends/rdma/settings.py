"""How RDMA is used between hosts: by xvcomm's settings, and by NCCL's where those are unset."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from xvcomm.config import Config


def refusal(config: Config, env: Mapping[str, str]) -> str:
    """Why no RDMA device is used, whichever there are; empty if they are."""
    if config.rdma == 0:
        return "XVCOMM_RDMA=0"
    if config.rdma is None and env.get("NCCL_IB_DISABLE") == "1":
        return "NCCL_IB_DISABLE=1; XVCOMM_RDMA=1 overrides it"
    return "XVCOMM_TLS=1, and RDMA is not encrypted" if config.tls else ""


def options(config: Config, env: Mapping[str, str]) -> dict[str, Any]:
    """What a `pairs.Path` takes from the settings."""
    return {
        "timeout": config.rdma_timeout,
        "retries": config.rdma_retries,
        "traffic_class": _first(config.rdma_traffic_class, env.get("NCCL_IB_TC"), 255),
        "service_level": _first(config.rdma_service_level, env.get("NCCL_IB_SL"), 15),
        "grh": bool(config.rdma_grh),
    }


def relaxed(config: Config, env: Mapping[str, str]) -> bool:
    """Whether payload may reach memory in any order."""
    return bool(_first(config.rdma_relaxed_ordering, env.get("NCCL_IB_PCI_RELAXED_ORDERING", "2"), 2))


def _first(ours: int | None, theirs: str | None, most: int) -> int:
    """Our setting, or NCCL's if it makes sense, or 0."""
    if ours is None:
        with contextlib.suppress(ValueError):
            number = int(theirs or "0", 0)
            return number if 0 <= number <= most else 0
    return ours or 0
