"""Disk cache of compiled kernels, for host memory and for GPUs, in one folder."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from xvcomm.system.notice import notice
from xvcomm.system.private import NotPrivate, PrivateFolder

REMEDY = "set XVCOMM_KERNEL_CACHE to a permanent folder that you own and can write"
_DIGEST = 32


class KernelCache:
    """Files with a checksum in a `PrivateFolder`. Without a usable folder, kernels are compiled again, but nothing fails.

    Attributes:
        folder: None if no folder is usable; then every process compiles its own kernels.
        writable: whether files can be added.
        remarks: why a preferred folder, or any folder, is not used; empty if the first choice is.
    """

    def __init__(self, named: str | os.PathLike[str] | None) -> None:
        """Create the folder if it is missing.

        Args:
            named: the only folder to use; None tries one in the home folder, then one for temporary files.
        """
        self.folder: PrivateFolder | None = None
        self.writable = False
        self._told = False
        refused: list[str] = []
        for path in [Path(named).absolute()] if named else _places(refused):
            folder = PrivateFolder(path)
            try:
                writable = folder.make()
            except OSError as error:
                refused.append(_reason(error))
                if isinstance(error, NotPrivate):
                    self._tell(f"the kernel cache is not used: {_reason(error)}")
                continue
            if writable or self.folder is None:
                self.folder, self.writable = folder, writable
            if writable:
                break
            refused.append(f"{path}: not writable")
        self.remarks = "; ".join(refused)

    def __str__(self) -> str:
        return str(self.folder.path) if self.folder else "in memory"

    def read(self, name: str) -> bytes | None:
        """Contents of a file; None if it is missing, damaged, or another user can write it."""
        if self.folder is None:
            return None
        try:
            kept = self.folder.read(name)
        except NotPrivate as error:
            self._tell(f"a kernel of the cache is not used: {_reason(error)}")
            return None
        except OSError:
            return None
        if kept is None or hashlib.sha256(kept[_DIGEST:]).digest() != kept[:_DIGEST]:
            return None
        return kept[_DIGEST:]

    def write(self, name: str, content: bytes) -> None:
        """Store a file, if the folder is writable."""
        if self.folder is None or not self.writable:
            self._tell(f"compiled kernels are not stored, so every process compiles them again: {self.remarks}")
            return
        try:
            self.folder.write(name, hashlib.sha256(content).digest() + content)
        except OSError as error:
            self._tell(f"compiled kernels are not stored, so every process compiles them again: {_reason(error)}")

    def turn(self) -> int | None:
        """Open the lock file by which one process compiles at a time, for `taken`; None if there is none."""
        if self.folder is None or not self.writable:
            return None
        try:
            return self.folder.open_lock()
        except OSError as error:
            self._tell(f"ranks cannot take turns to compile kernels: {_reason(error)}")
            return None

    def _tell(self, what: str) -> None:
        """Log a notice, at most one per cache."""
        if not self._told:
            self._told = True
            notice(f"{what}; {REMEDY}")


@cache
def kernel_cache(named: str | None) -> KernelCache:
    """The cache of this process for a value of the setting `kernel_cache`; created once."""
    return KernelCache(named)


def _places(refused: list[str]) -> Iterator[Path]:
    try:
        yield Path.home().absolute() / ".cache" / "xvcomm"
    except RuntimeError:  # HOME is unset and the user database does not know the user
        refused.append("this user has no home folder")
    try:
        yield Path(tempfile.gettempdir()) / f"xvcomm-{os.geteuid()}"
    except OSError:
        refused.append("there is no writable temporary folder")


def _reason(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}"
