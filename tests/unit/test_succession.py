"""Which store ranks use after a loss: all the same one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, cast

import pytest

from xvcomm.engine.session.joining import Place
from xvcomm.engine.session.succession import Succession
from xvcomm.errors import AuthenticationError, DeadlineExceeded, StoreError
from xvcomm.types.deadline import Deadline


class Standby:
    """What a rank keeps to serve a successor."""

    address, local = "here 1", True

    def __init__(self) -> None:
        self.serving = False

    def wanted(self) -> bool:
        return True

    def serve(self) -> None:
        self.serving = True


class Store:
    """A store that rank 0 serves, and what is at the addresses of all ranks.

    Attributes:
        misses: how often it does not answer.
        instead: what rank 0's own successor raises.
        over: addresses at which nothing listens.
        moved: the address of the one that is used in its place.
        generation: of the store at other ranks' addresses.
        closed: how often a connection to one of those was closed.
    """

    def __init__(self, misses: int = 0, instead: type[Exception] = StoreError, over: Sequence[str] = ()) -> None:
        self.misses, self.instead, self.over = misses, instead, over
        self.moved = self.asked = ""
        self.generation, self.closed = b"second", 0
        self.own = Standby()

    def standby(self, ports: Sequence[int]) -> Standby:
        return self.own

    def wait(self, keys: Iterable[str], deadline: Deadline) -> None:
        self.misses -= 1
        if self.misses >= 0:
            raise StoreError("no route to the host")

    def ended(self, addresses: Collection[str]) -> list[str]:
        return [address for address in addresses if address in self.over]

    def successor(self, address: str, deadline: Deadline) -> Store:
        self.asked = address
        if address == "rank 0":
            raise self.instead("not reached")
        return self

    def decide(self, key: str, value: bytes, deadline: Deadline) -> bytes:
        return self.generation

    def close(self) -> None:
        self.closed += 1

    def move(self, found: Store) -> None:
        self.moved = self.asked


def succession(
    store: Store, rank: int, gone: Callable[[int], bool] = lambda rank: False, *, stricken: bool = True
) -> Succession:
    """Of a rank of a job whose rank 2, on the host of all, was killed if `stricken`."""
    made = Succession(cast(Any, store), rank, [0], gone, lambda rank: stricken, lambda rank: None)
    made.open([Place(f"rank {r}", False) for r in range(3)], 0)
    return made


def test_who_serves_the_store_serves_no_successor_and_stays() -> None:
    store = Store(misses=1)
    own = succession(store, 0)
    own.note_unreachable(b"")
    own.look()
    own.follow(Deadline.after(5), pytest.fail)
    assert not own.due() and not store.own.serving and not store.moved
    other = succession(store, 1, gone=lambda rank: rank in (0, 2))
    other.look()
    assert store.own.serving


def test_a_store_that_is_out_of_reach_for_a_moment_is_used_again() -> None:
    """Its process has not ended: other ranks may never have missed it."""
    store = Store(misses=3)
    succession(store, 1).follow(Deadline.after(5), pytest.fail)
    assert not store.moved


@pytest.mark.parametrize(
    ("make", "gone"),
    [
        (lambda: Store(misses=99, over=["rank 0"]), ()),
        (lambda: Store(misses=99, instead=AuthenticationError), ()),
        (lambda: Store(misses=99), (0,)),
    ],
    ids=["its process has ended", "another program listens there", "it is lost"],
)
def test_a_store_that_has_ended_is_not_waited_for(make: Callable[[], Store], gone: Sequence[int]) -> None:
    found = make()
    succession(found, 1, gone=lambda rank: rank in gone).follow(Deadline.after(5), lambda: None)
    assert found.moved == "rank 1"


def test_a_store_that_stays_out_of_reach() -> None:
    with pytest.raises(DeadlineExceeded, match="rank 0 of the job has not served"):
        succession(Store(misses=99), 1).follow(Deadline.after(0.2), pytest.fail)


def test_a_call_on_the_store_before_does_not_count_against_its_successor() -> None:
    """Another thread has left that store meanwhile, so that the call failed."""
    store = Store(misses=99)
    own = succession(store, 2, gone=lambda rank: rank == 0, stricken=False)
    own.follow(Deadline.after(5), lambda: None)
    assert (store.moved, own.generation) == ("rank 1", b"second")
    own.note_unreachable(b"")
    assert not own.due()
    own.note_unreachable(b"second")
    assert own.due()


def test_a_successor_that_answers_late_is_not_left_for_itself() -> None:
    """To leave it would tell the others that this rank has died."""
    store = Store(misses=99)
    own = succession(store, 2, gone=lambda rank: rank == 0, stricken=False)
    own.follow(Deadline.after(5), lambda: None)
    own.note_unreachable(b"second")
    store.misses = 1
    own.follow(Deadline.after(5), pytest.fail)
    assert store.closed == 1 and not own.due()
