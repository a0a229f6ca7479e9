"""Files in a folder that no other user can write. Code that is read from it will be executed."""

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
_LOCK = "lock"


class NotPrivate(PermissionError):
    """Another user owns, or can write, a folder or file; `strerror` gives the reason."""


class PrivateFolder:
    """Files in a folder owned by this user or root. Symbolic links are not followed, neither to the folder nor in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> bool:
        """Create the folder with mode 0700 if it is missing; return whether files can be added to it.

        Raises:
            NotPrivate: another user can change its contents.
            OSError: it cannot be created or opened.
        """
        with contextlib.suppress(OSError):  # opening it gives the better error
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._opened() as folder:
            return os.access(".", os.W_OK | os.X_OK, dir_fd=folder, effective_ids=True)

    def read(self, name: str) -> bytes | None:
        """Contents of a file; None if it does not exist.

        Raises:
            NotPrivate: another user can write it, or it is not a regular file.
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
        """Write a temporary file and rename it, so that readers see either all of the content or none.

        Args:
            once: keep a file that already exists.

        Raises:
            NotPrivate: another user can change the contents of the folder.
            OSError: the file cannot be written.
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

    def open_lock(self) -> int:
        """Open the folder's lock file for `taken`, creating it if it is missing. Closing the descriptor releases the lock.

        Raises:
            NotPrivate: another user can write it, or it is not a regular file.
            OSError: it cannot be created.
        """
        with self._opened() as folder:
            try:
                lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | _FILE, 0o600, dir_fd=folder)
            except OSError as error:
                raise self._told(error, _LOCK) from None
        try:
            self._check_file(lock, _LOCK)
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
            raise NotPrivate(errno.EPERM, "it is not a regular file", str(self.path / name))
        self._check(found, str(self.path / name))

    def _check(self, found: os.stat_result, path: str) -> None:
        if not trusted(found):
            raise NotPrivate(errno.EPERM, f"another user owns it (uid {found.st_uid})", path)
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.S_IMODE(found.st_mode)
            raise NotPrivate(errno.EPERM, f"other users can write to it (mode {mode:o}; run `chmod go-w`)", path)

    def _told(self, error: OSError, name: str = "") -> OSError:
        """The error with its path; NotPrivate if the path is a symbolic link."""
        path = self.path / name
        if path.is_symlink():
            return NotPrivate(errno.EPERM, "it is a symbolic link", str(path))
        return type(error)(error.errno, error.strerror, str(path))


def trusted(found: os.stat_result) -> bool:
    """Whether this user or root owns a file or folder."""
    return found.st_uid in (os.geteuid(), 0)


def taken(lock: int) -> bool | None:
    """Try to take the `flock` of an open file: True, or None if another open file holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return True
