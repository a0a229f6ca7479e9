"""What other processes of the host want of this one, without a socket: files in memory that they open through /proc.

A request is text in one file, the answer is in another one. The stacks that SIGUSR1 writes to the first are a request as well.
"""

from __future__ import annotations

import os
import signal
import time

from xvcomm.system import forking
from xvcomm.system.stacks import StackFile, find

_REQUEST, _ANSWER = "xvcomm-request", "xvcomm-answer"
_LOOK_SECONDS = 0.02


class Requests:
    """Those to this process. `look` must be called again and again."""

    def __init__(self) -> None:
        """Accept requests; raises OSError if the process handles SIGUSR1 already, or the system has no such files."""
        self._file = StackFile(signal.SIGUSR1, _REQUEST)
        self._answer = os.memfd_create(_ANSWER, os.MFD_CLOEXEC)
        forking.register(self)

    def look(self) -> bytes:
        """A request that has come; empty if there is none. What SIGUSR1 has written begins with a capital letter."""
        size = os.fstat(self._file.fd).st_size if self._file.fd >= 0 else 0
        if size == 0:
            return b""
        found = os.pread(self._file.fd, size, 0)
        os.ftruncate(self._file.fd, 0)
        return found

    def answer(self, data: bytes) -> None:
        """Give the answer to a request of another process."""
        os.ftruncate(self._answer, 0)
        os.pwrite(self._answer, data, 0)

    def after_fork(self) -> None:
        """Leave the files to the parent."""
        self.close()

    def close(self) -> None:
        """Accept none any more. Idempotent."""
        self._file.close()
        if self._answer >= 0:
            os.close(self._answer)
            self._answer = -1


def request(pid: int, text: bytes, seconds: float) -> bytes:
    """Ask a process of this user; its answer, or nothing if it gives none in time.

    Args:
        text: not empty; begins with a small letter.
    """
    try:
        files, answers = list(find(pid, _REQUEST)), list(find(pid, _ANSWER))
        if not files or not answers:
            return b""
        os.truncate(answers[0], 0)
        with files[0].open("ab", buffering=0) as file:
            file.write(text)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not files[0].stat().st_size and (found := answers[0].read_bytes()):
                return found
            time.sleep(_LOOK_SECONDS)
    except OSError:  # it is gone, or another user's
        pass
    return b""
