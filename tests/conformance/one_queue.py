"""Checks for GPUs whose streams share few hardware queues: no work may be queued there behind work that waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xvcomm.testing import asynchronous, collectives, pointtopoint

CHECKS: tuple[tuple[Callable[..., None], tuple[Any, ...]], ...] = (
    (collectives.check_all_reduce, ("float32", "sum", 300_001)),
    (collectives.check_all_to_all, ("float32", 30_001)),
    (collectives.check_async, (20,)),
    (pointtopoint.check_exchange, ("float32", 300_001)),
    (pointtopoint.check_many_in_flight, (100,)),
    (pointtopoint.check_crosswise_waits, ()),
    (pointtopoint.check_beside_collectives, ()),
    (pointtopoint.check_group_beyond_rings, (300_001, 3)),
    *((check, ()) for check in asynchronous.CHECKS),
)
"""Checks with their arguments, for ranks whose environment says `CUDA_DEVICE_MAX_CONNECTIONS=1` or `GPU_MAX_HW_QUEUES=1`."""
