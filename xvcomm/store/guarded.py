"""A part of the store in which waiting ends early: when the communicator does, or when a rank says that it failed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from xvcomm.abc.store import PrefixStore, Store
from xvcomm.deadline import NEVER, Deadline
from xvcomm.errors import Aborted, DeadlineExceeded, StoreError

_SETTLE_SECONDS = 1.0
_PAUSE_SECONDS = 0.02
_LOOK_SECONDS = 0.1
_FAILURE_SECONDS = 1.0
_FAILURE = "failure"

T = TypeVar("T")


class GuardedStore(PrefixStore):
    """A view of another store in which every key begins with `prefix/`.

    Args:
        check: raises when waiting has become vain; called now and then while a key is waited for, and when the store
            cannot be reached: the rank that serves it may have died.
    """

    def __init__(self, prefix: str, store: Store, check: Callable[[], None]) -> None:
        super().__init__(prefix, store)
        self._check = check

    def fail(self, text: str) -> None:
        """Make everybody who waits in this part of the store, now or later, raise Aborted with this text."""
        super().set(_FAILURE, text.encode(), Deadline.after(_FAILURE_SECONDS))

    def check(self) -> None:
        """Raise what `check` does, and Aborted after `fail`."""
        self._check()
        try:
            text = super().get(_FAILURE, Deadline.after(0))
        except DeadlineExceeded:
            return
        raise Aborted(text.decode())

    def set(self, key: str, value: bytes, deadline: Deadline = NEVER) -> None:
        """See `Store.set`; also raises what `check` does where the store cannot be reached."""
        self._reach(partial(super().set, key, value, deadline))

    def add(self, key: str, amount: int, deadline: Deadline = NEVER) -> int:
        """See `Store.add`; also raises what `check` does where the store cannot be reached."""
        return self._reach(partial(super().add, key, amount, deadline))

    def get(self, key: str, deadline: Deadline) -> bytes:
        """See `Store.get`; also raises what `check` does, and Aborted after `fail`."""
        return self._patiently(partial(super().get, key), deadline)

    def wait(self, keys: Iterable[str], deadline: Deadline) -> None:
        """See `Store.wait`; also raises what `check` does, and Aborted after `fail`."""
        self._patiently(partial(super().wait, list(keys)), deadline)

    def _patiently(self, call: Callable[[Deadline], T], deadline: Deadline) -> T:
        while True:
            try:
                return self._reach(partial(call, Deadline.after(deadline.sooner(_LOOK_SECONDS))))
            except DeadlineExceeded:
                self._reach(self.check)
                if deadline.expired():
                    raise

    def _reach(self, call: Callable[[], T]) -> T:
        """Call the store. If it cannot be reached, say why: a process's death is seen a moment later than its socket's."""
        try:
            return call()
        except StoreError:
            settling = Deadline.after(_SETTLE_SECONDS)
            while not settling.expired():
                with contextlib.suppress(StoreError):
                    self._check()
                time.sleep(_PAUSE_SECONDS)
            raise
