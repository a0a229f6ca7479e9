"""A job that others have grown into, as its ranks begin it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xvcomm.abc.store import PrefixStore, Store
from xvcomm.engine.session.join_requests import JoinRequests
from xvcomm.rendezvous.store.guarded import GuardedStore


@dataclass(frozen=True, slots=True)
class GrownJob:
    """What a job that others have grown into knows from the start.

    Attributes:
        numbers: the number of each rank, by which programs know it: the one in the job that the first ranks joined.
        requests: to join it.
        check: called while ranks wait for each other in the store; raises if the job cannot be made any more.
    """

    numbers: tuple[int, ...]
    requests: JoinRequests
    check: Callable[[], None]


def part(prefix: str, store: Store, grown: GrownJob | None) -> Store:
    """A part of a store in which ranks join; waits end early there if the job is one that others have grown into."""
    return PrefixStore(prefix, store) if grown is None else GuardedStore(prefix, store, grown.check)
