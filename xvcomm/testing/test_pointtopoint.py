"""Point-to-point messages of every registered backend, on real ranks within islands and across borders."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from xvcomm.testing import World, channels, pointtopoint, refusals
from xvcomm.testing.cases import COUNTS
from xvcomm.types.dtype import DTYPES

ISLANDS = ("a:2", "a:1,b:1", "a:2,b:1", "a,b,a,b")


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("check", [pointtopoint.check_blocking, pointtopoint.check_exchange])
def test_sizes(world: World, check: Callable[..., None], count: int) -> None:
    """Sizes from nothing to several times a ring."""
    world.run(check, "float32", count)


@pytest.mark.parametrize("dtype", [str(dtype) for dtype in DTYPES])
def test_dtypes(world: World, dtype: str) -> None:
    """Every dtype, bit by bit."""
    world.run(pointtopoint.check_exchange, dtype, 1001)


def test_group_beyond_rings(world: World) -> None:
    """More than the rings hold, in both directions, in any order: no deadlock."""
    world.run(pointtopoint.check_group_beyond_rings, 1_500_001, 3)


def test_many_in_flight(world: World) -> None:
    """More messages under way than a ledger has entries."""
    world.run(pointtopoint.check_many_in_flight, 200)


def test_order(world: World) -> None:
    """Messages arrive as they were sent."""
    world.run(pointtopoint.check_order, 300)


@pytest.mark.parametrize(
    "check",
    [
        pointtopoint.check_behind_background,
        pointtopoint.check_crosswise_waits,
        pointtopoint.check_receive_first,
        pointtopoint.check_small_send_returns,
        pointtopoint.check_beside_collectives,
        pointtopoint.check_objects,
        *channels.CHECKS,
        refusals.check_messages_refused,
    ],
)
def test_others(world: World, check: Callable[..., None]) -> None:
    """What has no size."""
    world.run(check)


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_rings_of_every_shape(lanes: int, slots: int) -> None:
    """Several lanes, few small slots: every message wraps around many times."""
    shape = {"XVCOMM_RING_LANES": lanes, "XVCOMM_RING_SLOTS": slots, "XVCOMM_RING_SLOT_BYTES": 4096}
    with World(islands="a:1,b:1", env={name: str(value) for name, value in shape.items()}) as ranks:
        for count in (0, 1, 1023, 1025, 65_537):
            ranks.run(pointtopoint.check_exchange, "float32", count)
        ranks.run(pointtopoint.check_group_beyond_rings, 300_001, 3)
        ranks.run(pointtopoint.check_many_in_flight, 70)
        for check in channels.CHECKS:
            ranks.run(check)
