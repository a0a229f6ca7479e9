"""What a rank that was started again tells its launcher, through the store that this serves: that it has joined the job."""

from __future__ import annotations

from xvcomm.abc.store import Store
from xvcomm.types.deadline import Deadline


def tell(store: Store, rank: int, deadline: Deadline) -> None:
    """Say that a process that was started in the place of this rank has joined the job."""
    store.add(_key(rank), 1, deadline)


def told(store: Store, rank: int, deadline: Deadline) -> int:
    """How many such processes have, one after the other."""
    return store.add(_key(rank), 0, deadline)


def _key(rank: int) -> str:
    return f"xvcomm/returned/{rank}"
