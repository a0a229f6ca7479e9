"""The client of a TCP store."""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial

from xvcomm.abc.store import ANSWER_SECONDS, Add, Decide, DecideAtEnd, Notices, Post, Set, Step, Store, listed
from xvcomm.errors import AuthenticationError, DeadlineExceeded, ResourceError, StoreError
from xvcomm.rendezvous.store import protocol
from xvcomm.rendezvous.store.connection import Connection, NotYet, dial
from xvcomm.rendezvous.store.server import TcpServer
from xvcomm.rendezvous.store.standby import TcpStandby, ended, place
from xvcomm.system import limits
from xvcomm.system.threads import Daemon
from xvcomm.types.deadline import NEVER, Deadline

__all__ = ["TcpServer", "TcpStore"]

_REPLY_SECONDS = 1.0
"""Seconds after the deadline for which a reply may still arrive."""
_LEAVE_SECONDS = 2.0
_CONNECTING = "connect to the store"
_FAR_SECONDS = 0.03
"""A store to which a connection takes longer gets a second one ahead of need."""
_FIRST_RETRY, _LAST_RETRY = 0.002, 0.1


class TcpStore(Store):
    """A store served by a `TcpServer`, on this host or another.

    Each concurrent call uses its own connection, so a thread that waits does not block others.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: str,
        deadline: Deadline,
        *,
        epoch: int | None = 0,
        on_close: Callable[[], None] | None = None,
        patient: bool = True,
    ) -> None:
        """Connect, retrying until the deadline, because the server may start later.

        Args:
            secret: of the job.
            deadline: for the first connection.
            epoch: see `TcpServer`; None to use whatever it serves.
            on_close: called once, after this store has closed its connections.
            patient: whether to retry where nothing listens.

        Raises:
            StoreError: no server answers, or it is not a store of this version.
            AuthenticationError: the server has a different secret.
        """
        self._host, self._port, self._secret, self._epoch = host, port, secret, epoch
        self._on_close = on_close
        self._lock = threading.Lock()
        self._closed = self._given_up = False
        self._links: set[Connection] = set()
        self._idle: list[Connection] = [self._connect(deadline, patient=patient)]
        if self._idle[0].took > _FAR_SECONDS:
            with contextlib.suppress(ResourceError):  # then it is made when it is needed
                Daemon("xvcomm-dial", partial(self._dial_ahead, deadline)).start()

    def __str__(self) -> str:
        return f"the store at {self._host}:{self._port}"

    def set(self, key: str, value: bytes, deadline: Deadline = NEVER) -> None:
        self._take_step(Set(key, value), deadline, f"set {key!r}")

    def get(self, key: str, deadline: Deadline) -> bytes:
        return self._complete([key], deadline)[0]

    def add(self, key: str, amount: int, deadline: Deadline = NEVER) -> int:
        return int(self._take_step(Add(key, amount), deadline, f"add to {key!r}"))

    def decide(self, key: str, value: bytes, deadline: Deadline = NEVER) -> bytes:
        return self._take_step(Decide(key, value), deadline, f"decide {key!r}")

    def exchange(
        self, steps: Sequence[Step], keys: Sequence[str] = (), deadline: Deadline = NEVER, patience: float = math.inf
    ) -> tuple[list[bytes], list[bytes | None]]:
        names = listed([repr(key) for key in (*(step.key for step in steps), *keys)])
        return self._exchange(steps, keys, deadline, patience, f"a request for {names}" if steps else f"get {names}")

    def notices(
        self, place: str, will: bytes, silence: bytes = b"", patience: float = math.inf, deadline: Deadline = NEVER
    ) -> Notices:
        """See `Store.notices`; uses a connection of its own."""
        deadline = Deadline.after(deadline.sooner(ANSWER_SECONDS))
        link = self._take(deadline, "follow notices")
        link.outlast_the_network()
        if silence:
            link.listen(patience)
        following = _TcpNotices(self, partial(self._ask, link), link, place)
        request = protocol.Will(place, will, following.left, silence, patience)
        self._ask(link, protocol.encode(request), deadline, "leave a will")
        return following

    def decide_at_end(self, key: str, value: bytes) -> bool:
        """See `Store.decide_at_end`; the store also decides if a later request fails on the connection that this one uses."""
        return bool(self._take_step(DecideAtEnd(key, value), NEVER, f"prepare {key!r}"))

    def posted(self, place: str, read: int) -> list[bytes]:
        reply = self._call(protocol.Read(place, read + 1, 0), Deadline.after(ANSWER_SECONDS), "read notices")
        assert isinstance(reply, protocol.Values)
        return reply.values

    def ended(self, addresses: Collection[str]) -> list[str]:
        return ended(addresses)

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True
            links = list(self._links)
        for link in links:
            link.hang_up()

    def unheard(self) -> float:
        with self._lock:
            links = list(self._links)
        return max((link.unheard() for link in links), default=0.0)

    @property
    def served_here(self) -> bool:
        return self._on_close is not None

    def standby(self, ports: Sequence[int]) -> TcpStandby | None:
        link = self._take(Deadline.after(ANSWER_SECONDS), "prepare a successor")
        host = link.local
        self._give_back(link)
        return TcpStandby.open(host, ports, self._secret)

    def successor(self, address: str, deadline: Deadline) -> TcpStore:
        host, port = place(address)
        try:
            return TcpStore(host, port, self._secret, deadline, patient=False)
        except StoreError as error:
            if deadline.expired():
                raise DeadlineExceeded(f"no store is served yet at {host}:{port}") from error
            raise

    def close(self) -> None:
        """Close all connections; calls in progress in other threads raise StoreError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links = list(self._links)
            idle, self._idle = self._idle, []
        for link in links:
            link.hang_up()
        for link in idle:
            self._discard(link)
        if self._on_close is not None:
            self._on_close()

    def _take_step(self, step: Step, deadline: Deadline, what: str) -> bytes:
        (given,), _ = self._exchange([step], (), deadline, 0.0, what)
        return given

    def _exchange(
        self, steps: Sequence[Step], keys: Sequence[str], deadline: Deadline, patience: float, what: str
    ) -> tuple[list[bytes], list[bytes | None]]:
        until = Deadline.after(deadline.sooner(ANSWER_SECONDS + (patience if keys else 0.0)))
        seconds = _seconds(Deadline.after(deadline.sooner(patience)))
        reply = self._call(protocol.Exchange(list(steps), list(keys), seconds), until, what)
        assert isinstance(reply, protocol.Exchanged)
        return reply.done, reply.found

    def _call(self, request: protocol.Request, deadline: Deadline, what: str) -> protocol.Reply:
        payload = protocol.encode(request)
        if len(payload) + protocol.CODE > protocol.FRAME_LIMIT:
            raise StoreError(
                f"{what}: {len(payload)} bytes are too many; a message of the store may have {protocol.FRAME_LIMIT}"
            )
        until = Deadline(deadline.at + _REPLY_SECONDS)
        link = self._take(until, what)
        reply = self._ask(link, payload, until, what)
        self._give_back(link)
        if isinstance(reply, protocol.Failed):
            raise StoreError(f"{what}: {reply.reason}")
        return reply

    def _ask(self, link: Connection, payload: bytes, until: Deadline, what: str) -> protocol.Reply:
        """Send an encoded request on a connection and return the reply; closes a connection that fails."""
        try:
            return link.ask(payload, until)
        except (protocol.Forged, protocol.Malformed):
            self._discard(link)
            raise AuthenticationError(
                f"the answer to {what} from {self} was altered, repeated or reordered on "
                "the way: something between this host and the store changes its messages; check XVCOMM_STORE and the network"
            ) from None
        except TimeoutError:
            self._discard(link)
            raise silent(self, what) from None
        except OSError as error:
            self._discard(link)
            raise StoreError(
                f"{self} was lost during {what} ({error}): the process that serves "
                "it (rank 0, or the launcher) has ended, or this store was closed"
            ) from None
        except BaseException:
            self._discard(link)
            raise

    def _take(self, deadline: Deadline, what: str) -> Connection:
        with self._lock:
            if self._closed:
                raise StoreError(f"{self} was closed by this process")
            if self._given_up:
                raise StoreError(f"the host of {self} cannot be reached")
            if self._idle:
                return self._idle.pop()
        try:
            return self._connect(deadline, patient=False)
        except StoreError:
            if deadline.expired():
                raise DeadlineExceeded(
                    f"{self} took no connection for {what} in time: the process that serves it "
                    "(rank 0, or the launcher) is stopped or out of file descriptors, or its host is unreachable"
                ) from None
            raise

    def _give_back(self, link: Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(link)
                return
        self._discard(link)

    def _discard(self, link: Connection) -> None:
        with self._lock:
            self._links.discard(link)
        link.hang_up()
        link.close()

    def _dial_ahead(self, deadline: Deadline) -> None:
        """Make a connection for `notices`, which keeps one for itself."""
        with contextlib.suppress(StoreError, AuthenticationError, ResourceError):
            self._give_back(self._connect(deadline, patient=False))

    def _connect(self, deadline: Deadline, *, patient: bool) -> Connection:
        """Open another connection; with `patient`, retry while no server answers."""
        pause = _FIRST_RETRY
        while True:
            try:
                link = dial(self._host, self._port, self._secret, self._epoch, deadline)
                break
            except (OSError, NotYet) as error:
                if isinstance(error, (AuthenticationError, StoreError)):
                    raise
                refusal = limits.reached(error, _CONNECTING) if isinstance(error, OSError) else None
                if refusal is not None:
                    raise refusal from error
                reason = str(error)
            if not patient or deadline.expired():
                raise StoreError(
                    f"no store answers at {self._host}:{self._port} ({reason}); is the process that serves it (rank 0, "
                    "or the launcher) running, and is the address right (XVCOMM_STORE)?"
                )
            time.sleep(deadline.sooner(pause))
            pause = min(pause * 1.5, _LAST_RETRY)
        with self._lock:
            if not self._closed:
                self._links.add(link)
                return link
        link.close()
        raise StoreError(f"{self} was closed by this process")


class _TcpNotices(Notices):
    """Notices under the keys `place/1`, `place/2` and so on; `place` counts them.

    Attributes:
        left: key that cancels this process's will.
    """

    def __init__(
        self, store: TcpStore, ask: Callable[[bytes, Deadline, str], protocol.Reply], link: Connection, place: str
    ) -> None:
        self.left = f"{place}/left/{secrets.token_hex(8)}"
        self._store, self._ask, self._link, self._place = store, ask, link, place
        self._read, self._unread = 0, deque[bytes]()

    def next(self) -> bytes:
        if not self._unread:
            reply = self._ask(protocol.encode(protocol.Read(self._place, self._read + 1, None)), NEVER, "read notices")
            assert isinstance(reply, protocol.Values)
            self._unread.extend(reply.values)
            self._read += len(reply.values)
        return self._unread.popleft()

    def post(self, notice: bytes, deadline: Deadline) -> None:
        self._store.exchange([Post(self._place, notice)], deadline=deadline)

    def silence(self) -> float:
        return max(self._link.silence(), self._store.unheard())

    def give_up(self) -> None:
        self._store.give_up()

    def leave(self) -> None:
        try:
            self._store.set(self.left, b"", Deadline.after(_LEAVE_SECONDS))
        except (StoreError, DeadlineExceeded):
            pass  # nobody is left to read a will
        self._link.hang_up()


def _seconds(deadline: Deadline) -> float | None:
    return None if math.isinf(deadline.at) else deadline.left()


def silent(store: Store, what: str) -> DeadlineExceeded:
    """The error for a store that did not answer."""
    return DeadlineExceeded(
        f"{store} did not answer {what} in time: the process that serves it (rank 0, or the launcher) is stopped, or its "
        "host is unreachable"
    )
