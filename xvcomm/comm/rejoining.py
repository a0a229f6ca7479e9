"""How a process that was started again joins a job that runs, in the place of a rank that was lost."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from xvcomm.abc.store import NotSet, PrefixStore, Store
from xvcomm.comm.store_parts import claim_parts, part, running, set_epoch
from xvcomm.config import Config
from xvcomm.errors import ConfigError, DeadlineExceeded, XvcommError
from xvcomm.rendezvous import returning
from xvcomm.rendezvous.environment import LauncherEnvironment
from xvcomm.rendezvous.store import FileStore, StoreAddress, TcpStore, awaits, need_secret
from xvcomm.rendezvous.store.folder import lives
from xvcomm.types.deadline import Deadline

if TYPE_CHECKING:
    from xvcomm.comm.communicator import Communicator

_rejoined: set[int] = set()
"""The process that has joined a job that ran; what it joins afterwards begins."""


def has_rejoined() -> bool:
    """Whether this process has joined a job that ran."""
    return os.getpid() in _rejoined


def refuse_rejoining(what: str) -> None:
    """Raise ConfigError if this process is still to join a job that runs, since it cannot with what it uses.

    Args:
        what: it uses, in words.
    """
    if not has_rejoined():
        raise ConfigError(
            f"a rank that was started again (XVCOMM_REJOIN=1) cannot join the others through {what}: use torchrun "
            "--max-restarts, which starts all ranks again, or join by xvcomm.init() with an address in XVCOMM_STORE first"
        )


def rejoin(
    store: Any, launcher: LauncherEnvironment, config: Config, env: Mapping[str, str], deadline: Deadline, waiting: Deadline
) -> Communicator | None:  # fmt: skip
    """Join a job that runs; serves no store and counts for none, because the job's is there already.

    None if the job waits for this rank to begin, as the process before has ended too early: it is to join as any other.

    Args:
        deadline: to find the job.
        waiting: to be taken in.
    """
    from xvcomm.comm.communicator import Communicator

    if not (store is None or isinstance(store, str | Store)):
        refuse_rejoining(f"a store that is a {type(store).__name__}")
    base = PrefixStore("init", store) if isinstance(store, Store) else _running(config, deadline)
    try:
        number, epoch = _current(base, launcher, env, deadline)
        space, begins = part(base, env, number), number == 0
        if not begins:
            begins = awaits(PrefixStore("join", space), launcher.rank, deadline)
            claim_parts(base, launcher.rank, env, number - begins, deadline)  # as if it had been there before
        if not isinstance(store, Store):
            set_epoch(launcher, config, epoch + (not begins))
        if begins:
            base.close()
            return None
        comm = Communicator.rejoin(space, launcher.rank, config=config, deadline=waiting, on_close=base.close)
        note_rejoined(base, launcher, Deadline.after(config.timeout))
    except BaseException:
        base.close()
        raise
    return comm


def _current(
    store: Store, launcher: LauncherEnvironment, env: Mapping[str, str], deadline: Deadline
) -> tuple[int, int]:
    """Number of the part, and epoch, of the job that runs in a store; zeros if rank 0 is to begin the first one."""
    try:
        found = store.get(running(env), Deadline.after(0) if launcher.rank == 0 else deadline)
    except NotSet:
        if launcher.rank == 0:
            return 0, 0
        raise DeadlineExceeded(
            "no job runs in this store, which XVCOMM_REJOIN=1 is to join: unset XVCOMM_REJOIN", rank=launcher.rank
        ) from None
    number, epoch = map(int, found.split())
    return number, epoch


def note_rejoined(store: Store, launcher: LauncherEnvironment, deadline: Deadline) -> None:
    """Note that this process has joined the job in the place of another one."""
    _rejoined.add(os.getpid())
    with contextlib.suppress(XvcommError):
        returning.tell(store, launcher.rank, deadline)


def _running(config: Config, deadline: Deadline) -> Store:
    """The store of a job that runs."""
    if config.store is None:
        raise ConfigError(
            "XVCOMM_REJOIN=1 needs XVCOMM_STORE, the address of the store of the job that runs: a launcher serves it, or it is "
            "a folder, or rank 0 serves it and lives"
        )
    address = StoreAddress.parse(config.store)
    if address.folder is None:
        return TcpStore(address.host, address.port, need_secret(config.secret), deadline, epoch=None)
    epochs = [path for path in address.folder.glob("*") if path.name.isdigit()]
    return FileStore(max(epochs, key=lambda path: (lives(path), int(path.name)), default=address.folder / "0"))
