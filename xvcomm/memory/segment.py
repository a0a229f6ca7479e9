"""Shared memory between the ranks of one host: files in /dev/shm that lose their name as soon as all have mapped them.

The standard library's `multiprocessing.shared_memory` is not used: its tracker process unlinks segments that others
still need, and it does not reserve the pages, so a full /dev/shm would kill a rank with SIGBUS in the middle of a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from xvcomm.errors import ResourceError
from xvcomm.system import forking, limits

PAGE = 4096
_SEAL = b"xvcomm segment 1"
"""Ends every segment, so that no other file is mapped or deleted for one."""
_NAME = re.compile(r"xvcomm-[^/\0]+-[0-9]+-[0-9a-f]{12}")
_KEPT_BYTES = 64 << 10  # of a segment in a forked child: its header and counters, and most of a flight recorder
_MAPPING = "map shared memory"
_MAP_FIXED, _MAP_FAILED = 0x10, ctypes.c_void_p(-1).value


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

    def __init__(self, path: Path, fd: int) -> None:
        """Map an open file, and close it."""
        self._path = path
        self.name = path.name
        try:
            found = os.fstat(fd)
            self.size = found.st_size
            self._file = found.st_dev, found.st_ino
            self._map = mmap.mmap(fd, self.size)
        except OSError as error:
            what = (
                f"cannot map {self.size} bytes of shared memory ({error.strerror}); `ulimit -v` or memory is exhausted"
            )
            raise limits.reached(error, _MAPPING) or ResourceError(what) from error
        finally:
            os.close(fd)
        self.view = memoryview(self._map)
        forking.register(self, memory=True)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)

    @classmethod
    def create(cls, folder: str, job: str, size: int) -> Segment:
        """Make a segment of at least `size` bytes and reserve its memory.

        Raises:
            ResourceError: the folder has no room, or cannot be written.
        """
        size = round_up(size + len(_SEAL), PAGE)
        path = Path(folder) / f"xvcomm-{job}-{os.getpid()}-{secrets.token_hex(6)}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            what = f"cannot create shared memory in {folder}: {error.strerror}"
            raise limits.reached(error, _MAPPING) or ResourceError(what) from error
        try:
            os.posix_fallocate(fd, 0, size)
            os.pwrite(fd, _SEAL, size - len(_SEAL))
        except OSError as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            if error.errno == errno.ENOSPC:
                raise ResourceError(
                    f"{folder} is full: {size} bytes wanted, {room(folder)[1]} free; enlarge it "
                    f"(docker run --shm-size=..., mount -o remount,size=... {folder}), or lower XVCOMM_RING_SLOTS, "
                    "XVCOMM_RING_SLOT_BYTES and XVCOMM_STAGE_BYTES"
                ) from error
            raise ResourceError(f"cannot reserve {size} bytes in {folder}: {error.strerror}") from error
        try:
            return cls(path, fd)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    @classmethod
    def anonymous(cls, size: int) -> Segment:
        """Make a segment without a name, for this process alone. It takes memory only where it is written.

        Raises:
            ResourceError: the address space cannot be had.
        """
        size = round_up(size, PAGE)
        try:
            fd = os.memfd_create("xvcomm")
            os.ftruncate(fd, size)
        except OSError as error:
            what = f"cannot get {size} bytes of address space for a ring between hosts: {error.strerror}"
            raise limits.reached(error, _MAPPING) or ResourceError(what) from error
        return cls(Path("/dev/null/xvcomm"), fd)

    @classmethod
    def attach(cls, folder: str, name: str, size: int = 0) -> Segment:
        """Map a segment that another rank made.

        Args:
            name: as the store gave it, so from anybody who can write there; nothing but a segment of this user is touched.
            size: bytes that it has at least.

        Raises:
            ResourceError: there is none of this name, so the ranks do not share the folder; or it is no segment.
        """
        if not _NAME.fullmatch(name):
            raise ResourceError(
                f"the store names {name!r} as shared memory, which is no name that xvcomm gives; somebody else writes to "
                "the job's store: give the job a secret (XVCOMM_SECRET), or a store of its own"
            )
        path = Path(folder) / name
        try:
            # A named pipe would block here without O_NONBLOCK; for a regular file that flag has no effect.
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            what = (
                f"cannot map shared memory {path}: {error.strerror}; ranks of one host must share {folder} "
                "(containers: docker run --ipc=host)"
            )
            raise limits.reached(error, _MAPPING) or ResourceError(what) from error
        wrong = _objection(fd, size)
        if wrong:
            os.close(fd)
            raise ResourceError(f"{path} is not mapped as shared memory: {wrong}; ranks of one job run as one user")
        return cls(path, fd)

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
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = self._path.lstat()
            if (found.st_dev, found.st_ino) == self._file:
                self._path.unlink()

    def after_fork(self) -> None:
        """Put private memory in the segment's place: what a forked child reads and writes there is its own."""
        if self.address:
            beginning = ctypes.string_at(self.address, min(self.size, _KEPT_BYTES))
            _make_private(self.address, self.size)
            ctypes.memmove(self.address, beginning, len(beginning))

    def close(self) -> None:
        """Unmap. Idempotent. Nothing of this process may read the memory afterwards."""
        if self.address:
            self.address = 0
            del self._anchor
            # A thread that reads a part of it at this moment keeps it mapped until it is through.
            with contextlib.suppress(BufferError):
                self.view.release()
                self._map.close()


def room(folder: str) -> tuple[int, int]:
    """Bytes that a folder's file system has in all, and those that are free."""
    found = os.statvfs(folder)
    if not found.f_blocks:  # a tmpfs that was given no limit
        return sys.maxsize, sys.maxsize
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def unusable(folder: str) -> str:
    """Why this process can make no segments in a folder, or nothing; that it is full is found when one is made."""
    try:
        found, mount = os.stat(folder), os.statvfs(folder)
    except OSError as error:
        return f"it cannot be used ({error.strerror})"
    if not stat.S_ISDIR(found.st_mode):
        return "it is no folder"
    if mount.f_flag & os.ST_RDONLY:
        return "it is mounted read-only"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"user {os.geteuid()} may not write to it (mode {stat.S_IMODE(found.st_mode):o}, owner {found.st_uid})"
    return ""


def _make_private(address: int, size: int) -> None:
    """Map zeros that are this process's alone over a piece of its memory."""
    system = ctypes.CDLL(None, use_errno=True).mmap
    system.restype = ctypes.c_void_p
    system.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    if system(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == _MAP_FAILED:
        error = ctypes.get_errno()
        raise ResourceError(f"cannot replace shared memory in a forked child: {os.strerror(error)}")


def sweep(folder: str, job: str) -> None:
    """Take away the names of all segments of a job; who mapped them keeps them.

    Args:
        job: as the store gave it; nothing outside the folder, and nothing that another user owns or may open, is touched.
    """
    prefix = f"xvcomm-{job}-"
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and _NAME.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    # Of size and seal nothing can be asked: who made it may have died before.
                    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
                        os.unlink(entry.path)


def _objection(fd: int, size: int) -> str:
    """Why an open file is no segment that this process may map, or nothing."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        return "it is no regular file"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
    if found.st_mode & 0o077:
        return f"its mode is {stat.S_IMODE(found.st_mode):o}, and others than its owner may open it"
    whole = found.st_size >= max(size, PAGE) and found.st_size % PAGE == 0
    if not whole or os.pread(fd, len(_SEAL), found.st_size - len(_SEAL)) != _SEAL:
        return f"it is no segment of at least {size} bytes that xvcomm made"
    return ""
