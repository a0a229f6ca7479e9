"""The job's store for those who keep it, whichever process serves it at the time."""

from __future__ import annotations

from collections.abc import Callable

from xvcomm.abc.store import ForwardingStore, Store


class MovingStore(ForwardingStore):
    """Stands for one store at first, and for others later; closes each when it moves to the next, and the last by `close`.

    Args:
        close: closes the first store.
    """

    def __init__(self, store: Store, close: Callable[[], None]) -> None:
        super().__init__(store)
        self._close = close

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
