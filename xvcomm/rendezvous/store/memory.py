"""A store in the memory of one process."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable

from xvcomm.abc.store import NotSet, Store
from xvcomm.types.deadline import NEVER, Deadline


class MemoryStore(Store):
    """A store that threads of one process share, for a job with one rank."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes, deadline: Deadline = NEVER) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, deadline: Deadline) -> bytes:
        self.wait([key], deadline)
        return self._values[key]

    def wait(self, keys: Iterable[str], deadline: Deadline) -> None:
        missing = set(keys)
        with self._changed:
            while missing := missing - self._values.keys():
                left = deadline.left()
                if not left:
                    raise NotSet(f"{', '.join(map(repr, sorted(missing)))} was not set in this process in time")
                self._changed.wait(None if math.isinf(left) else left)

    def add(self, key: str, amount: int, deadline: Deadline = NEVER) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = b"%d" % total
            self._changed.notify_all()
        return total

    def decide(self, key: str, value: bytes, deadline: Deadline = NEVER) -> bytes:
        with self._changed:
            found = self._values.setdefault(key, value)
            self._changed.notify_all()
        return found
