"""The monitored barrier: a barrier of the hosts that names missing ranks, and leaves the group usable."""

from __future__ import annotations

from typing import Any

from xvcomm.adapters.torch.errors import as_torch
from xvcomm.errors import DeadlineExceeded
from xvcomm.types.deadline import Deadline, poll

_PASSED = b"passed"


def monitored_barrier(store: Any, rank: int, size: int, number: int, seconds: float, wait_all_ranks: bool) -> None:
    """Block until all ranks are here. Rank 0 watches, through torch's store, as Gloo's does with messages.

    Args:
        rank, size: in the group.
        number: sequence number of this barrier in the group.
        seconds: timeout of rank 0.
        wait_all_ranks: name all missing ranks instead of the first.

    Raises:
        DeadlineExceeded: names the missing ranks on rank 0, and rank 0 on the others.
    """
    place, deadline = f"monitored_barrier/{number}", Deadline.after(seconds)
    if rank:
        store.set(f"{place}/{rank}", _PASSED)
        verdict = _awaited(store, f"{place}/verdict", deadline)
        if verdict == _PASSED:
            return
        why = verdict.decode() if verdict else f"rank 0 did not answer in {seconds * 1000:.0f} ms"
        raise as_torch(DeadlineExceeded(
            f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
            f"send/recv from rank 0: {why}", rank=rank, peer=0, op="monitored_barrier",
        ))  # fmt: skip
    late = []
    for other in range(1, size):
        if _awaited(store, f"{place}/{other}", deadline) is None:
            late.append(other)
            if not wait_all_ranks:
                break
    if not late:
        store.set(f"{place}/verdict", _PASSED)
        return
    who = f"Rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
    text = f"[Rank 0]: {who} failed to pass monitoredBarrier in {seconds * 1000:.0f} ms"
    if seconds <= 0:
        text = f"Rank 0 timed out in monitoredBarrier after 0 ms: give it time; {text}"
    store.set(f"{place}/verdict", text.encode())
    raise as_torch(DeadlineExceeded(text, rank=0, peer=late[0], op="monitored_barrier"))


def _awaited(store: Any, key: str, deadline: Deadline) -> bytes | None:
    """A key's value; None if it is not set in time. A store's own `wait` would block requests of other threads."""
    return poll(lambda: bytes(store.get(key)) if store.check([key]) else None, deadline)
