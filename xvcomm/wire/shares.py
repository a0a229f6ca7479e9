"""Which paths have carried the newest messages of a wire, counted slot by slot."""

from __future__ import annotations

from typing import Any

import numpy as np

from xvcomm.jit.inline import register_jitable
from xvcomm.memory.ring import LEDGER
from xvcomm.wire.records import PARTS, SHARE, share_at


@register_jitable
def count_slot(wire: Any, rail: Any, message: int, nbytes: int) -> None:
    """Note that a rail carries so many bytes of a message; the caller holds the carrier's lock."""
    share = share_at(wire.shares, message % LEDGER)
    if share.message != message:
        share.message, share.count = message, 0
    last = share.count
    for i in range(last):
        if share.parts[i][0] == rail.path:
            share.parts[i][1] += nbytes
            return
    if last == PARTS:
        share.parts[PARTS - 1][1] += nbytes
        return
    share.parts[last][0], share.parts[last][1] = rail.path, nbytes
    share.count = last + 1


class Shares:
    """Those of one wire.

    Attributes:
        address: see `records.WIRE`.
    """

    def __init__(self) -> None:
        self._table = np.zeros(LEDGER, SHARE)
        self.address = self._table.ctypes.data

    def read(self) -> dict[int, list[tuple[int, int]]]:
        """The numbers of paths and the bytes that each has carried, by the numbers of messages, from 1 on."""
        found = self._table.copy()
        same = found["message"] == self._table["message"]  # else another message has begun meanwhile
        rows = found[same & (found["message"] > 0)].tolist()
        return {message: [(path, nbytes) for path, nbytes in parts[:count].tolist()] for message, count, parts in rows}
