"""What ranks on GPUs must do, for AMD's libraries over their stand-in and for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import repeated_calls

from xvcomm.testing import World, channels, collectives, mixture, pointtopoint, refusals

REFUSALS = (
    refusals.check_arrays_refused, refusals.check_dtypes_refused, refusals.check_arguments_refused,
    refusals.check_messages_refused,
)  # fmt: skip
"""Invalid input, including arrays of other devices and handles that are not streams."""


def every_collective(world: World, count: int) -> None:
    """Every collective once."""
    world.run(collectives.check_all_reduce, "float32", "sum", count)
    world.run(collectives.check_reduce, "float32", "sum", count)
    world.run(collectives.check_reduce_scatter, "float32", "sum", count // 3)
    for check in (
        collectives.check_broadcast, collectives.check_all_gather, collectives.check_gather, collectives.check_scatter,
        collectives.check_all_to_all,
    ):  # fmt: skip
        world.run(check, "float32", count // 3)


def others(size: int, many: int) -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
    """Checks that are neither a single collective nor a single message, with their arguments.

    Args:
        size: elements of an array that is longer than a ring.
        many: messages that are under way at the same time.
    """
    return [
        (pointtopoint.check_group_beyond_rings, (size, 3)),
        (pointtopoint.check_many_in_flight, (many,)),
        (pointtopoint.check_order, (3 * many // 2,)),
        (pointtopoint.check_behind_background, ()),
        (pointtopoint.check_crosswise_waits, ()),
        (pointtopoint.check_receive_first, ()),
        (pointtopoint.check_small_send_returns, ()),
        (pointtopoint.check_beside_collectives, ()),
        (pointtopoint.check_objects, ()),
        (repeated_calls.check_messages_repeated, (20,)),
        *((check, ()) for check in channels.CHECKS),
        (collectives.check_async, (many // 5,)),
        (collectives.check_barrier, ()),
        *repeated_calls.CHECKS,
        (mixture.check_mixture, (1, 60)),
        (mixture.check_mixture, (2, 60)),
        (collectives.check_objects, ()),
        (collectives.check_premul_factors, ()),
        (collectives.check_split, ()),
        (collectives.check_subgroup, ()),
        (collectives.check_reproducible, ("float32", "sum", size // 15 + 1)),
        (collectives.check_reproducible, ("bfloat16", "avg", size // 15 + 1)),
    ]
