"""Where compiled kernels are kept between processes: those for host memory and those for GPUs, in one folder."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from xvcomm.system.notice import notice
from xvcomm.system.private import NotPrivate, PrivateFolder

REMEDY = "set XVCOMM_KERNEL_CACHE to a folder of your own that can be written and is kept"
_DIGEST = 32


class KernelCache:
    """Files with a digest in a `PrivateFolder`. A folder that cannot be read or written costs time, nothing else.

    Attributes:
        folder: None: there is none, and every process compiles for itself.
        writable: whether files can be added.
        remarks: why the folder is not another one, or why there is none; empty if it is the first choice.
    """

    def __init__(self, named: str | os.PathLike[str] | None) -> None:
        """Make the folder if it is not there.

        Args:
            named: the folder, and no other is tried; None: one in the home folder, else one where temporary files lie.
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
                    self._tell(f"no kernels are taken from there: {_reason(error)}")
                continue
            if writable or self.folder is None:
                self.folder, self.writable = folder, writable
            if writable:
                break
            refused.append(f"{path}: it cannot be written")
        self.remarks = "; ".join(refused)

    def __str__(self) -> str:
        return str(self.folder.path) if self.folder else "in memory"

    def read(self, name: str) -> bytes | None:
        """What a file holds; None if it is not there, damaged, or another user can change it."""
        if self.folder is None:
            return None
        try:
            kept = self.folder.read(name)
        except NotPrivate as error:
            self._tell(f"a kernel is not taken from the folder: {_reason(error)}")
            return None
        except OSError:
            return None
        if kept is None or hashlib.sha256(kept[_DIGEST:]).digest() != kept[:_DIGEST]:
            return None
        return kept[_DIGEST:]

    def write(self, name: str, content: bytes) -> None:
        """Keep a file, if the folder takes it."""
        if self.folder is None or not self.writable:
            self._tell(f"compiled kernels are not kept, so that every process compiles them anew: {self.remarks}")
            return
        try:
            self.folder.write(name, hashlib.sha256(content).digest() + content)
        except OSError as error:
            self._tell(f"compiled kernels are not kept, so that every process compiles them anew: {_reason(error)}")

    def turn(self) -> int | None:
        """An open file for `taken`, by which one process compiles at a time; None where there is none."""
        if self.folder is None or not self.writable:
            return None
        try:
            return self.folder.open_lock("lock")
        except OSError as error:
            self._tell(f"ranks compile kernels at the same time: {_reason(error)}")
            return None

    def _tell(self, what: str) -> None:
        """Say it once."""
        if not self._told:
            self._told = True
            notice(f"{what}; {REMEDY}")


@cache
def kernel_cache(named: str | None) -> KernelCache:
    """This process's cache for a value of the setting; looked for once."""
    return KernelCache(named)


def _places(refused: list[str]) -> Iterator[Path]:
    try:
        yield Path.home().absolute() / ".cache" / "xvcomm"
    except RuntimeError:  # no HOME, and nobody knows this user
        refused.append("this user has no home folder")
    try:
        yield Path(tempfile.gettempdir()) / f"xvcomm-{os.geteuid()}"
    except OSError:
        refused.append("there is no temporary folder that can be written")


def _reason(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}"
