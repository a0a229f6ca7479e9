"""Shared memory between the ranks of one host: files in /dev/shm that lose their name as soon as all have mapped them.

The standard library's `multiprocessing.shared_memory` is not used: its tracker process unlinks segments that others
still need, and it does not reserve the pages, so a full /dev/shm would kill a rank with SIGBUS in the middle of a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from xvcomm.errors import ResourceError

PAGE = 4096


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


class Segment:
    """A mapped piece of shared memory.

    Attributes:
        name: file name in the folder of shared memory; free to be reused by nobody.
        address: where this process has it mapped.
        size: bytes, whole pages, zero at first.
    """

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self._path = path
        self.name = path.name
        self.size = size
        try:
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self.view = memoryview(self._map)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)

    @classmethod
    def create(cls, folder: str, job: str, size: int) -> Segment:
        """Make a segment of at least `size` bytes and reserve its memory.

        Raises:
            ResourceError: the folder has no room, or cannot be written.
        """
        size = round_up(size, PAGE)
        path = Path(folder) / f"xvcomm-{job}-{os.getpid()}-{secrets.token_hex(6)}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ResourceError(f"cannot create shared memory in {folder}: {error.strerror}") from error
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            if error.errno == errno.ENOSPC:
                free = os.statvfs(folder)
                raise ResourceError(
                    f"{folder} is full: {size} bytes wanted, {free.f_bavail * free.f_frsize} free; enlarge it "
                    f"(docker run --shm-size=..., mount -o remount,size=... {folder}), or lower XVCOMM_RING_SLOTS, "
                    "XVCOMM_RING_SLOT_BYTES and XVCOMM_STAGE_BYTES"
                ) from error
            raise ResourceError(f"cannot reserve {size} bytes in {folder}: {error.strerror}") from error
        return cls(path, fd, size)

    @classmethod
    def attach(cls, folder: str, name: str) -> Segment:
        """Map a segment that another rank made.

        Raises:
            ResourceError: there is none of this name, so the ranks do not share the folder.
        """
        path = Path(folder) / name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ResourceError(
                f"cannot map shared memory {path}: {error.strerror}; ranks of one host must share {folder} "
                "(containers: docker run --ipc=host)"
            ) from error
        return cls(path, fd, os.fstat(fd).st_size)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Take the name away again if the block, which tells it to the others, fails."""
        try:
            yield
        except BaseException:
            self.unlink()
            raise

    def unlink(self) -> None:
        """Take the name away; mappings stay. Idempotent, and right for any rank to do."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap. Idempotent. Nothing of this process may read the memory afterwards."""
        if self.address:
            self.address = 0
            del self._anchor
            # A thread that reads a part of it at this moment keeps it mapped until it is through.
            with contextlib.suppress(BufferError):
                self.view.release()
                self._map.close()


def sweep(folder: str, job: str) -> None:
    """Take away the names of all segments of a job; who mapped them keeps them."""
    for path in Path(folder).glob(f"xvcomm-{glob.escape(job)}-*"):
        path.unlink(missing_ok=True)
