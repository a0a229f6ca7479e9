"""The choice between copies through shared memory and copies straight between processes, which depends on machine and size.

The first calls of each size class alternate between the two ways; then the faster one is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xvcomm.jit.inline import register_jitable

TRIES = 4
"""Tries of each way per size class; more until they took long enough that no short disturbance can have affected all of them."""

NEVER = int(np.iinfo(np.int64).max)
_TRIAL_NS = 20_000_000

TUNING = np.dtype([
    ("trials", "i8"),  # number of tries begun; -1 once a way is chosen
    ("took", "i8"),  # nanoseconds of this member's last try, for collectives
    ("spent", "i8"),  # nanoseconds of all tries
    ("best", "i8", 2),  # nanoseconds of the best staged try, of the best direct one
])  # fmt: skip
"""The two ways at arrays of about one size, 0 for staged and 1 for direct."""


@register_jitable
def note_try(tuning: Any, way: int, took: int) -> None:
    """Take account of how long a try took."""
    tuning.best[way] = min(tuning.best[way], took)
    tuning.spent += took


@register_jitable
def next_try(tuning: Any) -> int:
    """The way to try next; -1 if one is chosen."""
    trials = tuning.trials
    if trials >= 0 and (trials % 2 == 1 or trials < 2 * TRIES or tuning.spent < _TRIAL_NS):
        tuning.trials = trials + 1
        return trials % 2
    tuning.trials = -1
    return -1
