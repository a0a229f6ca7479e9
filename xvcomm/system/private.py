"""A folder that no other user can change: what is read from it may be run."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class NotPrivate(PermissionError):
    """Another user owns a folder or a file, or can change it; `strerror` says which."""


class PrivateFolder:
    """Files in a folder of this user's, or of root's. No symbolic link is followed, neither to the folder nor in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> bool:
        """Make the folder, readable by this user alone, if it is not there; whether files can be added.

        Raises:
            NotPrivate: another user can change what is in it.
            OSError: it cannot be made or opened.
        """
        with contextlib.suppress(OSError):  # opening it tells more
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._opened() as folder:
            return os.access(".", os.W_OK | os.X_OK, dir_fd=folder, effective_ids=True)

    def read(self, name: str) -> bytes | None:
        """What a file holds; None if it is not there.

        Raises:
            NotPrivate: another user can change it, or it is no plain file.
            OSError: it cannot be read.
        """
        with self._opened() as folder:
            try:
                file = os.open(name, os.O_RDONLY | _FILE, dir_fd=folder)
            except FileNotFoundError:
                return None
            except OSError as error:
                raise self._told(error, name) from None
        with open(file, "rb") as opened:
            self._check_file(file, name)
            return opened.read()

    def write(self, name: str, content: bytes, *, once: bool = False) -> None:
        """Write a file beside its place and rename it: a reader finds all of it or nothing.

        Args:
            once: leave a file that is there as it is.

        Raises:
            NotPrivate: another user can change what is in the folder.
            OSError: it cannot be written.
        """
        scratch = f".{secrets.token_hex(8)}"
        with self._opened() as folder:
            file = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=folder)
            try:
                with open(file, "wb") as opened:
                    opened.write(content)
                if not once:
                    os.replace(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)
                    return
                with contextlib.suppress(FileExistsError):
                    os.link(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(scratch, dir_fd=folder)

    def open_lock(self, name: str) -> int:
        """Open a file for `taken`, and make it if it is not there; closing it lets go of the lock.

        Raises:
            NotPrivate: another user can change it, or it is no plain file.
            OSError: it cannot be made.
        """
        with self._opened() as folder:
            try:
                lock = os.open(name, os.O_RDWR | os.O_CREAT | _FILE, 0o600, dir_fd=folder)
            except OSError as error:
                raise self._told(error, name) from None
        try:
            self._check_file(lock, name)
        except BaseException:
            os.close(lock)
            raise
        return lock

    @contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise self._told(error) from None
        try:
            self._check(os.fstat(folder), str(self.path))
            yield folder
        finally:
            os.close(folder)

    def _check_file(self, file: int, name: str) -> None:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise NotPrivate(errno.EPERM, "it is no plain file", str(self.path / name))
        self._check(found, str(self.path / name))

    def _check(self, found: os.stat_result, path: str) -> None:
        if not trusted(found):
            raise NotPrivate(errno.EPERM, f"it belongs to another user (uid {found.st_uid})", path)
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.S_IMODE(found.st_mode)
            raise NotPrivate(errno.EPERM, f"other users can write to it (mode {mode:o}; `chmod go-w` ends that)", path)

    def _told(self, error: OSError, name: str = "") -> OSError:
        """The error, or that a symbolic link stands there."""
        path = self.path / name
        if path.is_symlink():
            return NotPrivate(errno.EPERM, "it is a symbolic link", str(path))
        return type(error)(error.errno, error.strerror, str(path))


def trusted(found: os.stat_result) -> bool:
    """Whether a file or folder is this user's or root's."""
    return found.st_uid in (os.geteuid(), 0)


def taken(lock: int) -> bool | None:
    """Take the lock of an open file, which goes with the open file: True, or None while another one has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return True
