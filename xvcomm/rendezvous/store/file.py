"""A store in a folder that all ranks share."""

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
    """A store with one file per key, written atomically by renaming. One job at a time may use the folder."""

    def __init__(self, path: str | os.PathLike[str], *, ranks: int | None = None) -> None:
        """Create the folder with mode 0700 if it is missing.

        Args:
            path: of the folder, on a file system that all ranks share.
            ranks: how many ranks will close this store; the last of them removes the folder. None: the folder is kept.

        Raises:
            StoreError: the folder cannot be created.
            ConfigError: other users can change its contents.
        """
        self._folder = Path(path)
        self._ranks = ranks
        with self._reported("use"):
            folder.make(self._folder)

    def enter(self, ranks: int, deadline: Deadline) -> None:
        """Register this process as a user of the folder. If all processes of an earlier job have died, remove their files
        first.

        Raises:
            ConfigError: another job has used the folder and may still use it; says what to do.
            DeadlineExceeded: another process holds the lock.
            StoreError: the folder cannot be used.
        """
        entered = False
        while not entered:
            with self._reported("use"):
                folder.make(self._folder)
                with (self._folder / folder.LOCK).open("ab") as lock:
                    folder.hold(self._folder, lock.fileno(), deadline)
                    # The last rank of the previous job may have removed the folder just now.
                    entered = (self._folder / folder.LOCK).exists() and os.path.samestat(
                        os.fstat(lock.fileno()), os.stat(self._folder / folder.LOCK)
                    )
                    if entered:
                        folder.enter(self._folder, ranks)

    def __str__(self) -> str:
        return f"the store in {self._folder}"

    def set(self, key: str, value: bytes, deadline: Deadline = NEVER) -> None:
        with self._reported(f"set {key!r} in"):
            self._write(key, value)

    def look(self, key: str, deadline: Deadline = NEVER) -> bytes | None:
        with self._reported(f"get {key!r} from"):
            try:
                return self._path(key).read_bytes()
            except FileNotFoundError:
                return None

    def add(self, key: str, amount: int, deadline: Deadline = NEVER) -> int:
        with self._reported(f"add to {key!r} in"), (self._folder / folder.LOCK).open("ab") as lock:
            folder.hold(self._folder, lock.fileno(), deadline)
            try:
                total = int(self.look(key) or b"0") + amount
            except ValueError:
                raise StoreError(
                    f"the value of {key!r} is not an integer; add() needs a key that only add() writes"
                ) from None
            self._write(key, b"%d" % total)
        return total

    def decide(self, key: str, value: bytes, deadline: Deadline = NEVER) -> bytes:
        with self._reported(f"decide {key!r} in"), (self._folder / folder.LOCK).open("ab") as lock:
            folder.hold(self._folder, lock.fileno(), deadline)
            found = self.look(key)
            if found is None:
                self._write(key, value)
        return value if found is None else found

    def close(self) -> None:
        """Deregister this rank; the last of `ranks` removes the folder."""
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
