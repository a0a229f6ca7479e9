"""The part of a store that a communicator uses: a process may make many, one after the other, in one store or at one address."""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Mapping

from xvcomm.abc.store import PrefixStore, Store
from xvcomm.config import Config
from xvcomm.rendezvous.environment import LauncherEnvironment
from xvcomm.types.deadline import Deadline

_PROCESS = uuid.uuid4().hex
_epochs: Counter[tuple[str, int]] = Counter()
"""Number of communicators that this process has had at a rendezvous address, as a rank."""


def epoch(launcher: LauncherEnvironment, config: Config) -> int:
    """Of the next communicator at this rendezvous address, so that it cannot join a store that other ranks have not closed."""
    return _epochs[_address(launcher, config)]


def set_epoch(launcher: LauncherEnvironment, config: Config, following: int) -> None:
    """Say which epoch the next communicator at this rendezvous address has."""
    _epochs[_address(launcher, config)] = following


def _address(launcher: LauncherEnvironment, config: Config) -> tuple[str, int]:
    return config.store or launcher.name, launcher.rank


def attempt(env: Mapping[str, str]) -> str:
    """Which attempt of torchrun's this process belongs to."""
    return env.get("TORCHELASTIC_RESTART_COUNT") or "0"


def namespace(store: Store, rank: int, env: Mapping[str, str], deadline: Deadline, epoch: int | None) -> Store:
    """A part of the store that no earlier communicator has used.

    A store may be used by many communicators, one after the other. Every process counts its own in the store. The key contains
    the process, so that a second process with the same rank also begins at the first part, where `join_barrier` detects it.

    Args:
        epoch: of the job, for processes that join it meanwhile; None if it does not run in this store.
    """
    number = claim_parts(store, rank, env, 1, deadline)
    if rank == 0 and epoch is not None:
        store.set(running(env), b"%d %d" % (number, epoch), deadline)
    return part(store, env, number)


def claim_parts(store: Store, rank: int, env: Mapping[str, str], count: int, deadline: Deadline) -> int:
    """Count so many parts of the store as used by this process; gives the number of the last one."""
    process = f"{_PROCESS}-{os.getpid()}"  # the pid, because a fork copies _PROCESS
    return store.add(f"xvcomm/{attempt(env)}/turns/{rank}/{process}", count, deadline)


def part(store: Store, env: Mapping[str, str], number: int) -> Store:
    """A part of the store, by its number."""
    return PrefixStore(f"xvcomm/{attempt(env)}/{number}", store)


def running(env: Mapping[str, str]) -> str:
    """Key of the newest part and its epoch, as decimal numbers."""
    return f"xvcomm/{attempt(env)}/running"
