"""A file lock that a process holds as long as it lives, visible to other processes of the host, also across PID namespaces.

It is a lock of an open file description (`fcntl`) on one byte of the shared memory folder. The kernel releases it however the
process ends, so no cleanup is needed, and a stopped process still holds it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
from typing import ClassVar

from xvcomm.system import forking

NOWHERE = -1
"""Value of `byte` if the file system does not support such locks."""
_FLOCK = struct.Struct("=hh4xqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_BITS = 62  # the byte is chosen at random, so that processes need no agreement


class Presence:
    """This process's lock on a folder, and checks of other processes' locks.

    Attributes:
        byte: the locked byte, which the other processes need; `NOWHERE` if the file system refuses locks.
    """

    _taken: ClassVar[dict[tuple[int, int], Presence]] = {}

    def __init__(self, fd: int) -> None:
        """Lock a byte of an open folder; `take` returns the process's own lock."""
        self._fd, self.byte = fd, secrets.randbits(_BITS)
        try:
            # A read lock, because a folder cannot be opened for writing; `held` tests for a write lock, which conflicts with
            # it.
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK, self.byte))
        except OSError:
            self.byte = NOWHERE

    @classmethod
    def take(cls, folder: str) -> Presence:
        """The lock of this process on a folder, held until the process ends.

        Raises:
            OSError: the folder cannot be opened.
        """
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        found = os.fstat(fd)
        key = found.st_dev, found.st_ino
        if key not in cls._taken:
            made = cls(fd)
            if cls._taken.setdefault(key, made) is made:
                forking.register(made)
                return made
        os.close(fd)
        return cls._taken[key]

    def held(self, byte: int) -> bool:
        """Whether the process with this byte lives; True if locks are not supported."""
        if byte == self.byte or NOWHERE in (byte, self.byte):
            return True
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, byte))
        kind: int = _FLOCK.unpack(answer)[0]
        return kind != fcntl.F_UNLCK

    def after_fork(self) -> None:
        """Close the descriptor in a forked child, which would otherwise keep the lock after its parent's death."""
        self._taken.clear()
        os.close(self._fd)


def _flock(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
