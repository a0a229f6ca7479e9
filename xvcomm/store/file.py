"""A store in a folder that all ranks see."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from xvcomm.errors import StoreError
from xvcomm.store.polling import PollingStore

_LOCK = "lock"
_LEFT = "closed"
_LONGEST = 200


class FileStore(PollingStore):
    """A file a key, written whole by renaming. The folder belongs to one job at a time."""

    def __init__(self, folder: str | os.PathLike[str], *, ranks: int | None = None) -> None:
        """Make the folder if it is not there, readable by this user alone.

        Args:
            folder: on a file system that all ranks share.
            ranks: how many will close this store; the last of them removes the folder. None: nobody does.

        Raises:
            StoreError: the folder cannot be made.
        """
        self._folder = Path(folder)
        self._ranks = ranks
        with self._reported("use"):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def __str__(self) -> str:
        return f"the store in {self._folder}"

    def set(self, key: str, value: bytes) -> None:
        """See `Store.set`."""
        with self._reported(f"set {key!r} in"):
            self._write(key, value)

    def look(self, key: str) -> bytes | None:
        """See `PollingStore.look`."""
        with self._reported(f"get {key!r} from"):
            try:
                return self._path(key).read_bytes()
            except FileNotFoundError:
                return None

    def add(self, key: str, amount: int) -> int:
        """See `Store.add`. `get` gives the sum in decimal digits."""
        with self._reported(f"add to {key!r} in"), (self._folder / _LOCK).open("ab") as lock:
            # The lock goes with the file object, so it holds between threads as well as between processes.
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                total = int(self.look(key) or b"0") + amount
            except ValueError:
                raise StoreError(
                    f"the value of {key!r} is no integer; add() needs a key that only add() writes"
                ) from None
            self._write(key, b"%d" % total)
        return total

    def close(self) -> None:
        """Count this rank out; the last of `ranks` removes the folder."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None and self._folder.is_dir() and self.add(_LEFT, 1) == ranks:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, key: str) -> Path:
        name = quote(key, safe="")
        if len(name) > _LONGEST:
            name = name[:100] + "~" + hashlib.sha256(key.encode()).hexdigest()
        return self._folder / f"={name}"

    def _write(self, key: str, value: bytes) -> None:
        fresh = self._folder / f"new-{secrets.token_hex(8)}"
        fresh.write_bytes(value)
        fresh.replace(self._path(key))

    @contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(
                f"cannot {what} {self._folder}: {error.strerror}; XVCOMM_STORE=file:// needs a folder that every rank "
                "of the job can write"
            ) from error
