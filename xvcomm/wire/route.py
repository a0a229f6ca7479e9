"""A way to another process."""

from __future__ import annotations

from typing import NamedTuple


class Route(NamedTuple):
    """From an address of this host to an address and port of another."""

    local: str
    remote: str
    port: int
