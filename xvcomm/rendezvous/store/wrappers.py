"""Stores on top of what a framework or launcher already provides.

This is the only module of the store that imports a framework, and only in functions for the users of that framework's launcher,
where it must be installed.
"""

from __future__ import annotations

import importlib
import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

from xvcomm.abc.store import ANSWER_SECONDS
from xvcomm.errors import ConfigError, DeadlineExceeded, ResourceError, StoreError
from xvcomm.rendezvous.store.hosting import Invitation, invite
from xvcomm.rendezvous.store.polling import PollingStore
from xvcomm.rendezvous.store.tcp import TcpStore, silent
from xvcomm.system.threads import Daemon
from xvcomm.types.deadline import NEVER, Deadline, poll

T = TypeVar("T")

_REPLY_SECONDS = 1.0
"""Seconds after the deadline for which an answer may still arrive, as in `TcpStore`."""
_LONGEST = timedelta(days=1)
_NOTE_BYTES = 512
_INCREMENT_LIMIT = 1 << 31  # JAX's own counters have 32 bits; a key with larger amounts is added to by _add_locked only
_unfinished: list[tuple[Any, bytearray]] = []


class _TorchLike(Protocol):
    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: Sequence[str], /) -> bool: ...


class _LibraryStore(PollingStore):
    """Base of stores whose library calls accept no deadline: a thread makes each call, and the caller can stop waiting for it."""

    def __init__(self) -> None:
        self._turn = threading.Lock()

    @abstractmethod
    def _look(self, key: str) -> bytes | None:
        """Ask the library for the value of `key`; None if it is not set."""

    def look(self, key: str, deadline: Deadline = NEVER) -> bytes | None:
        return self._ask(partial(self._look, key), f"get {key!r}", deadline)

    def _ask(self, call: Callable[[], T], what: str, deadline: Deadline) -> T:
        """Make a call of the library in a thread; return what it does.

        Raises:
            DeadlineExceeded: it did not return in time, or an earlier call is still in progress.
            StoreError: it raised RuntimeError.
        """
        until = Deadline.after(deadline.sooner(ANSWER_SECONDS) + _REPLY_SECONDS)
        if not self._turn.acquire(timeout=until.left()):
            raise silent(self, what)
        answer: Future[T] = Future()
        try:
            Daemon("xvcomm-ask", partial(self._answer, call, answer)).start()
        except ResourceError:  # no thread can start, for instance at interpreter shutdown
            self._answer(call, answer)
        except BaseException:  # a signal handler raised; the thread may run nevertheless
            if answer.cancel():
                self._turn.release()
            raise
        try:
            answer.exception(until.left())
        except TimeoutError:
            raise silent(self, what) from None
        try:
            return answer.result()
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise StoreError(f"{self} failed: {first}; is the process that serves it still running?") from error

    def _answer(self, call: Callable[[], T], answer: Future[T]) -> None:
        if not answer.set_running_or_notify_cancel():
            return
        try:
            given = call()
        except BaseException as error:
            self._turn.release()
            answer.set_exception(error)
        else:
            self._turn.release()
            answer.set_result(given)


class TorchStore(_LibraryStore):
    """A `torch.distributed.Store`. It is polled, because its own `wait` blocks every other call on it."""

    def __init__(self, store: _TorchLike) -> None:
        super().__init__()
        self._store = store

    def __str__(self) -> str:
        return f"torch's {type(self._store).__name__}"

    def set(self, key: str, value: bytes, deadline: Deadline = NEVER) -> None:
        self._ask(partial(self._store.set, key, value), f"set {key!r}", deadline)

    def _look(self, key: str) -> bytes | None:
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def add(self, key: str, amount: int, deadline: Deadline = NEVER) -> int:
        return int(self._ask(partial(self._store.add, key, amount), f"add to {key!r}", deadline))

    def decide(self, key: str, value: bytes, deadline: Deadline = NEVER) -> bytes:
        if not value or not hasattr(self._store, "compare_set"):
            return super().decide(key, value, deadline)
        # an empty text stands for a key that is not set
        return bytes(self._ask(partial(self._store.compare_set, key, "", value), f"decide {key!r}", deadline))


class JaxStore(_LibraryStore):
    """The key-value service of `jax.distributed`.

    Args (of the constructor):
        client: `jax._src.distributed.global_state.client`.
    """

    def __init__(self, client: Any) -> None:
        super().__init__()
        self._client = client

    def __str__(self) -> str:
        return "JAX's coordination service"

    def set(self, key: str, value: bytes, deadline: Deadline = NEVER) -> None:
        overwrite = partial(self._client.key_value_set_bytes, key, value, allow_overwrite=True)
        self._ask(overwrite, f"set {key!r}", deadline)

    def _look(self, key: str) -> bytes | None:
        try:
            return bytes(self._client.key_value_try_get_bytes(key))
        except RuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def add(self, key: str, amount: int, deadline: Deadline = NEVER) -> int:
        if hasattr(self._client, "key_value_increment") and abs(amount) < _INCREMENT_LIMIT:
            return int(self._ask(partial(self._client.key_value_increment, key, amount), f"add to {key!r}", deadline))
        return self._add_locked(key, amount, deadline)

    def decide(self, key: str, value: bytes, deadline: Deadline = NEVER) -> bytes:
        return value if self._created(key, value, deadline) else self.get(key, deadline)

    def _add_locked(self, key: str, amount: int, deadline: Deadline) -> int:
        """Add under a lock. Before jaxlib 0.8 the service cannot add, but only one of several ranks can create a key."""
        lock = f"{key}/lock"
        until = Deadline.after(deadline.sooner(ANSWER_SECONDS))
        if poll(lambda: self._created(lock, b"", deadline) or None, until) is None:
            raise DeadlineExceeded(
                f"a rank that adds to {key!r} in {self} did not release its lock in time; it is stopped or has died"
            )
        try:
            total = int(self.look(key, deadline) or b"0") + amount
            self.set(key, b"%d" % total, deadline)
        finally:
            self._ask(partial(self._client.key_value_delete, lock), f"delete {lock!r}", deadline)
        return total

    def _created(self, key: str, value: bytes, deadline: Deadline) -> bool:
        """Set a key unless it is set; whether this call did."""
        return self._ask(partial(self._create, key, value), f"set {key!r}", deadline)

    def _create(self, key: str, value: bytes) -> bool:
        try:
            self._client.key_value_set_bytes(key, value, allow_overwrite=False)
        except RuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True


def torch_store(host: str, port: int, serve: bool, deadline: Deadline) -> TorchStore:
    """Open torch's own TCP store at `MASTER_ADDR` and `MASTER_PORT`.

    Args:
        host, port: value of these variables.
        serve: whether this process serves it. `init_process_group` may share the server, before or after.
        deadline: for the connection.

    Raises:
        ConfigError: torch is not installed.
        StoreError: the address cannot be reached or served.
    """
    try:
        distributed = importlib.import_module("torch.distributed")
    except ImportError:
        raise ConfigError(
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT select torch's store for the rendezvous, but torch is not "
            "installed here; set XVCOMM_STORE=tcp://host:port and XVCOMM_SECRET on all ranks instead"
        ) from None
    left = deadline.left()
    timeout = _LONGEST if math.isinf(left) else timedelta(seconds=max(left, 1.0))
    try:
        store = distributed.TCPStore(
            host, port, is_master=serve, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        verb = "serve" if serve else "reach"
        raise StoreError(f"cannot {verb} torch's store at MASTER_ADDR={host} MASTER_PORT={port}: {first}") from None
    return TorchStore(store)


def world() -> Any:
    """Return `mpi4py.MPI.COMM_WORLD`; initializes MPI.

    Raises:
        ConfigError: mpi4py is not installed, or cannot be loaded.
    """
    try:
        return importlib.import_module("mpi4py.MPI").COMM_WORLD
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"the ranks were started by mpirun but mpi4py cannot be loaded ({error}); `pip install xvcomm[mpi]`, or set "
            "XVCOMM_STORE=tcp://host:port and XVCOMM_SECRET on all ranks"
        ) from None


def mpi_store(comm: Any, host: str, deadline: Deadline, secret: str | None = None) -> TcpStore:
    """Open a TCP store that rank 0 of an mpi4py communicator serves; all its ranks must call this.

    Args:
        comm: broadcasts the address, and a new secret if none is set.
        host: name or address by which the others reach rank 0's host; read on rank 0 only.
        deadline: for all of it.
        secret: XVCOMM_SECRET.

    Raises:
        ConfigError: XVCOMM_SECRET is set on only one of this rank and rank 0.
        DeadlineExceeded: rank 0 did not call this in time.
        StoreError: rank 0 cannot be reached.
    """
    note = bytearray(_NOTE_BYTES)
    served = None
    if comm.Get_rank() == 0:
        served, invitation = invite(host, deadline, secret=secret)
        text = invitation.pack()
        note[: len(text)] = text
    request = comm.Ibcast(note, root=0)
    if poll(lambda: request.Test() or None, deadline) is None:
        # A broadcast cannot be cancelled: MPI may still write into the note, which must stay allocated.
        _unfinished.append((request, note))
        raise DeadlineExceeded("rank 0 has not joined: it did not send the store's address through MPI in time")
    return served or Invitation.unpack(bytes(note).rstrip(b"\0")).accept(deadline, secret)
