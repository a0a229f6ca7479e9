"""Which ranks go together in a split: the colours and keys of all, compared on all."""

from __future__ import annotations

import msgspec
import numpy as np

from xvcomm.deadline import Deadline
from xvcomm.errors import ArgumentError, MismatchError
from xvcomm.objects import Objects, gather_bytes

_Choice = tuple[int | str | None, int]


def subgroups(comm: Objects, color: int | str | None, key: int, deadline: Deadline) -> list[int] | None:
    """This rank's group, as ranks of `comm` in the group's order; None where `color` is None.

    Raises:
        ArgumentError: a colour is neither int, str nor None.
        MismatchError: one rank's colour is an int, another's a str; on all ranks.
    """
    if not isinstance(color, (int, str)) and color is not None:
        raise ArgumentError(f"split: color {color!r} is {type(color).__name__}; use an int, a str, or None")
    mine = np.frombuffer(msgspec.msgpack.encode((color, key)), np.uint8)
    gathered, counts = gather_bytes(comm, mine, None, deadline.left())
    packed = gathered.tobytes()
    choices, start = [], 0
    for count in counts:
        choices.append(msgspec.msgpack.decode(packed[start : start + count], type=_Choice))
        start += count
    _check_types(comm, choices)
    if color is None:
        return None
    members = [(k, rank) for rank, (c, k) in enumerate(choices) if c == color]
    return [rank for _, rank in sorted(members)]


def _check_types(comm: Objects, choices: list[_Choice]) -> None:
    first: dict[type, int] = {}
    for rank, (color, _) in enumerate(choices):
        if color is not None:
            first.setdefault(type(color), rank)
    if len(first) > 1:
        said = "; ".join(f"rank {r} gave the {t.__name__} {choices[r][0]!r}" for t, r in first.items())
        raise MismatchError(f"split: colours must all be of one type: {said}", rank=comm.rank, op="split")
