"""A rank's communicators in its region of the flight recorders, so that other processes know who takes part in what.

A place is two words, the number of the communicator in records, 0 if the place is free, and the number of its newest collective
that the rank has called, -1 if none, which compiled code writes in each; then text: its ranks in brief and its name,
`0-3,8-14/2 dp`. Reads may happen at any time: a place that changes meanwhile is left out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from functools import partial

from xvcomm.trace.format import GROUPS_AT, RECORD_BYTES, RECORDS_AT
from xvcomm.trace.snapshot import Group

_IDENT, _HEAD = struct.Struct("<q"), struct.Struct("<qq")
_TEXT_BYTES, _NAME_BYTES = RECORD_BYTES - _HEAD.size, 60
_UNKNOWN = "?"


def write(memory: memoryview, group: Group) -> bool:
    """Write a communicator to a free place of a region; False if there is none."""
    for at in _places():
        if not _ident(memory, at):
            memory[at + _HEAD.size : at + RECORD_BYTES] = _text(group).ljust(_TEXT_BYTES, b"\0")
            _HEAD.pack_into(memory, at, 0, -1)
            _IDENT.pack_into(memory, at, group.ident)
            return True
    return False


def newest_at(memory: memoryview, ident: int) -> int:
    """Offset in a region of the number of a communicator's newest collective; 0 if the communicator has no place."""
    return next((at + _IDENT.size for at in _places() if _ident(memory, at) == ident), 0)


def erase(memory: memoryview, ident: int) -> None:
    """Free a communicator's place, if it has one."""
    for at in _places():
        if _ident(memory, at) == ident:
            _IDENT.pack_into(memory, at, 0)


def read(memory: memoryview) -> tuple[Group, ...]:
    """The communicators of a region."""
    found = []
    for at in filter(partial(_ident, memory), _places()):
        group = parse(bytes(memory[at : at + RECORD_BYTES]))
        if group is not None and _ident(memory, at) == group.ident:
            found.append(group)
    return tuple(found)


def parse_all(places: Iterable[bytes]) -> tuple[Group, ...]:
    """The communicators of places."""
    return tuple(group for place in places if (group := parse(place)) is not None)


def parse(place: bytes) -> Group | None:
    """What a place says; None if it is free."""
    ident, newest = _HEAD.unpack_from(place)
    ranks, _, name = place[_HEAD.size :].partition(b"\0")[0].decode(errors="replace").partition(" ")
    try:
        return Group(ident, name, tuple(_ranks(ranks)), newest) if ident and ranks else None
    except ValueError:  # it is being written
        return None


def _places() -> Iterable[int]:
    return range(GROUPS_AT, RECORDS_AT, RECORD_BYTES)


def _ident(memory: memoryview, at: int) -> int:
    ident: int = _IDENT.unpack_from(memory, at)[0]
    return ident


def _text(group: Group) -> bytes:
    name = group.name.encode()[:_NAME_BYTES].decode(errors="ignore")
    text = f"{brief(group.ranks)} {name}".encode()
    return text if len(text) < _TEXT_BYTES else f"{_UNKNOWN} {name}".encode()


def brief(ranks: Iterable[int]) -> str:
    """Numbers in the manner of `taskset`: `0-3,8-14/2` for 0, 1, 2, 3, 8, 10, 12, 14. Their order is kept."""
    rest, parts = list(ranks), []
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 0
        end = 1
        while step > 0 and end < len(rest) and rest[end] - rest[end - 1] == step:
            end += 1
        if end < 3:
            end = 1
        stride = f"/{step}" if step > 1 and end > 1 else ""
        parts.append(f"{rest[0]}-{rest[end - 1]}{stride}" if end > 1 else str(rest[0]))
        del rest[:end]
    return ",".join(parts)


def _ranks(text: str) -> Iterator[int]:
    for part in text.split(",") if text != _UNKNOWN else ():
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        yield from range(int(first), int(last or first) + 1, int(step or 1))
