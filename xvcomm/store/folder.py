"""The folder of a file store: whose it may be, its lock, and which processes use it."""

from __future__ import annotations

import fcntl
import os
import stat
from functools import partial
from pathlib import Path

from xvcomm.abc.store import ANSWER_SECONDS
from xvcomm.deadline import Deadline
from xvcomm.errors import ConfigError, DeadlineExceeded
from xvcomm.store.polling import poll

LOCK = "lock"


def make(folder: Path) -> None:
    """Make the folder if it is not there, readable by this user alone.

    Raises:
        OSError: it cannot be made.
        ConfigError: others than this user and root can change what is in it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for found in (folder.lstat(), folder.stat()):
        if found.st_uid not in (os.geteuid(), 0):
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
    """Take the folder's lock, which goes with the open file and so holds between threads as well as processes.

    Raises:
        DeadlineExceeded: another process has it.
    """
    if poll(partial(_taken, lock), Deadline.after(deadline.sooner(ANSWER_SECONDS))) is None:
        raise DeadlineExceeded(
            f"another process holds the lock of the store in {folder} ({folder / LOCK}) and did not let go of it in time; "
            "a rank of the job is stopped, or a program outside the job holds the lock"
        )


def _taken(lock: int) -> bool | None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return True
