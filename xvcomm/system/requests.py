"""What other processes of the host want of this one, without a socket: files in memory that they open through /proc.

A request is a line in one file, the answer is in another one, behind the request's number and the answer's length. The stack that
SIGUSR1 writes to the first file is a request as well.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import struct
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from xvcomm.system import forking
from xvcomm.system.stacks import StackFile, find

_REQUEST, _ANSWER = "xvcomm-request", "xvcomm-answer"
_HEAD = struct.Struct("=QQ")  # number of the request, bytes of the answer
_LOOK_SECONDS = 0.02


class Requests:
    """Those to this process, for one of its jobs. `look` must be called again and again.

    All jobs of a process have one file of requests, and each gets all of them.
    """

    _every: ClassVar[list[Requests]] = []
    _reading: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        """Accept requests; raises OSError if the program handles or ignores SIGUSR1, or the system has no such files."""
        self._file = StackFile.take(signal.SIGUSR1, _REQUEST)
        self._answer = os.memfd_create(_ANSWER, os.MFD_CLOEXEC)
        self._lines: list[list[bytes]] = []
        with self._reading:
            if not self._every:
                os.ftruncate(self._file.fd, 0)
            self._every.append(self)
        forking.register(self)

    def after_fork(self) -> None:
        """In the child those are the parent's."""
        Requests._reading = threading.Lock()  # a thread of the parent's may hold the parent's
        self._every.clear()

    def look(self, known: bytes) -> tuple[list[int], bool]:
        """What has come: the numbers of requests of a kind, and whether SIGUSR1 has."""
        with self._reading:
            size = os.fstat(self._file.fd).st_size
            if size:
                found = os.pread(self._file.fd, size, 0)
                os.ftruncate(self._file.fd, 0)
                for each in self._every:
                    each._lines += [line.split() for line in found.splitlines()]
            lines, self._lines = self._lines, []
        numbers = [int(line[1]) for line in lines if line[:1] == [known] and len(line) == 2]
        return numbers, any(line[:1] != [known] for line in lines)

    def answer(self, number: int, data: bytes) -> None:
        """Give the answer to a request of another process."""
        os.pwrite(self._answer, bytes(_HEAD.size), 0)
        os.ftruncate(self._answer, _HEAD.size)
        os.pwrite(self._answer, data, _HEAD.size)
        os.pwrite(self._answer, _HEAD.pack(number, len(data)), 0)

    def close(self) -> None:
        """Accept none any more. Idempotent."""
        with self._reading, contextlib.suppress(ValueError):
            self._every.remove(self)
        if self._answer >= 0:
            os.close(self._answer)
            self._answer = -1


def request(pid: int, text: bytes, until: float, right: Callable[[bytes], bool]) -> bytes:
    """Ask a process of this user; its answer, or nothing if it gives none in time.

    Args:
        text: one word.
        until: by `time.monotonic()`.
        right: whether an answer is of the one who is meant; a process may be in several jobs.
    """
    number = secrets.randbits(62)
    try:
        files, answers = list(find(pid, _REQUEST)), list(find(pid, _ANSWER))
        if not files or not answers:
            return b""
        with files[0].open("ab", buffering=0) as file:
            file.write(b"%s %d\n" % (text, number))
        while time.monotonic() < until:
            for path in answers:
                found = path.read_bytes()
                if len(found) >= _HEAD.size:
                    of, length = _HEAD.unpack_from(found)
                    data = found[_HEAD.size :]
                    if of == number and length == len(data) and right(data):
                        return data
            time.sleep(_LOOK_SECONDS)
    except OSError:  # it is gone, or another user's
        pass
    return b""
