"""The stack of this process's main thread, written on a signal to a file in memory, also while the interpreter is blocked.

`faulthandler` writes it from its signal handler, which takes no lock. It could write the stacks of all threads, but reads those
of running threads at its own risk: that has killed processes. Other processes of the same user open the file through /proc; a
reader that wants a new text empties it first.

It writes piece by piece, without an end. So the signal is sent twice: the handler runs once after the other, and the head of the
second stack shows that the first one is complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from xvcomm.system import forking

SIGNAL = signal.SIGRTMIN + 7
"""Of the real-time signals, which no common program uses; that a process handles it is checked before it is sent."""
NAME = "xvcomm-stacks"
_FRESH_SECONDS, _LOOK_SECONDS = 0.5, 0.005
_HEAD = re.compile(r".*\(most recent call first\):$", re.MULTILINE)
_libc = ctypes.CDLL(None, use_errno=True)


class StackFile:
    """Where this process writes its stack when a signal comes, until it ends: a signal that comes late must not end it, and
    the program may have registered handlers since.

    Attributes:
        fd: its file descriptor; what is written is appended.
    """

    def __init__(self, number: int, name: str) -> None:
        """Let a signal write it.

        Args:
            name: by which other processes find the file.
        """
        self._name, self.fd = name, _empty(name)
        try:
            faulthandler.register(number, self.fd, all_threads=False, chain=False)
        except BaseException:
            os.close(self.fd)
            raise
        forking.register(self)

    @classmethod
    def take(cls, number: int = SIGNAL, name: str = NAME) -> StackFile:
        """That of this process for a signal.

        Raises:
            OSError: the program handles or ignores the signal, or the system has no such files.
        """
        if number not in _taken:
            if handled(os.getpid(), number) or signal.getsignal(number) is not signal.SIG_DFL:
                raise OSError(f"the program handles or ignores signal {number}")
            _taken[number] = cls(number, name)
        return _taken[number]

    def after_fork(self) -> None:
        """Let the child write to a file of its own."""
        own = _empty(self._name)
        os.dup2(own, self.fd, inheritable=False)
        os.close(own)


_taken: dict[int, StackFile] = {}


def _empty(name: str) -> int:
    """A file in memory to which all writes are appended."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


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
    """Send SIGNAL to a process's main thread, twice; one to the process may go to another. Raises OSError if it is gone."""
    for _ in range(2):
        if _libc.tgkill(pid, pid, SIGNAL) != 0:
            raise OSError(ctypes.get_errno(), f"tgkill: process {pid}")


def written_by(pid: int, since: float = 0.0, *, complete: bool = True) -> str:
    """The stack that a process of this user has written since a time, as of `time.time`; see `first`."""
    try:
        files = [file for file in find(pid, NAME) if file.stat().st_mtime >= since]
        return first("".join(file.read_text(errors="replace") for file in files), complete=complete)
    except OSError:
        return ""


def first(text: str, *, complete: bool = True) -> str:
    """The first stack that has its head line; lines before it are the rest of one in whose middle a reader has emptied the file.

    Args:
        complete: leave it out unless the head of another one follows; else its outer calls may be missing.
    """
    bounds = [found.start() for found in _HEAD.finditer(text)] + ([] if complete else [len(text)])
    return text[bounds[0] : bounds[1]] if len(bounds) > 1 else ""


def collect(pids: Sequence[int], seconds: float, asked: float) -> dict[int, str]:
    """The stacks that processes write within some time, after `request`, or another reader's; at its end also incomplete ones.

    Args:
        asked: when, as of `time.time`. A text from long before is left out: another reader has not emptied the file yet.
    """
    until, since = time.monotonic() + seconds, asked - 2 * _FRESH_SECONDS
    while True:
        late = time.monotonic() > until
        found = {pid: written_by(pid, since, complete=not late) for pid in pids}
        if late or all(found.values()):
            return found
        time.sleep(_LOOK_SECONDS)


def find(pid: int, name: str) -> Iterator[Path]:
    """The open files of a process in memory that have a name. Raises OSError if it is gone, or another user's."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(entry).startswith(f"/memfd:{name} "):
                yield entry
