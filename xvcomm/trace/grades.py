"""How far RDMA devices came with the memory of a rank's GPU, in the rank's region of the flight recorders.

A place is text, the device's name and its grades of writes and reads, `mlx5_0 direct bytes`; `-` is none. It is written once, the
first byte last; reads may happen at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xvcomm.trace.format import GROUPS_AT, HEADER_BYTES, RECORD_BYTES
from xvcomm.trace.snapshot import Grades

_NONE = "-"


def write(memory: memoryview, found: Sequence[Grades]) -> None:
    """Write so many as there is room for to a region, each once."""
    for at, one in zip(_places(), found, strict=False):
        words = (one.device, one.writes or _NONE, one.reads or _NONE)
        text = " ".join(words).encode()[:RECORD_BYTES].ljust(RECORD_BYTES, b"\0")
        memory[at + 1 : at + RECORD_BYTES] = text[1:]
        memory[at : at + 1] = text[:1]


def read(memory: memoryview) -> tuple[Grades, ...]:
    """Those of a region."""
    return parse_all(bytes(memory[at : at + RECORD_BYTES]) for at in _places())


def parse_all(places: Iterable[bytes]) -> tuple[Grades, ...]:
    """Those of places."""
    return tuple(found for place in places if (found := _parse(place)) is not None)


def _parse(place: bytes) -> Grades | None:
    """What a place says; None if it is free."""
    words = place.partition(b"\0")[0].decode(errors="replace").split(" ")
    if len(words) != 3:
        return None
    device, writes, reads = ("" if word == _NONE else word for word in words)
    return Grades(device, writes, reads)


def _places() -> Iterable[int]:
    return range(HEADER_BYTES, GROUPS_AT, RECORD_BYTES)
