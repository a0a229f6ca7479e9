"""Limits on concurrent launches of movers, which several threads make at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import cast

from xvcomm.backends.gpu.ring_ports import Port
from xvcomm.backends.gpu.room import Room


class APort:
    """A port without pending work."""

    end = SimpleNamespace(sequence=0)

    def finished(self) -> tuple[int, bool]:
        return 0, True


def test_threads_count_each_others_launches() -> None:
    room, shared = Room(), cast(Port, APort())

    def launch(stream: int) -> int:
        end, count = time.monotonic() + 0.5, 0
        while time.monotonic() < end:
            blocks = room.left(stream)
            room.take(stream, shared, blocks)
            assert 1 <= blocks <= 64
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(launch, range(4)))
    room.forget(shared)
    assert room.left(9) >= 32, "of what is over at most half is still counted"
