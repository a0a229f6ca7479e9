"""The stack of this process's main thread, written on a signal to a file in memory, also while the interpreter is blocked.

`faulthandler` writes it from its signal handler, which takes no lock. It could write the stacks of all threads, but reads those
of running threads at its own risk: that has killed processes. Other processes of the same user open the file through /proc; a
reader that wants a new text empties it first.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from xvcomm.system import forking

SIGNAL = signal.SIGRTMIN + 7
"""Of the real-time signals, which no common program uses; that a process handles it is checked before it is sent."""
NAME = "xvcomm-stacks"
_FRESH_SECONDS = 0.5
_libc = ctypes.CDLL(None, use_errno=True)


class StackFile:
    """Where this process writes its stacks when a signal comes.

    Attributes:
        fd: its file descriptor; what is written is appended. -1 once closed.
    """

    def __init__(self, number: int = SIGNAL, name: str = NAME) -> None:
        """Let a signal write them; raises OSError if the process handles it already, or the system has no such files.

        Args:
            name: by which other processes find the file.
        """
        if handled(os.getpid(), number):
            raise OSError(f"signal {number} has a handler already")
        self._signal, self._users = number, 1
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_APPEND)
            faulthandler.register(number, self.fd, all_threads=False, chain=False)
        except BaseException:
            os.close(self.fd)
            raise
        forking.register(self)

    @classmethod
    def take(cls) -> StackFile:
        """That of this process, for SIGNAL; each user who takes it closes it. Raises OSError, see above."""
        global _taken
        if _taken is None or _taken.fd < 0:
            _taken = cls()
        else:
            _taken._users += 1
        return _taken

    def after_fork(self) -> None:
        """Let the child write nothing to its parent's file."""
        self._users = 1
        self.close()

    def close(self) -> None:
        """Handle the signal no longer, once each user has closed it. Idempotent."""
        self._users -= 1
        if self._users <= 0 <= self.fd:
            if signal.getsignal(self._signal) in (signal.SIG_DFL, None):  # else the program has a handler since
                faulthandler.unregister(self._signal)
            os.close(self.fd)
            self.fd = -1


_taken: StackFile | None = None


def handled(pid: int, number: int = SIGNAL) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise. Raises OSError if it is gone."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, mask = line.partition(":")
        if name == "SigCgt":
            return bool(int(mask, 16) >> (number - 1) & 1)
    return False


def request(pid: int) -> bool:
    """Let a process of this user write its stacks, which takes a moment; False if it does not do that."""
    try:
        files = list(find(pid, NAME))
        if not files or not handled(pid):
            return False
        if time.time() - files[0].stat().st_mtime > _FRESH_SECONDS:  # else another process has asked just now
            os.truncate(files[0], 0)
            send(pid)
    except OSError:  # it is gone, or another user's
        return False
    return True


def send(pid: int) -> None:
    """Send SIGNAL to a process's main thread; a signal to the process may come to another one. Raises OSError if it is gone."""
    if _libc.tgkill(pid, pid, SIGNAL) != 0:
        raise OSError(ctypes.get_errno(), f"tgkill: process {pid}")


def written_by(pid: int) -> str:
    """What a process of this user has written; empty if it has not."""
    try:
        return "".join(file.read_text(errors="replace") for file in find(pid, NAME))
    except OSError:
        return ""


def find(pid: int, name: str) -> Iterator[Path]:
    """The open files of a process in memory that have a name. Raises OSError if it is gone, or another user's."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(entry).startswith(f"/memfd:{name} "):
                yield entry
