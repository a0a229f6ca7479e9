"""Contract of a store: where ranks find each other before anything faster joins them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

from xvcomm.errors import DeadlineExceeded
from xvcomm.types.deadline import NEVER, Deadline

ANSWER_SECONDS = 30.0
"""For how long a store may be silent before `set` and `add` give up, if their deadline is not sooner."""


class NotSet(DeadlineExceeded):
    """Nobody set a key in time; the store itself did answer. Callers that know who should have set it name that rank."""


class Notices(ABC):
    """The notices that processes post in one place of a store, as one of them follows them."""

    @abstractmethod
    def next(self) -> bytes:
        """The next notice of anyone, oldest first, this process's own among them; blocks.

        Raises:
            StoreError: the process that serves the store has ended, or this one has left.
        """

    @abstractmethod
    def post(self, notice: bytes, deadline: Deadline) -> None:
        """Add a notice, which everyone reads.

        Raises:
            DeadlineExceeded: the store did not answer in time.
            StoreError: the store cannot be reached.
        """

    @abstractmethod
    def silence(self) -> float:
        """For how many seconds the store's host has not answered; 0 if none was to be told of a silence. Never blocks."""

    @abstractmethod
    def leave(self) -> None:
        """Stop following, so that the end of this process is no news any more. Idempotent."""


class Store(ABC):
    """A map from text to bytes that every rank of a job sees. Thread-safe. Never on a hot path."""

    @abstractmethod
    def set(self, key: str, value: bytes, deadline: Deadline = NEVER) -> None:
        """Store `value` under `key`, replacing what was there; visible to every later `get`.

        Raises:
            DeadlineExceeded: the store did not answer in time.
            StoreError: the store cannot be reached.
        """

    @abstractmethod
    def get(self, key: str, deadline: Deadline) -> bytes:
        """The value of `key`; blocks until some rank sets it.

        Raises:
            NotSet: nobody set it in time; names the key.
            DeadlineExceeded: the store did not answer in time.
            StoreError: the store cannot be reached.
        """

    @abstractmethod
    def wait(self, keys: Iterable[str], deadline: Deadline) -> None:
        """Block until every key is set.

        Raises:
            NotSet: names the keys that are missing.
            DeadlineExceeded: the store did not answer in time.
            StoreError: the store cannot be reached.
        """

    @abstractmethod
    def add(self, key: str, amount: int, deadline: Deadline = NEVER) -> int:
        """Add to the integer under `key` (0 if unset) in one atomic step and give the sum back; `get` returns its decimal digits.

        Raises:
            DeadlineExceeded: the store did not answer in time.
            StoreError: the store cannot be reached.
        """

    def decide(self, key: str, value: bytes, deadline: Deadline = NEVER) -> bytes:
        """Store `value` under `key` if nothing is stored there; returns what is stored, the same to all callers.

        By default in two steps: if the first caller ends between them, the others find nothing until their deadline.

        Raises:
            DeadlineExceeded: the store did not answer in time.
            StoreError: the store cannot be reached.
        """
        if self.add(f"{key}/callers", 1, deadline) > 1:
            return self.get(key, deadline)
        self.set(key, value, deadline)
        return value

    def notices(self, place: str, will: bytes, silence: bytes = b"", patience: float = math.inf) -> Notices | None:
        """Follow the notices in `place`, where the store posts `will` once this process ends without `Notices.leave`.

        None if the store does not notice that a process ends.

        Args:
            silence: what the store posts each time that this host has not answered for `patience` seconds; nothing if empty.
            patience: in seconds, 2.5 at least; the process itself may be stopped for longer.

        Raises:
            StoreError: the store cannot be reached.
        """
        return None

    def give_up(self) -> None:  # noqa: B027 - most stores have no calls that only a network would end
        """Let calls in progress in other threads, and all later ones, raise StoreError: the store's host is out of reach."""

    @property
    def served_here(self) -> bool:
        """Whether the store ends with this process."""
        return False

    def settle(self) -> None:  # noqa: B027 - most stores know nothing of ranks
        """Call where something is missing that a key names: raises if a rank that is gone explains it. May take a second."""

    def close(self) -> None:  # noqa: B027 - most stores own nothing
        """Let go of connections; idempotent. Keys stay for the others."""


class PrefixStore(Store):
    """A view of another store in which every key begins with `prefix/`. Closing it closes nothing."""

    def __init__(self, prefix: str, store: Store) -> None:
        self._prefix = prefix + "/"
        self._store = store

    def set(self, key: str, value: bytes, deadline: Deadline = NEVER) -> None:
        self._store.set(self._prefix + key, value, deadline)

    def get(self, key: str, deadline: Deadline) -> bytes:
        return self._store.get(self._prefix + key, deadline)

    def wait(self, keys: Iterable[str], deadline: Deadline) -> None:
        self._store.wait([self._prefix + key for key in keys], deadline)

    def add(self, key: str, amount: int, deadline: Deadline = NEVER) -> int:
        return self._store.add(self._prefix + key, amount, deadline)

    def decide(self, key: str, value: bytes, deadline: Deadline = NEVER) -> bytes:
        return self._store.decide(self._prefix + key, value, deadline)

    def notices(self, place: str, will: bytes, silence: bytes = b"", patience: float = math.inf) -> Notices | None:
        return self._store.notices(self._prefix + place, will, silence, patience)

    def give_up(self) -> None:
        self._store.give_up()

    @property
    def served_here(self) -> bool:
        return self._store.served_here
