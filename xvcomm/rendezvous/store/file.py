"""A store in a folder that all ranks see."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from xvcomm.errors import DeadlineExceeded, StoreError, XvcommError
from xvcomm.rendezvous.store import folder
from xvcomm.rendezvous.store.polling import PollingStore
from xvcomm.system import limits
from xvcomm.types.deadline import NEVER, Deadline

_LEFT = "closed"
_LONGEST = 200
_LEAVING_SECONDS = 2.0


class FileStore(PollingStore):
    """A file a key, written whole by renaming. The folder belongs to one job at a time."""

    def __init__(self, path: str | os.PathLike[str], *, ranks: int | None = None) -> None:
        """Make the folder if it is not there, readable by this user alone.

        Args:
            path: of the folder, on a file system that all ranks share.
            ranks: how many will close this store; the last of them removes the folder. None: nobody does.

        Raises:
            StoreError: the folder cannot be made.
            ConfigError: others can change what is in it.
        """
        self._folder = Path(path)
        self._ranks = ranks
        with self._reported("use"):
            folder.make(self._folder)

    def enter(self, ranks: int, deadline: Deadline) -> None:
        """Count this process among the job's; before the first, what a job left whose processes all died is removed.

        Raises:
            ConfigError: another job has used the folder, and may use it still; says what to do.
            DeadlineExceeded: another process holds the lock.
            StoreError: the folder cannot be used.
        """
        entered = False
        while not entered:
            with self._reported("use"):
                folder.make(self._folder)
                with (self._folder / folder.LOCK).open("ab") as lock:
                    folder.hold(self._folder, lock.fileno(), deadline)
                    # The last rank of the job before may just have removed the folder.
                    entered = (self._folder / folder.LOCK).exists() and os.path.samestat(
                        os.fstat(lock.fileno()), os.stat(self._folder / folder.LOCK)
                    )
                    if entered:
                        folder.enter(self._folder, ranks)

    def __str__(self) -> str:
        return f"the store in {self._folder}"

    def set(self, key: str, value: bytes, deadline: Deadline = NEVER) -> None:
        """See `Store.set`."""
        with self._reported(f"set {key!r} in"):
            self._write(key, value)

    def look(self, key: str, deadline: Deadline = NEVER) -> bytes | None:
        """See `PollingStore.look`."""
        with self._reported(f"get {key!r} from"):
            try:
                return self._path(key).read_bytes()
            except FileNotFoundError:
                return None

    def add(self, key: str, amount: int, deadline: Deadline = NEVER) -> int:
        """See `Store.add`. `get` gives the sum in decimal digits."""
        with self._reported(f"add to {key!r} in"), (self._folder / folder.LOCK).open("ab") as lock:
            folder.hold(self._folder, lock.fileno(), deadline)
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
        if ranks is None or not self._folder.is_dir():
            return
        try:
            left = self.add(_LEFT, 1, Deadline.after(_LEAVING_SECONDS))
        except DeadlineExceeded:
            return
        if left == ranks:
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
        except XvcommError:
            raise
        except OSError as error:
            raise limits.reached(error, f"{what} {self._folder}") or StoreError(
                f"cannot {what} {self._folder}: {error.strerror}; XVCOMM_STORE=file:// needs a folder that every rank "
                "of the job can write"
            ) from error
