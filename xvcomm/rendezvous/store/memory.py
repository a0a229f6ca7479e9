"""A store in the memory of one process."""

from __future__ import annotations

import threading

from xvcomm.rendezvous.store.polling import PollingStore
from xvcomm.types.deadline import NEVER, Deadline


class MemoryStore(PollingStore):
    """A store that threads of one process share, for a job with one rank."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._adding = threading.Lock()

    def __str__(self) -> str:
        return "this process"

    def set(self, key: str, value: bytes, deadline: Deadline = NEVER) -> None:
        self._values[key] = value

    def look(self, key: str, deadline: Deadline = NEVER) -> bytes | None:
        return self._values.get(key)

    def add(self, key: str, amount: int, deadline: Deadline = NEVER) -> int:
        with self._adding:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = b"%d" % total
        return total

    def decide(self, key: str, value: bytes, deadline: Deadline = NEVER) -> bytes:
        return self._values.setdefault(key, value)
