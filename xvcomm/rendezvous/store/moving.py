"""The job's store for those who keep it, whichever process serves it at the time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

from xvcomm.abc.store import ForwardingStore, Set, Step, Store
from xvcomm.types.deadline import NEVER, Deadline


class MovingStore(ForwardingStore):
    """Stands for one store at first, and for others later; closes each when it moves to the next, and the last by `close`.

    What this process publishes goes with its next `exchange`; if that fails, with the one after it, perhaps with another store.

    Args:
        close: closes the first store.
    """

    def __init__(self, store: Store, close: Callable[[], None]) -> None:
        super().__init__(store)
        self._close = close
        self._unsaid: list[Step] = []
        self._saying = threading.Lock()

    def publish(self, key: str, value: bytes, deadline: Deadline = NEVER) -> None:
        with self._saying:
            self._unsaid.append(Set(key, value))

    def exchange(
        self, steps: Sequence[Step], keys: Sequence[str] = (), deadline: Deadline = NEVER, patience: float = math.inf
    ) -> tuple[list[bytes], list[bytes | None]]:
        with self._saying:
            unsaid, self._unsaid = self._unsaid, []
        try:
            given, found = self._store.exchange([*unsaid, *steps], keys, deadline, patience)
        except BaseException:
            with self._saying:
                self._unsaid = [*unsaid, *self._unsaid]
            raise
        return given[len(unsaid) :], found

    def move(self, store: Store) -> None:
        """Stand for another store from now on."""
        close, self._store, self._close = self._close, store, store.close
        close()

    def hand_over(self) -> Callable[[], None]:
        """What closes the store, which `close` does not do any more."""
        close, self._close = self._close, lambda: None
        return close

    def close(self) -> None:
        self._close()
