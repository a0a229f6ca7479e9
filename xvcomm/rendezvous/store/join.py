"""Waits until every rank of the job has joined, and detects duplicate ranks and different sizes."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from xvcomm.abc.store import Add, Decide, DecideAtEnd, Look, NotSet, Store
from xvcomm.errors import Aborted, ArgumentError, ConfigError, DeadlineExceeded, PeerLost, XvcommError
from xvcomm.rendezvous.store.failure import Failure
from xvcomm.system import processes
from xvcomm.types.deadline import Deadline

_VERDICT, _ENDED = "verdict", "ended"
_SETTLE_SECONDS, _LOOK_SECONDS = 5.0, 1.0
_FEW = 16
"""So many ranks ask for what all others have told as soon as they join: the last one needs it, and none knows that it is the
last.
"""
_SIZE_SHIFT = 32
"""The counter of joined ranks has the sum of their sizes above this bit, so that one request returns both."""


@dataclass(frozen=True, slots=True)
class Noun:
    """How errors call those who join.

    Attributes:
        noun: what each of them is.
        number, count: where the user sets its number, and how many they are.
    """

    noun: str
    number: str
    count: str


_RANK = Noun("rank", "XVCOMM_RANK (or the launcher's variable)", "XVCOMM_SIZE (or the launcher's variable)")


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    who: str
    info: bytes
    size: int
    process: str


class _Verdict(msgspec.Struct, frozen=True, array_like=True):
    infos: list[bytes] = []
    failure: Failure | None = None


_decode_entry, _decode_verdict = msgspec.msgpack.Decoder(_Entry).decode, msgspec.msgpack.Decoder(_Verdict).decode


def join_barrier(
    store: Store, rank: int, size: int, info: bytes, deadline: Deadline, *, noun: Noun = _RANK
) -> list[bytes]:
    """Wait until all ranks have joined, and exchange a few bytes among them.

    One rank decides the outcome for all: the last rank to join that all are here, the first rank whose deadline passes who is
    missing, or a rank whose number is already taken that it is. If a rank ends that has joined, the store decides that; or, if it
    does not notice, a rank of the same host. A store supports one call per rank; use a new `PrefixStore` for
    another.

    Args:
        info: bytes that this rank sends to the others.
        deadline: of this rank; the earliest deadline of all ranks applies.
        noun: for errors.

    Returns:
        The bytes of every rank, in rank order.

    Raises:
        DeadlineExceeded: names the ranks that have not joined; raised on all that have.
        ConfigError: two processes have the same rank or different sizes; names both. Raised on all ranks that have joined.
        PeerLost: a rank has joined and ended before all have; names it. Raised on all ranks that have joined.
        Aborted: a rank called `refuse`.
        StoreError: the store cannot be reached.
    """
    if not 0 <= rank < size:
        raise ArgumentError(f"rank {rank} of size {size}: ranks go from 0 to size - 1")
    entry = msgspec.msgpack.encode(_Entry(who(), info, size, processes.identity()))
    came, noticed, _, _, sums, *told = store.exchange(
        [
            Add(f"rank/{rank}", 1),
            DecideAtEnd(_VERDICT, msgspec.msgpack.encode(_ended(rank, who(), noun))),
            Decide(f"info/{rank}", entry),  # which another process of this number may have set
            DecideAtEnd(_ENDED, b"%d" % rank),
            Add("joined", (size << _SIZE_SHIFT) + 1),
            *(Look(f"info/{r}") for r in range(size) if size <= _FEW),
        ],
        deadline=deadline,
    )[0]
    if int(came) > 1:
        raise _twice(store, rank, deadline, noun)
    joined = int(sums)
    count, sizes = joined & ((1 << _SIZE_SHIFT) - 1), joined >> _SIZE_SHIFT
    if sizes != count * size:
        # Ranks with a smaller size may have started without this one, which cannot join them.
        wrong = Failure.of(ConfigError(_sizes(store, rank, size, noun)))
        first = _decide(store, _Verdict(failure=wrong)).failure
        raise (first if first is not None and first.kind == wrong.kind else wrong).error(rank=rank)
    if count == size and not told:
        told = store.exchange([Look(f"info/{r}") for r in range(size)], deadline=deadline)[0]
    if count == size and all(told):  # else a process that came twice is counted, and will say so
        entries = list(map(_decode_entry, told))
        lost = None if noticed else _lost(enumerate(entries), noun)
        verdict = _decide(store, lost or _Verdict([entry.info for entry in entries]))
    else:
        try:
            verdict = _read(store, deadline) if noticed else _look(store, size, deadline, noun)
        except DeadlineExceeded:
            verdict = _give_up(store, size, noun)
    if verdict.failure is not None:
        raise verdict.failure.error(rank=rank)
    return verdict.infos


def refuse(store: Store, rank: int, error: BaseException, *, noun: Noun = _RANK) -> None:
    """Make the ranks that wait in `join_barrier` fail: this rank cannot take part, because of `error`."""
    text = f"{noun.noun} {rank} ({who()}) cannot join: {type(error).__name__}: {error}"
    with contextlib.suppress(XvcommError):
        _decide(store, _failed(Aborted(text, peer=rank)))


def ended(store: Store) -> list[int]:
    """The first rank that has ended since it joined, if one has and the store says so: its number."""
    with contextlib.suppress(XvcommError):  # a store that fails, or is slow, is found by who needs it
        return [int(store.get(_ENDED, Deadline.after(0)))]
    return []


def awaits(store: Store, rank: int, deadline: Deadline) -> bool:
    """Whether others may wait in `join_barrier` for this rank: the outcome is open, and the rank has not come."""
    return not store.has(_VERDICT) and store.add(f"rank/{rank}", 0, deadline) == 0


def who() -> str:
    """This process, in words."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _sizes(store: Store, rank: int, size: int, noun: Noun) -> str:
    """The error text that names a rank whose size differs from this rank's."""
    for other in range(max(size, rank)):
        with contextlib.suppress(DeadlineExceeded):
            entry = _entry(store, other, Deadline.after(0))
            if entry.size != size:
                there = f"{noun.noun} {other} ({entry.who}) was given {entry.size}"
                break
    else:
        there = f"another {noun.noun} was given another number"
    return (
        f"{noun.noun} {rank} ({who()}) was given {size} as the number of {noun.noun}s, {there}; give all of them the same "
        f"{noun.count}"
    )


def _twice(store: Store, rank: int, deadline: Deadline, noun: Noun) -> ConfigError:
    try:
        first = _entry(store, rank, Deadline.after(deadline.sooner(_SETTLE_SECONDS))).who
    except DeadlineExceeded:
        first = "another process"
    text = (
        f"two processes are {noun.noun} {rank}: {first}, and {who()}; give each process its own {noun.number}, and each job "
        "a store that no other job has used"
    )
    error = ConfigError(text, rank=rank)
    _decide(store, _failed(error))
    return error


def _failed(error: XvcommError) -> _Verdict:
    return _Verdict(failure=Failure.of(error))


def _decide(store: Store, verdict: _Verdict) -> _Verdict:
    """Publish this verdict unless another rank has published one; return the one that applies."""
    try:
        return _decode_verdict(store.decide(_VERDICT, msgspec.msgpack.encode(verdict), Deadline.after(_SETTLE_SECONDS)))
    except NotSet as error:
        raise DeadlineExceeded(
            "the rank that decides whether all ranks have joined is stopped or very slow, or has ended; look for a stopped "
            "process, and start the job again"
        ) from error


def _read(store: Store, deadline: Deadline) -> _Verdict:
    return _decode_verdict(store.get(_VERDICT, deadline))


def _look(store: Store, size: int, deadline: Deadline, noun: Noun) -> _Verdict:
    """The verdict; looks meanwhile whether processes of this host that have joined still run."""
    joined: dict[int, _Entry] = {}
    while True:
        try:
            return _read(store, Deadline.after(deadline.sooner(_LOOK_SECONDS)))
        except NotSet:
            if deadline.expired():
                raise
        for rank in range(size):
            with contextlib.suppress(NotSet):
                joined[rank] = joined.get(rank) or _entry(store, rank, Deadline.after(0))
        lost = _lost(joined.items(), noun)
        if lost is not None:
            return _decide(store, lost)


def _lost(joined: Iterable[tuple[int, _Entry]], noun: Noun) -> _Verdict | None:
    """The verdict if a process of this host has ended that has joined."""
    return next((_ended(rank, e.who, noun) for rank, e in joined if processes.state(e.process) == "dead"), None)


def _ended(rank: int, who: str, noun: Noun) -> _Verdict:
    text = (
        f"{noun.noun} {rank} ({who}) has ended before all {noun.noun}s had joined; its own output tells why, then start the job "
        "again"
    )
    return _failed(PeerLost(text, peer=rank))


def _entry(store: Store, rank: int, deadline: Deadline) -> _Entry:
    return _decode_entry(store.get(f"info/{rank}", deadline))


def _give_up(store: Store, size: int, noun: Noun) -> _Verdict:
    """The verdict of a rank whose deadline has passed."""
    absent = []
    settling = Deadline.after(_SETTLE_SECONDS)
    for rank in range(size):
        if settling.expired():
            raise DeadlineExceeded(
                "the store did not report in time which ranks have joined; the process that serves it is stopped"
            )
        if not store.has(f"info/{rank}"):
            absent.append(rank)
    if not absent:  # the last one has ended before it decided
        return _decide(store, _Verdict([_entry(store, rank, settling).info for rank in range(size)]))
    names = ", ".join(map(str, absent[:16])) + (f" and {len(absent) - 16} more" if len(absent) > 16 else "")
    text = (
        f"{noun.noun}{'' if len(absent) == 1 else 's'} {names} of {size} did not join in time; were they started, and do "
        "they use the same store? A larger XVCOMM_TIMEOUT gives them more time"
    )
    return _decide(store, _failed(DeadlineExceeded(text, peer=absent[0])))
