"""What the server of a TCP store holds: the values, and its clients, some of which wait for a key."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable
from functools import partial
from typing import cast

from xvcomm.abc.store import Add, Decide, DecideAtEnd, Look, Post, Set, Step
from xvcomm.rendezvous.store import protocol
from xvcomm.system import heartbeat, processes
from xvcomm.system.strangers import Strangers

_STILL_SECONDS, _LOOK_SECONDS = 1.0, 0.1
"""How long the server waits for clients that are all stopped, and how often it checks whether they are."""
_LISTEN_SECONDS = 0.5
"""How often the server checks whether the hosts of clients still answer."""
_READ_BYTES = 1 << 20
"""After so many bytes one answer gives no further values, though more are set."""
_UNKNOWN = "unknown"


class Clients:
    """Values and clients of the server, including the clients that wait for a key.

    Attributes:
        strangers: connections that have not proved the secret.
        authenticated: number of connections that have proved it.
    """

    def __init__(self, secret: str, epoch: int | None) -> None:
        self.secret = secret
        self.epoch = epoch
        self.values: dict[str, bytes] = {}
        self.waiting: dict[str, set[Connection]] = {}
        self.connections: set[Connection] = set()
        self.strangers: Strangers[Connection] = Strangers(Connection.end)
        self.authenticated = 0
        self.empty = asyncio.Event()
        self.empty.set()
        self._listening: set[Connection] = set()

    async def drain(self, end: float) -> None:
        """Wait until all clients have left, or the event loop's time is `end`, or until the others have been stopped, or have not
        answered, for a while.
        """
        loop = asyncio.get_running_loop()
        moved = loop.time()
        while self.authenticated and loop.time() < min(end, moved + _STILL_SECONDS):
            try:
                async with asyncio.timeout(min(_LOOK_SECONDS, end - loop.time())):
                    await self.empty.wait()
            except TimeoutError:
                silent = {c.process for c in self.connections if c.silent()}
                if not all(c.process in silent or processes.stopped(c.process) for c in self.connections if c.process):
                    moved = loop.time()

    def enter(self) -> None:
        """Count a client that has proved the secret."""
        self.authenticated += 1
        self.empty.clear()

    def leave(self) -> None:
        """Remove such a client from the count."""
        self.authenticated -= 1
        if not self.authenticated:
            self.empty.set()

    def put(self, key: str, value: bytes) -> None:
        """Set a key, and answer the clients that wait for it."""
        self.values[key] = value
        for connection in self.waiting.pop(key, ()):
            connection.arrived(key)

    def decide(self, key: str, value: bytes) -> bytes:
        """See `Store.decide`."""
        if key not in self.values:
            self.put(key, value)
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        """See `Store.add`.

        Raises:
            Impossible: what is stored there is no integer, or the sum is too large.
        """
        try:
            total = int(self.values.get(key, b"0")) + amount
        except ValueError:
            raise Impossible(
                f"the value of {key!r} is not an integer; add() needs a key that only add() writes"
            ) from None
        if not -(1 << 63) <= total < 1 << 63:
            raise Impossible(f"the sum of {key!r} exceeds 64 bits")
        self.put(key, b"%d" % total)
        return total

    def post(self, place: str, value: bytes) -> int:
        """See `Post`; raises what `add` does."""
        number = self.add(place, 1)
        self.put(f"{place}/{number}", value)
        return number

    def found(self, done: list[bytes], keys: list[str]) -> protocol.Exchanged:
        """The answer to an exchange whose steps have been carried out."""
        return protocol.Exchanged(done, [self.values.get(key) for key in keys])

    def read(self, place: str, first: int) -> protocol.Values:
        """The answer to `protocol.Read`."""
        found, size = list[bytes](), 0
        while size < _READ_BYTES and (value := self.values.get(f"{place}/{first + len(found)}")) is not None:
            found.append(value)
            size += len(value)
        return protocol.Values(found)

    def execute(self, will: protocol.Will, notice: bytes) -> None:
        """Post what a client left for the case that its connection is closed, or that its host does not answer."""
        if will.unless not in self.values:
            with contextlib.suppress(Impossible):
                self.post(will.key, notice)

    def listen_to(self, connection: Connection) -> None:
        """Look at a connection regularly, until it is closed."""
        if not self._listening:
            self._listen_later()
        self._listening.add(connection)

    def _listen_later(self) -> None:
        asyncio.get_running_loop().call_later(_LISTEN_SECONDS, self._listen)

    def _listen(self) -> None:
        self._listening &= self.connections
        for connection in self._listening:
            connection.listen()
        if self._listening:
            self._listen_later()


class Connection(asyncio.Protocol):
    """One client. It sends a request and waits for the reply before it sends the next."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._inbox = bytearray()
        self._nonce = secrets.token_bytes(protocol.NONCE)
        self._trusted = False
        self.process = ""  # process id that the client sent; empty until it has proved the secret
        self._theirs: protocol.Seal | None = None
        self._ours: protocol.Seal | None = None
        self._missing: set[str] = set()
        self._answer: Callable[[], protocol.Reply] = protocol.Done
        self._will: protocol.Will | None = None
        self._at_end: list[DecideAtEnd] = []
        self._heard = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask the client for its proof."""
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(protocol.HANDSHAKE_SECONDS, self.end)
        self._clients.connections.add(self)
        self._clients.strangers.enter(self)
        self._send(protocol.Challenge(self._nonce))

    def data_received(self, data: bytes) -> None:
        """Execute a request, once all of it is there; end the connection of a client that violates the protocol."""
        self._inbox += data
        try:
            if self._missing:
                raise _Rude
            if (payload := self._next()) is not None:
                if self._theirs is not None:
                    self._handle(protocol.decode_request(self._theirs.open(payload)))
                else:
                    self._admit(protocol.decode_answer(payload))
        except (protocol.Malformed, protocol.Forged, _Rude):
            self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client, and do what it has left for its end."""
        self._unpark()
        self._inbox.clear()
        self._clients.connections.discard(self)
        self._clients.strangers.leave(self)
        if self._trusted:
            self._trusted = False
            self._clients.leave()
        # A process that ends closes its connections. A failure of the network proves nothing.
        if exc is None or isinstance(exc, ConnectionError):
            if self._will is not None:
                self._clients.execute(self._will, self._will.value)
            for request in self._at_end:
                self._clients.decide(request.key, request.value)

    def descriptor(self) -> int:
        """File descriptor of the socket; negative once it is closed."""
        return self._socket().fileno()

    def silent(self) -> bool:
        """Whether the client's host does not answer, as far as the client wants that to be known."""
        return (
            self._will is not None
            and bool(self._will.silence)
            and heartbeat.silence(self._socket()) > self._will.patience
        )

    def listen(self) -> None:
        """Post what the client left for the case that its host does not answer, once each time."""
        heard = not self.silent()
        if self._heard and not heard and self._will is not None:
            self._clients.execute(self._will, self._will.silence)
        self._heard = heard

    def _socket(self) -> socket.socket:
        found: socket.socket = self._transport.get_extra_info("socket")
        return found

    def end(self) -> None:
        """Close the connection, including copies of its socket in forked processes."""
        self._clients.strangers.leave(self)
        self._will = None
        self._at_end.clear()
        shut_down(self._transport.get_extra_info("socket"))
        self._transport.abort()

    def arrived(self, key: str) -> None:
        """A key that this client waits for has been set."""
        self._missing.discard(key)
        if not self._missing:
            self._reply()

    def _next(self) -> bytes | None:
        if len(self._inbox) < protocol.HEADER:
            return None
        end = protocol.HEADER + int.from_bytes(self._inbox[: protocol.HEADER], "big")
        if end > protocol.HEADER + (protocol.FRAME_LIMIT if self._trusted else protocol.HELLO_LIMIT):
            raise _Rude
        if len(self._inbox) < end:
            return None
        payload = bytes(self._inbox[protocol.HEADER : end])
        del self._inbox[:end]
        if self._inbox:
            raise _Rude
        return payload

    def _send(self, message: protocol.Message) -> None:
        self._transport.write(
            protocol.frame(message) if self._ours is None else self._ours.frame(protocol.encode(message))
        )

    def _admit(self, answer: protocol.Answer) -> None:
        clients = self._clients
        if len(answer.nonce) != protocol.NONCE:
            raise _Rude
        if not protocol.proven(clients.secret, "client", self._nonce, answer.nonce, answer.epoch, answer.proof):
            self._refuse(protocol.Refused("secret"))
        elif None not in (clients.epoch, answer.epoch) and clients.epoch != answer.epoch:
            self._refuse(protocol.Refused("epoch"))
        else:
            self._cancel_timer()
            self._trusted, self.process = True, answer.process or _UNKNOWN
            clients.strangers.leave(self)
            clients.enter()
            self._send(
                protocol.Welcome(protocol.prove(clients.secret, "server", answer.nonce, self._nonce, answer.epoch))
            )
            self._theirs = protocol.Seal(clients.secret, "client", self._nonce, answer.nonce)
            self._ours = protocol.Seal(clients.secret, "server", self._nonce, answer.nonce)

    def _refuse(self, refusal: protocol.Refused) -> None:
        self._send(refusal)
        self._transport.close()

    def _handle(self, request: protocol.Request) -> None:
        match request:
            case protocol.Exchange(steps, keys, seconds):
                try:
                    done = [self._carry_out(step) for step in steps]
                except Impossible as error:
                    self._send(protocol.Failed(str(error)))
                else:
                    self._park(keys, partial(self._clients.found, done, keys), seconds)
            case protocol.Read(place, first, seconds):
                self._park([f"{place}/{first}"], partial(self._clients.read, place, first), seconds)
            case protocol.Will():
                self._will = request
                if request.silence:
                    heartbeat.begin(self._socket(), request.patience)
                    self._clients.listen_to(self)
                self._send(protocol.Done())

    def _carry_out(self, step: Step) -> bytes:
        clients = self._clients
        match step:
            case Set(key, value):
                clients.put(key, value)
            case Look(key):
                return clients.values.get(key, b"")
            case Add(key, amount):
                return b"%d" % clients.add(key, amount)
            case Decide(key, value):
                return clients.decide(key, value)
            case DecideAtEnd():
                self._at_end = [each for each in self._at_end if each.key not in clients.values] + [step]
                return b"noticed"
            case Post(key, value):
                return b"%d" % clients.post(key, value)
        return b""

    def _park(self, keys: list[str], answer: Callable[[], protocol.Reply], seconds: float | None) -> None:
        """Answer once all keys are set, or after so many seconds."""
        self._answer = answer
        self._missing = {key for key in keys if key not in self._clients.values}
        if not self._missing or (seconds is not None and seconds <= 0):
            self._reply()
            return
        for key in self._missing:
            self._clients.waiting.setdefault(key, set()).add(self)
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._reply)

    def _reply(self) -> None:
        self._unpark()
        self._send(self._answer())

    def _unpark(self) -> None:
        self._cancel_timer()
        for key in self._missing:
            others = self._clients.waiting.get(key, set())
            others.discard(self)
            if not others:
                self._clients.waiting.pop(key, None)
        self._missing = set()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Impossible(Exception):
    """A request cannot be carried out; says why."""


class _Rude(Exception):
    """The client violates the protocol."""


def shut_down(sock: socket.socket) -> None:
    """Shut down a socket for all its copies: one in a forked child would keep the other side waiting."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
