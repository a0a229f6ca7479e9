"""The folder of a file store: its ownership, its lock, and the processes that use it."""

from __future__ import annotations

import contextlib
import stat
from functools import partial
from pathlib import Path

from xvcomm.abc.store import ANSWER_SECONDS
from xvcomm.errors import ConfigError, DeadlineExceeded
from xvcomm.system import processes
from xvcomm.system.private import taken, trusted
from xvcomm.types.deadline import Deadline, poll

LOCK = "lock"
_MEMBERS = "members"


def make(folder: Path) -> None:
    """Create the folder with mode 0700 if it is missing.

    Raises:
        OSError: it cannot be created.
        ConfigError: users other than this one and root can change its contents.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for found in (folder.lstat(), folder.stat()):
        if not trusted(found):
            raise ConfigError(
                f"the folder {folder} of the file store belongs to another user (uid {found.st_uid}), who could change the "
                "job's messages: name a folder of your own in XVCOMM_STORE, for instance one that does not exist yet"
            )
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"every user can write to the folder {folder} of the file store (mode {stat.S_IMODE(found.st_mode):o}) and so "
            f"change the job's messages: run `chmod 700 {folder}`, or name another folder in XVCOMM_STORE"
        )


def hold(folder: Path, lock: int, deadline: Deadline) -> None:
    """Take the folder's lock. It belongs to the open file, so it excludes threads as well as processes.

    Raises:
        DeadlineExceeded: another process holds it.
    """
    if poll(partial(taken, lock), Deadline.after(deadline.sooner(ANSWER_SECONDS))) is None:
        raise DeadlineExceeded(
            f"another process holds the lock of the store in {folder} ({folder / LOCK}) and did not release it in time; "
            "a rank of the job is stopped, or a program outside the job holds the lock"
        )


def enter(folder: Path, ranks: int) -> None:
    """Register this process as a user of the folder; the caller holds the folder's lock.

    If all registered processes are dead, their files are removed first, so that the next job can use the folder at once.

    Raises:
        ConfigError: as many processes as the job has ranks are registered, and none of them is known to run.
    """
    file = folder / _MEMBERS
    members = file.read_text().splitlines() if file.exists() else []
    states = [processes.state(member) for member in members]
    if states and all(state == "dead" for state in states):
        _clear(folder)
        members = []
    elif len(members) >= ranks and "alive" not in states:
        raise ConfigError(
            f"{len(members)} processes of another job or another host used the folder {folder} of the file store and did "
            f"not remove it: if none of them runs any more, remove it (`rm -r {folder}`), or name another folder in "
            "XVCOMM_STORE"
        )
    with file.open("a") as out:
        out.write(f"{processes.identity()}\n")


def lives(folder: Path) -> bool:
    """Whether a registered process of this host runs, or one of another host may."""
    with contextlib.suppress(FileNotFoundError):
        return any(processes.state(member) != "dead" for member in (folder / _MEMBERS).read_text().splitlines())
    return False


def _clear(folder: Path) -> None:
    """Remove all files except the lock, which other processes may be waiting for."""
    for path in folder.iterdir():
        if path.name != LOCK:
            path.unlink(missing_ok=True)
