"""A lock that a process holds as long as it lives, for others on the host to see; also across PID namespaces.

It is a lock on one byte of the folder of shared memory, as `fcntl` makes them for an open file description. The kernel
releases it however the process ends. So there is nothing to clean up, and a process that is stopped still holds it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
from typing import ClassVar

from xvcomm.system import forking

NOWHERE = -1
"""The byte of a process whose file system has no such locks."""
_FLOCK = struct.Struct("=hh4xqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_BITS = 62  # of the byte's number, made up at random: no two processes need to agree


class Presence:
    """This process's lock on a folder, and a look at those of others.

    Attributes:
        byte: which byte is locked, for the others; `NOWHERE` if the file system refuses.
    """

    _taken: ClassVar[dict[tuple[int, int], Presence]] = {}

    def __init__(self, fd: int) -> None:
        """Take the lock on an open folder; for the process's own see `take`."""
        self._fd, self.byte = fd, secrets.randbits(_BITS)
        try:
            # A folder cannot be opened for writing, which a write lock needs; `held` asks about a write lock.
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK, self.byte))
        except OSError:
            self.byte = NOWHERE

    @classmethod
    def take(cls, folder: str) -> Presence:
        """This process's lock there, held until the process ends.

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
        """Whether the process whose byte this is lives, as far as locks tell."""
        if byte == self.byte or NOWHERE in (byte, self.byte):
            return True
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, byte))
        kind: int = _FLOCK.unpack(answer)[0]
        return kind != fcntl.F_UNLCK

    def after_fork(self) -> None:
        """Let go in a forked child, which would keep the lock beyond its parent's death."""
        self._taken.clear()
        os.close(self._fd)


def _flock(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
