"""Stable codes of the operations, used in ledgers, flight recorder and messages. A code never changes its meaning."""

from __future__ import annotations

import enum


class OpCode(enum.IntEnum):
    """A public operation."""

    SEND = 1
    RECV = 2
    BROADCAST = 3
    REDUCE = 4
    ALL_REDUCE = 5
    REDUCE_SCATTER = 6
    ALL_GATHER = 7
    GATHER = 8
    SCATTER = 9
    ALL_TO_ALL = 10
    BARRIER = 11
    SPLIT = 12
    INIT = 13
    PROBE = 14
    SHRINK = 15
    GROW = 16

    __hash__ = int.__hash__  # Enum.__hash__ is a Python function, too slow for the keys of lookups per operation

    def __str__(self) -> str:
        return self.name.lower()
