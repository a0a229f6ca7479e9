"""The job's store for those who keep it, whichever process serves it at the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from xvcomm.abc.store import Notices, Standby, Store
from xvcomm.types.deadline import NEVER, Deadline


class MovingStore(Store):
    """Stands for one store at first, and for others later; closes each when it moves to the next, and the last by `close`.

    Args:
        close: closes the first store.
    """

    def __init__(self, store: Store, close: Callable[[], None]) -> None:
        self._store, self._close = store, close

    def move(self, store: Store) -> None:
        """Stand for another store from now on."""
        close, self._store, self._close = self._close, store, store.close
        close()

    def close(self) -> None:
        self._close()

    def set(self, key: str, value: bytes, deadline: Deadline = NEVER) -> None:
        self._store.set(key, value, deadline)

    def get(self, key: str, deadline: Deadline) -> bytes:
        return self._store.get(key, deadline)

    def wait(self, keys: Iterable[str], deadline: Deadline) -> None:
        self._store.wait(keys, deadline)

    def add(self, key: str, amount: int, deadline: Deadline = NEVER) -> int:
        return self._store.add(key, amount, deadline)

    def decide(self, key: str, value: bytes, deadline: Deadline = NEVER) -> bytes:
        return self._store.decide(key, value, deadline)

    def notices(self, place: str, will: bytes, silence: bytes = b"", patience: float = math.inf) -> Notices | None:
        return self._store.notices(place, will, silence, patience)

    def give_up(self) -> None:
        self._store.give_up()

    @property
    def served_here(self) -> bool:
        return self._store.served_here

    def standby(self, ports: Sequence[int]) -> Standby | None:
        return self._store.standby(ports)

    def successor(self, address: str, deadline: Deadline) -> Store:
        return self._store.successor(address, deadline)

    def ended(self, addresses: Collection[str]) -> list[str]:
        return self._store.ended(addresses)
