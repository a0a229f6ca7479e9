"""Contract of a store: where ranks find each other before anything faster joins them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence

import msgspec

from xvcomm.errors import DeadlineExceeded, StoreError
from xvcomm.types.deadline import NEVER, Deadline

ANSWER_SECONDS = 30.0
"""For how long a store may be silent before `set` and `add` give up, if their deadline is not sooner."""


class NotSet(DeadlineExceeded):
    """Nobody set a key in time; the store itself did answer. Callers that know who should have set it name that rank."""


def listed(names: Sequence[str]) -> str:
    """The first of the names."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


class _Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What `Store.exchange` does with a key."""

    key: str


class Set(_Step, frozen=True):
    """See `Store.set`; gives nothing."""

    value: bytes


class Look(_Step, frozen=True):
    """Gives the value of the key, nothing if it is not set."""


class Add(_Step, frozen=True):
    """See `Store.add`; gives the decimal digits of the sum."""

    amount: int


class Decide(_Step, frozen=True):
    """See `Store.decide`; gives what is stored."""

    value: bytes


class DecideAtEnd(_Step, frozen=True):
    """See `Store.decide_at_end`; gives nothing if the store does not notice that a process ends."""

    value: bytes


class Post(_Step, frozen=True):
    """Add 1 to the integer under `key`, and store `value` under `key/SUM`; gives the decimal digits of the sum."""

    value: bytes


Step = Set | Look | Add | Decide | DecideAtEnd | Post


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
        """For how many seconds the store's host has not answered, or not acknowledged a request of this process, because it hears
        nothing; 0 if none was to be told of a silence. Never blocks.
        """

    @abstractmethod
    def give_up(self) -> None:
        """See `Store.give_up`, for the store that is followed: the job may have moved to its successor."""

    @abstractmethod
    def leave(self) -> None:
        """Stop following, so that the end of this process is no news any more. Idempotent."""


class Standby(ABC):
    """A place where a process can serve a store's successor, once the process that serves the store has ended.

    Attributes:
        address: what `Store.successor` takes.
        local: whether only processes of this host reach it.
    """

    address: str
    local: bool

    @abstractmethod
    def wanted(self) -> bool:
        """Whether a process has asked for the successor and it is not served yet. Never blocks."""

    @abstractmethod
    def serve(self) -> None:
        """Begin to serve. Idempotent.

        Raises:
            ResourceError: the system refuses a thread or descriptors.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop, once the other processes have closed it, or after a while. Idempotent."""


class Store(ABC):
    """A map from text to bytes that every rank of a job sees. Thread-safe. Never on a hot path.

    What needs the store's answer raises DeadlineExceeded if none comes in time, and StoreError if the store cannot be reached.
    """

    def __str__(self) -> str:
        """The store, for errors."""
        return "the job's store"

    @abstractmethod
    def set(self, key: str, value: bytes, deadline: Deadline = NEVER) -> None:
        """Store `value` under `key`, replacing what was there; visible to every later `get`."""

    @abstractmethod
    def get(self, key: str, deadline: Deadline) -> bytes:
        """The value of `key`; blocks until some rank sets it.

        Raises:
            NotSet: nobody set it in time; names the key.
        """

    def wait(self, keys: Iterable[str], deadline: Deadline) -> None:
        """Block until every key is set.

        Raises:
            NotSet: names the keys that are missing.
        """
        self._complete(list(keys), deadline)

    def _complete(self, keys: Sequence[str], deadline: Deadline) -> list[bytes]:
        """The values of the keys, once every key is set; raises what `wait` does."""
        _, found = self.exchange((), keys, deadline)
        missing = [repr(self._key(key)) for key, value in zip(keys, found, strict=True) if value is None]
        if missing:
            raise NotSet(f"{listed(missing)} was not set in {self} in time; a rank is late or missing")
        return [value for value in found if value is not None]

    def _key(self, key: str) -> str:
        """The key in the store that is asked."""
        return key

    def has(self, key: str) -> bool:
        """Whether `key` is set."""
        return self._awaited(key, Deadline.after(0)) is not None

    @abstractmethod
    def add(self, key: str, amount: int, deadline: Deadline = NEVER) -> int:
        """Add to the integer under `key` (0 if unset) in one atomic step; returns the sum. `get` returns its decimal digits."""

    def decide(self, key: str, value: bytes, deadline: Deadline = NEVER) -> bytes:
        """Store `value` under `key` if nothing is stored there; returns what is stored, the same to all callers.

        By default in two steps: if the first caller ends between them, the others find nothing until their deadline.
        """
        if self.add(f"{key}/callers", 1, deadline) > 1:
            return self.get(key, deadline)
        self.set(key, value, deadline)
        return value

    def exchange(
        self, steps: Sequence[Step], keys: Sequence[str] = (), deadline: Deadline = NEVER, patience: float = math.inf
    ) -> tuple[list[bytes], list[bytes | None]]:
        """Carry out steps one after the other, and then wait for keys: by one request, if the store is one that is asked.

        Args:
            patience: for how many seconds the keys are waited for at most.

        Returns:
            What each step gives, and the value of each key; None for those that nobody has set in time.
        """
        given, until = [self._carry_out(step, deadline) for step in steps], Deadline.after(deadline.sooner(patience))
        return given, [self._awaited(key, until) for key in keys]

    def _carry_out(self, step: Step, deadline: Deadline) -> bytes:
        match step:
            case Set(key, value):
                self.set(key, value, deadline)
            case Look(key):
                return self._awaited(key, Deadline.after(0)) or b""
            case Add(key, amount):
                return b"%d" % self.add(key, amount, deadline)
            case Decide(key, value):
                return self.decide(key, value, deadline)
            case DecideAtEnd(key, value):
                return b"noticed" if self.decide_at_end(key, value) else b""
            case Post(key, value):
                number = self.add(key, 1, deadline)
                self.set(f"{key}/{number}", value, deadline)
                return b"%d" % number
        return b""

    def _awaited(self, key: str, deadline: Deadline) -> bytes | None:
        try:
            return self.get(key, deadline)
        except NotSet:
            return None

    def publish(self, key: str, value: bytes, deadline: Deadline = NEVER) -> None:
        """`set`, but perhaps only with the next `exchange` of this process, which must follow."""
        self.set(key, value, deadline)

    def notices(
        self, place: str, will: bytes, silence: bytes = b"", patience: float = math.inf, deadline: Deadline = NEVER
    ) -> Notices | None:
        """Follow the notices in `place`, where the store posts `will` once this process ends without `Notices.leave`.

        None if the store does not notice that a process ends.

        Args:
            silence: what the store posts each time that this host has not answered for `patience` seconds; nothing if empty.
            patience: in seconds, 2.5 at least; the process itself may be stopped for longer.
            deadline: until the store follows them.
        """
        return None

    def decide_at_end(self, key: str, value: bytes) -> bool:
        """Let the store `decide` a key once this process has ended, or has closed the store.

        Returns:
            Whether the store notices that a process ends; else it decides nothing.
        """
        return False

    def posted(self, place: str, read: int) -> list[bytes]:
        """The notices in `place` after the first `read` ones, for a process that does not follow them. Does not wait for any."""
        return []

    def ended(self, addresses: Collection[str]) -> list[str]:
        """Those addresses of `Standby`s at which nothing listens any more: their processes have ended, or have closed them.

        Takes some tenths of a second at most; of an address that is not reached it says nothing.
        """
        return []

    def give_up(self) -> None:  # noqa: B027 - most stores have no calls that only a network would end
        """Let calls in progress in other threads, and all later ones, raise StoreError: the store's host is out of reach."""

    def unheard(self) -> float:
        """For how many seconds a request of this process has been sent in vain, since the store's host hears nothing; 0 if none
        has. Never blocks.
        """
        return 0.0

    @property
    def served_here(self) -> bool:
        """Whether the store ends with this process."""
        return False

    def standby(self, ports: Sequence[int]) -> Standby | None:
        """Prepare to serve a successor in this process; None if the store has none, or no port is free.

        Args:
            ports: to try, if processes of other hosts are to reach it.
        """
        return None

    def successor(self, address: str, deadline: Deadline) -> Store:
        """Another store, empty at first, that is served at the address of a `Standby`; blocks until it is.

        Raises:
            DeadlineExceeded: it was not served in time.
            StoreError: nothing is there any more, or it cannot be reached.
        """
        raise StoreError("this store has no successor")

    def settle(self) -> None:  # noqa: B027 - most stores know nothing of ranks
        """Call where something is missing that a key names: raises if a rank that is gone explains it. May take a second."""

    def close(self) -> None:  # noqa: B027 - most stores own nothing
        """Let go of connections; idempotent. Keys stay for the others."""


class ForwardingStore(Store):
    """Passes everything on to another store. Closing it closes nothing."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: bytes, deadline: Deadline = NEVER) -> None:
        self._store.set(self._key(key), value, deadline)

    def get(self, key: str, deadline: Deadline) -> bytes:
        return self._store.get(self._key(key), deadline)

    def add(self, key: str, amount: int, deadline: Deadline = NEVER) -> int:
        return self._store.add(self._key(key), amount, deadline)

    def decide(self, key: str, value: bytes, deadline: Deadline = NEVER) -> bytes:
        return self._store.decide(self._key(key), value, deadline)

    def exchange(
        self, steps: Sequence[Step], keys: Sequence[str] = (), deadline: Deadline = NEVER, patience: float = math.inf
    ) -> tuple[list[bytes], list[bytes | None]]:
        named = [msgspec.structs.replace(step, key=self._key(step.key)) for step in steps]
        return self._store.exchange(named, [self._key(key) for key in keys], deadline, patience)

    def publish(self, key: str, value: bytes, deadline: Deadline = NEVER) -> None:
        self._store.publish(self._key(key), value, deadline)

    def notices(
        self, place: str, will: bytes, silence: bytes = b"", patience: float = math.inf, deadline: Deadline = NEVER
    ) -> Notices | None:
        return self._store.notices(self._key(place), will, silence, patience, deadline)

    def decide_at_end(self, key: str, value: bytes) -> bool:
        return self._store.decide_at_end(self._key(key), value)

    def posted(self, place: str, read: int) -> list[bytes]:
        return self._store.posted(self._key(place), read)

    def give_up(self) -> None:
        self._store.give_up()

    def unheard(self) -> float:
        return self._store.unheard()

    @property
    def served_here(self) -> bool:
        return self._store.served_here

    def standby(self, ports: Sequence[int]) -> Standby | None:
        return self._store.standby(ports)

    def successor(self, address: str, deadline: Deadline) -> Store:
        return self._store.successor(address, deadline)

    def ended(self, addresses: Collection[str]) -> list[str]:
        return self._store.ended(addresses)


class PrefixStore(ForwardingStore):
    """A view of another store in which every key begins with `prefix/`. Closing it closes nothing."""

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__(store)
        self._prefix = prefix + "/"

    def _key(self, key: str) -> str:
        return self._prefix + key
