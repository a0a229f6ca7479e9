"""What rings between hosts are tested with, whatever carries them: on ranks with host labels, and over RDMA."""

from __future__ import annotations

from xvcomm.testing import channels, collectives, pointtopoint, refusals

COUNTS, ROWS, MESSAGE_COUNTS = (0, 1, 1000, 65_537, 1_000_003), (0, 3, 21_851), (0, 1, 1000, 1_000_003)
"""Elements of reductions, of a row that moves, and of messages."""

MOVING = (
    collectives.check_broadcast, collectives.check_all_gather, collectives.check_gather, collectives.check_scatter,
    collectives.check_all_to_all,
)  # fmt: skip
"""They take a dtype's name and a number of rows."""

OTHERS = (
    collectives.check_averages, collectives.check_barrier, collectives.check_objects, collectives.check_split,
    collectives.check_subgroup, collectives.check_premul_factors,
)  # fmt: skip
MESSAGES = (
    pointtopoint.check_crosswise_waits, pointtopoint.check_behind_background, pointtopoint.check_receive_first,
    pointtopoint.check_small_send_returns, pointtopoint.check_beside_collectives, pointtopoint.check_objects,
    *channels.CHECKS, refusals.check_messages_refused,
)  # fmt: skip
"""They take nothing more."""
