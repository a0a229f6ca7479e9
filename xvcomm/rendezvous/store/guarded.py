"""A store whose waits end early: when the communicator fails or is closed, or when a rank reports an error."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from xvcomm.abc.store import DecideAtEnd, Look, Post, PrefixStore, Set, Step, Store
from xvcomm.errors import DeadlineExceeded, PeerLost, StoreError, XvcommError
from xvcomm.rendezvous.store.failure import Failure, decode_failure
from xvcomm.types.deadline import NEVER, Deadline

_SETTLE_SECONDS = 1.0
_PAUSE_SECONDS = 0.02
_LOOK_SECONDS = 0.1
_FAILURE_SECONDS = 1.0
_NAMED = 16
"""Maximum number of late ranks that an error names."""
_FAILURE = "failure"
_LOOK = Look(_FAILURE)

T = TypeVar("T")


class GuardedStore(PrefixStore):
    """A view of another store in which every key begins with `prefix/`, and waits end early.

    Args:
        check: raises if waiting has become pointless; called periodically while a key is awaited, and when the store cannot be
            reached.
        unreachable: called after `check` when the store cannot be reached; raises if the rank that serves it has died.
    """

    def __init__(
        self, prefix: str, store: Store, check: Callable[[], None], unreachable: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(prefix, store)
        self._check, self._unreachable = check, unreachable

    def fail(self, error: XvcommError) -> None:
        """Make every rank that waits in this part of the store, now or later, raise this error.

        Args:
            error: PeerLost, DeadlineExceeded, or Aborted; its text and `peer` are passed on.
        """
        super().set(_FAILURE, msgspec.msgpack.encode(Failure.of(error)), Deadline.after(_FAILURE_SECONDS))

    def check(self) -> None:
        """Raise the error that a rank reported by `fail`, else what the `check` function raises.

        The reported error comes first, because the rank that reported it may have left or died since.
        """
        failure = self.failure(Deadline.after(0))
        if failure is not None:
            raise failure
        self._check()

    def failure(self, deadline: Deadline) -> XvcommError | None:
        """The error that a rank reported by `fail`, if one did."""
        try:
            return decode_failure(super().get(_FAILURE, Deadline.after(deadline.sooner(0)))).error()
        except DeadlineExceeded:
            return None

    def settle(self) -> None:
        """See `Store.settle`. Calls `check` repeatedly for a while, because it may learn of a failure a moment later."""
        settling = Deadline.after(_SETTLE_SECONDS)
        while not settling.expired():
            self._reach(self.check)
            time.sleep(_PAUSE_SECONDS)

    def set(self, key: str, value: bytes, deadline: Deadline = NEVER) -> None:
        """See `Store.set`; also raises what the functions `check` and `unreachable` raise if the store cannot be reached."""
        self._reach(partial(super().set, key, value, deadline))

    def add(self, key: str, amount: int, deadline: Deadline = NEVER) -> int:
        """See `Store.add`; also raises what the functions `check` and `unreachable` raise if the store cannot be reached."""
        return self._reach(partial(super().add, key, amount, deadline))

    def decide(self, key: str, value: bytes, deadline: Deadline = NEVER) -> bytes:
        """See `Store.decide`; also raises what the functions `check` and `unreachable` raise if the store cannot be reached."""
        return self._reach(partial(super().decide, key, value, deadline))

    def decide_at_end(self, key: str, value: bytes) -> bool:
        """Leaves it to `check` to tell of a process that ends."""
        return True

    def exchange(
        self, steps: Sequence[Step], keys: Sequence[str] = (), deadline: Deadline = NEVER, patience: float = math.inf
    ) -> tuple[list[bytes], list[bytes | None]]:
        """See `Store.exchange`; also raises what `check` raises while it waits, and leaves it to that to tell of ends."""
        sent = [step for step in steps if not isinstance(step, DecideAtEnd)]
        if keys:
            given, found = self._ask(sent, keys, deadline, patience, lambda: None)
        else:
            given, found = self._reach(partial(super().exchange, sent, (), deadline))
        of_sent = iter(given)
        return [b"noticed" if isinstance(step, DecideAtEnd) else next(of_sent) for step in steps], found

    def _ask(
        self, steps: Sequence[Step], keys: Sequence[str], deadline: Deadline, patience: float, look: Callable[[], None]
    ) -> tuple[list[bytes], list[bytes | None]]:
        """`exchange` without steps for the end; calls `look` as often as `check`."""
        ask, until = super().exchange, Deadline.after(deadline.sooner(patience))
        given, pending = list[bytes](), list(steps)
        while True:
            soon, silent = Deadline.after(until.sooner(_LOOK_SECONDS)), None
            call = partial(ask, [*pending, _LOOK], keys, deadline if pending else soon, soon.left())
            failure = b""
            found: list[bytes | None] = [None for _ in keys]
            try:
                (*fresh, failure), found = self._reach(call)
            except DeadlineExceeded as error:  # the store did not answer, for the moment
                silent = error
            else:
                given, pending = [*given, *fresh], []
            if None in found:
                self._reach(partial(self._consider, failure))
                look()
            if silent is not None and (pending or until.expired()):
                raise silent
            if None not in found or until.expired():
                return given, found

    def _consider(self, failure: bytes) -> None:
        """`check`, which has asked the store already."""
        if failure:
            raise decode_failure(failure).error()
        self._check()

    def get(self, key: str, deadline: Deadline) -> bytes:
        """See `Store.get`; also raises what `check` raises."""
        return self._complete([key], deadline)[0]

    def assemble(
        self, rank: int, ranks: Sequence[int], deadline: Deadline, departed: Callable[[], Iterable[int]]
    ) -> None:
        """Wait once until all of these ranks have called this, so that a rank that fails earlier does not leave the others in
        an operation.

        Args:
            rank: of this process.
            ranks: the ranks to wait for, numbered in the whole job like `rank`.
            departed: returns the ranks that have left or ended, as far as this process knows.

        Raises:
            PeerLost: a rank left or ended before it called this.
            DeadlineExceeded: names the ranks that did not call this in time.
            XvcommError: see `check`.
        """

        def look() -> None:
            for other in departed():
                if not self.has(f"begun/{other}"):
                    text = f"rank {other} of the job ended before it opened shared memory; restart the job"
                    raise PeerLost(text, rank=rank, peer=other)

        arrival: list[Step] = [Set(f"begun/{rank}", b""), Post("arrivals", b"")]
        _, (complete,) = self._ask(arrival, [f"arrivals/{len(ranks)}"], deadline, math.inf, look)
        if complete is None:
            late = [r for r in ranks if not self.has(f"begun/{r}")] or [rank]
            names = ", ".join(f"rank {r} of the job" for r in late[:_NAMED])
            raise DeadlineExceeded(
                f"{names} did not open shared memory in time; stopped or very slow", rank=rank, peer=late[0]
            )

    def _reach(self, call: Callable[[], T]) -> T:
        """Call the store; if it cannot be reached, raise the reason, which may become known a moment after the socket closes."""
        try:
            return call()
        except StoreError:
            settling = Deadline.after(_SETTLE_SECONDS)
            while not settling.expired():
                with contextlib.suppress(StoreError):
                    self._check()
                self._unreachable()
                time.sleep(_PAUSE_SECONDS)
            raise
