"""Base of stores that can only be polled for a key."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

from xvcomm.abc.store import NotSet, Store
from xvcomm.types.deadline import NEVER, Deadline, poll


class PollingStore(Store):
    """A store that waits by polling."""

    @abstractmethod
    def look(self, key: str, deadline: Deadline = NEVER) -> bytes | None:
        """The value of `key`, or None if it is not set.

        Raises:
            DeadlineExceeded: the store did not answer in time.
            StoreError: the store cannot be reached.
        """

    def get(self, key: str, deadline: Deadline) -> bytes:
        found = poll(partial(self.look, key, deadline), deadline)
        if found is None:
            raise NotSet(f"{key!r} was not set in {self} in time; a rank is late or missing")
        return found
