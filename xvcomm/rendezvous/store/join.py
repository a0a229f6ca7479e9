"""How ranks find out that they are all there, each once."""

from __future__ import annotations

import contextlib
import os
import socket

import msgspec

from xvcomm.abc.store import NotSet, Store
from xvcomm.errors import Aborted, ArgumentError, ConfigError, DeadlineExceeded, XvcommError
from xvcomm.types.deadline import Deadline

_VERDICT = "verdict"
_SETTLE_SECONDS = 5.0
_SIZE_SHIFT = 32
"""The counter of those that joined holds the sum of their sizes above it: one request tells both."""


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    who: str
    info: bytes
    size: int


class _Verdict(msgspec.Struct, frozen=True, array_like=True):
    infos: list[bytes] = []
    late: str = ""
    wrong: str = ""
    failed: str = ""


def join_barrier(store: Store, rank: int, size: int, info: bytes, deadline: Deadline) -> list[bytes]:
    """Wait until all ranks are here and exchange a few bytes with all of them.

    One verdict ends it for everybody: the last rank to come says that all are here, the first whose deadline passes
    says who is missing, a rank whose number is taken says so. A store serves one call a rank: give later ones a
    `PrefixStore` of their own.

    Args:
        store: shared by the ranks.
        rank: of this process.
        size: number of ranks.
        info: what this rank tells the others.
        deadline: of this rank; the earliest deadline of all counts.

    Returns:
        The bytes of every rank, in rank order.

    Raises:
        DeadlineExceeded: names the ranks that have not joined; on all that have.
        ConfigError: two processes have the same number or different sizes; names both. On all ranks that have joined.
        Aborted: a rank that cannot take part said so by `refuse`.
        StoreError: the store cannot be reached.
    """
    if not 0 <= rank < size:
        raise ArgumentError(f"rank {rank} of size {size}: ranks go from 0 to size - 1")
    if store.add(f"rank/{rank}", 1, deadline) > 1:
        raise _twice(store, rank, deadline)
    store.set(f"info/{rank}", msgspec.msgpack.encode(_Entry(_who(), info, size)), deadline)
    joined = store.add("joined", (size << _SIZE_SHIFT) + 1, deadline)
    count, sizes = joined & ((1 << _SIZE_SHIFT) - 1), joined >> _SIZE_SHIFT
    if sizes != count * size:
        # Ranks that were told a smaller size may have begun without this one; it cannot join them.
        wrong = _sizes(store, rank, size)
        raise ConfigError(_decide(store, _Verdict(wrong=wrong)).wrong or wrong, rank=rank)
    if count == size:
        verdict = _decide(store, _Verdict([_entry(store, r, deadline).info for r in range(size)]))
    else:
        try:
            verdict = _read(store, deadline)
        except DeadlineExceeded:
            verdict = _give_up(store, size)
    if verdict.wrong:
        raise ConfigError(verdict.wrong, rank=rank)
    if verdict.failed:
        raise Aborted(verdict.failed, rank=rank)
    if verdict.late:
        raise DeadlineExceeded(verdict.late, rank=rank)
    return verdict.infos


def refuse(store: Store, rank: int, error: Exception) -> None:
    """Let the ranks that wait in `join_barrier` know that this one cannot take part, and why."""
    text = f"rank {rank} ({_who()}) cannot join: {type(error).__name__}: {error}"
    with contextlib.suppress(XvcommError):
        _decide(store, _Verdict(failed=text))


def _who() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _sizes(store: Store, rank: int, size: int) -> str:
    """Whose size differs from this rank's, in words."""
    for other in range(max(size, rank)):
        with contextlib.suppress(DeadlineExceeded):
            entry = _entry(store, other, Deadline.after(0))
            if entry.size != size:
                there = f"rank {other} ({entry.who}) was told {entry.size}"
                break
    else:
        there = "another rank was told another number"
    return (
        f"rank {rank} ({_who()}) was told that the job has {size} ranks, {there}; give all of them the same XVCOMM_SIZE "
        "(or the launcher's variable)"
    )


def _twice(store: Store, rank: int, deadline: Deadline) -> ConfigError:
    try:
        first = _entry(store, rank, Deadline.after(deadline.sooner(_SETTLE_SECONDS))).who
    except DeadlineExceeded:
        first = "another process"
    text = (
        f"two processes are rank {rank}: {first}, and {_who()}; give each process its own XVCOMM_RANK (or the "
        "launcher's variable), and each job a store that no other job has used"
    )
    _decide(store, _Verdict(wrong=text))
    return ConfigError(text, rank=rank)


def _decide(store: Store, verdict: _Verdict) -> _Verdict:
    """Make this the verdict unless there is one; what counts is given back."""
    settling = Deadline.after(_SETTLE_SECONDS)
    if store.add("decided", 1, settling) == 1:
        store.set(_VERDICT, msgspec.msgpack.encode(verdict), settling)
        return verdict
    return _decided(store)


def _decided(store: Store) -> _Verdict:
    """The verdict that another rank has begun to tell."""
    try:
        return _read(store, Deadline.after(_SETTLE_SECONDS))
    except NotSet as error:
        raise DeadlineExceeded(
            "a rank that was about to tell the others whether all have joined is stopped or very slow, or has ended; look for "
            "one that is stopped, and start the job again"
        ) from error


def _read(store: Store, deadline: Deadline) -> _Verdict:
    return msgspec.msgpack.decode(store.get(_VERDICT, deadline), type=_Verdict)


def _entry(store: Store, rank: int, deadline: Deadline) -> _Entry:
    return msgspec.msgpack.decode(store.get(f"info/{rank}", deadline), type=_Entry)


def _give_up(store: Store, size: int) -> _Verdict:
    """The verdict once this rank's deadline has passed."""
    absent = []
    settling = Deadline.after(_SETTLE_SECONDS)
    for rank in range(size):
        if settling.expired():
            raise DeadlineExceeded(
                "the store did not say in time which ranks have joined; the process that serves it is stopped"
            )
        try:
            store.wait([f"info/{rank}"], Deadline.after(0))
        except DeadlineExceeded:
            absent.append(rank)
    if not absent:
        return _decided(store)
    names = ", ".join(map(str, absent[:16])) + (f" and {len(absent) - 16} more" if len(absent) > 16 else "")
    text = (
        f"{'rank' if len(absent) == 1 else 'ranks'} {names} of {size} did not join in time; were they started, and do "
        "they see the same store? XVCOMM_TIMEOUT gives them longer"
    )
    return _decide(store, _Verdict(late=text))
