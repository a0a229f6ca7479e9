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
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
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

    def look(self, kinds: Collection[bytes]) -> tuple[list[tuple[bytes, int]], bool]:
        """What has come: the requests of these kinds with their numbers, and whether SIGUSR1 has."""
        with self._reading:
            size = os.fstat(self._file.fd).st_size
            if size:
                text = os.pread(self._file.fd, size, 0)
                os.ftruncate(self._file.fd, 0)
                for each in self._every:
                    each._lines += [line.split() for line in text.splitlines()]
            lines, self._lines = self._lines, []
        found = [line for line in lines if line and line[0] in kinds]
        return [(line[0], int(line[1])) for line in found if len(line) == 2], len(found) < len(lines)

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


def request(pids: Iterable[int], kind: bytes, seconds: float, right: Callable[[bytes], bool]) -> Iterator[bytes]:
    """Ask processes of this user, all at once: the answers that come in time, one of each process.

    Args:
        kind: one word.
        right: whether an answer is of the one who is meant; a process may be in several jobs.
    """
    number, until = secrets.randbits(62), time.monotonic() + seconds
    waiting = {pid: answers for pid in pids if (answers := _ask(pid, b"%s %d\n" % (kind, number)))}
    while waiting and time.monotonic() < until:
        for pid, answers in list(waiting.items()):
            data = next((data for path in answers if (data := _answer(path, number)) and right(data)), b"")
            if data:
                del waiting[pid]
                yield data
        time.sleep(_LOOK_SECONDS)


def _ask(pid: int, line: bytes) -> list[Path]:
    """Where the answers of a process come; none if it cannot be asked."""
    with contextlib.suppress(OSError):  # it is gone, or another user's
        files, answers = list(find(pid, _REQUEST)), list(find(pid, _ANSWER))
        if files and answers:
            with files[0].open("ab", buffering=0) as file:
                file.write(line)
            return answers
    return []


def _answer(path: Path, number: int) -> bytes:
    """The answer to a request, if it is there and whole."""
    with contextlib.suppress(OSError):  # the process is gone
        found = path.read_bytes()
        if len(found) >= _HEAD.size and _HEAD.unpack_from(found) == (number, len(found) - _HEAD.size):
            return found[_HEAD.size :]
    return b""
