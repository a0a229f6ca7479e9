"""The server of a TCP store: one thread that holds the values and the clients that wait for a key."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from typing import cast

from xvcomm.rendezvous.store import protocol
from xvcomm.rendezvous.store.listening import SERVING, close, listen
from xvcomm.system import forking, heartbeat, limits, processes
from xvcomm.system.strangers import Strangers
from xvcomm.system.threads import Daemon

CLOSE_GRACE = 10.0
"""Seconds for which a process that closes continues to serve ranks that have not closed."""
_LOOP_FILES, _FIRST_CLIENT_FILES = 3, 2
"""File descriptors that an event loop opens, and that a client in this process adds: both ends of its connection."""
_ACCEPT_PAUSE = 0.1
_STILL_SECONDS, _LOOK_SECONDS = 1.0, 0.1
"""How long the server waits for clients that are all stopped, and how often it checks whether they are."""
_LISTEN_SECONDS = 0.5
"""How often the server checks whether the hosts of clients still answer."""
_UNKNOWN = "unknown"


class TcpServer:
    """Serves a store from a thread of this process until it is closed.

    Attributes:
        host: as given.
        port: the port in use, also if 0 was requested.
        address: `tcp://host:port`, as in `XVCOMM_STORE`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: str,
        *,
        epoch: int | None = None,
        listeners: list[socket.socket] | None = None,
    ) -> None:
        """Bind the port and start to serve.

        Args:
            host: the server listens on the addresses of this name alone, on loopback for this host only. If it resolves to
                loopback or to another host's address here, which others may see differently, it listens on all interfaces.
            port: 0 for any free port.
            epoch: serve only clients with this number; None serves all. Ranks that meet repeatedly at a fixed address count up,
                so that they do not join a server that is about to close.
            listeners: sockets that listen at `host` already; `port` is not read then.

        Raises:
            StoreError: the port is in use or not permitted.
            ConfigError: the secret is empty.
            ResourceError: too many files are open.
        """
        protocol.need_secret(secret)
        listeners = listeners or listen(host, port)
        self.host = host
        self.port: int = listeners[0].getsockname()[1]
        self.address = f"tcp://[{host}]:{self.port}" if ":" in host else f"tcp://{host}:{self.port}"
        self._clients = _Clients(secret, epoch)
        self._listeners = listeners
        self._grace = 0.0
        self._open = True
        self._stop = asyncio.Event()
        self._closing = threading.Lock()
        try:
            with limits.told(SERVING):
                _need(listeners[0], _LOOP_FILES + _FIRST_CLIENT_FILES)
                self._loop = asyncio.new_event_loop()
        except BaseException:
            close(listeners)
            raise
        self._thread = Daemon("xvcomm-store", self._run)
        forking.register(self)
        self._thread.start()

    def close(self, grace: float = 0.0) -> None:
        """Stop serving and free the port; idempotent.

        Args:
            grace: seconds to continue serving while clients are connected; shorter if all of them are stopped processes of this
                host, or on hosts that do not answer.
        """
        with self._closing:
            if self._thread.is_alive():
                self._grace = grace
                self._loop.call_soon_threadsafe(self._stop.set)
                self._thread.join()

    def after_fork(self) -> None:
        """Stop serving in the child, so that clients notice the parent's death, and the port is free after it."""
        self._closing = threading.Lock()  # the copied lock may be held by a thread that the child does not have
        for descriptor in (
            *(listener.fileno() for listener in self._listeners),
            *(connection.descriptor() for connection in self._clients.connections),
        ):
            if descriptor >= 0:
                forking.leave_to_parent(descriptor)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        accepting = [self._loop.create_task(self._accept(listener)) for listener in self._listeners]
        await self._stop.wait()
        await self._clients.drain(self._grace)
        self._open = False
        for listener in self._listeners:
            _shutdown(listener)
        await asyncio.gather(*accepting)
        close(self._listeners)
        for connection in list(self._clients.connections):
            connection.end()
        await asyncio.sleep(0)

    async def _accept(self, listener: socket.socket) -> None:
        """Accept clients until the listener is shut down. asyncio's server may lose clients that connect during its shutdown."""
        listener.setblocking(False)
        while self._open:
            try:
                await self._clients.strangers.room()
                sock, _ = await self._loop.sock_accept(listener)
                await self._loop.connect_accepted_socket(lambda: _Connection(self._clients), sock)
            except OSError:
                # Shut down, or temporarily out of file descriptors.
                await asyncio.sleep(_ACCEPT_PAUSE if self._open else 0)


class _Clients:
    """Values and clients of the server, including the clients that wait for a key.

    Attributes:
        strangers: connections that have not proved the secret.
        authenticated: number of connections that have proved it.
    """

    def __init__(self, secret: str, epoch: int | None) -> None:
        self.secret = secret
        self.epoch = epoch
        self.values: dict[str, bytes] = {}
        self.waiting: dict[str, set[_Connection]] = {}
        self.connections: set[_Connection] = set()
        self.strangers: Strangers[_Connection] = Strangers(_Connection.end)
        self.authenticated = 0
        self.empty = asyncio.Event()
        self.empty.set()
        self._listening: set[_Connection] = set()

    async def drain(self, grace: float) -> None:
        """Wait until all clients have left, for at most `grace` seconds, or until the others have been stopped, or have not
        answered, for a while.
        """
        loop = asyncio.get_running_loop()
        end, moved = loop.time() + grace, loop.time()
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
        self.values[key] = value
        for connection in self.waiting.pop(key, ()):
            connection.arrived(key)

    def decide(self, key: str, value: bytes) -> bytes:
        if key not in self.values:
            self.put(key, value)
        return self.values[key]

    def add(self, key: str, amount: int) -> protocol.Reply:
        try:
            total = int(self.values.get(key, b"0")) + amount
        except ValueError:
            return protocol.Failed(f"the value of {key!r} is not an integer; add() needs a key that only add() writes")
        if not -(1 << 63) <= total < 1 << 63:
            return protocol.Failed(f"the sum of {key!r} exceeds 64 bits")
        self.put(key, b"%d" % total)
        return protocol.Total(total)

    def execute(self, will: protocol.Will, notice: bytes) -> None:
        """Post what a client left for the case that its connection is closed, or that its host does not answer."""
        if will.unless not in self.values and isinstance(number := self.add(will.key, 1), protocol.Total):
            self.put(f"{will.key}/{number.total}", notice)

    def listen_to(self, connection: _Connection) -> None:
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


class _Connection(asyncio.Protocol):
    """One client. It sends a request and waits for the reply before it sends the next."""

    def __init__(self, clients: _Clients) -> None:
        self._clients = clients
        self._inbox = bytearray()
        self._nonce = secrets.token_bytes(protocol.NONCE)
        self._trusted = False
        self.process = ""  # process id that the client sent; empty until it has proved the secret
        self._theirs: protocol.Seal | None = None
        self._ours: protocol.Seal | None = None
        self._missing: set[str] = set()
        self._wanted: str | None = None
        self._will: protocol.Will | None = None
        self._at_end: list[protocol.DecideAtEnd] = []
        self._heard = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(protocol.HANDSHAKE_SECONDS, self.end)
        self._clients.connections.add(self)
        self._clients.strangers.enter(self)
        self._send(protocol.Challenge(self._nonce))

    def data_received(self, data: bytes) -> None:
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
        _shutdown(self._transport.get_extra_info("socket"))
        self._transport.abort()

    def arrived(self, key: str) -> None:
        """A key that this client waits for has been set."""
        self._missing.discard(key)
        if not self._missing:
            self._grant()

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
            case protocol.Set(key, value):
                self._clients.put(key, value)
                self._send(protocol.Done())
            case protocol.Add(key, amount):
                self._send(self._clients.add(key, amount))
            case protocol.Decide(key, value):
                self._send(protocol.Value(self._clients.decide(key, value)))
            case protocol.DecideAtEnd():
                self._at_end = [r for r in self._at_end if r.key not in self._clients.values] + [request]
                self._send(protocol.Done())
            case protocol.Get(key, seconds):
                self._park([key], key, seconds)
            case protocol.Wait(keys, seconds):
                self._park(keys, None, seconds)
            case protocol.Will():
                self._will = request
                if request.silence:
                    heartbeat.begin(self._socket(), request.patience)
                    self._clients.listen_to(self)
                self._send(protocol.Done())

    def _park(self, keys: list[str], wanted: str | None, seconds: float | None) -> None:
        self._wanted = wanted
        self._missing = {key for key in keys if key not in self._clients.values}
        if not self._missing:
            self._grant()
        elif seconds is not None and seconds <= 0:
            self._expire()
        else:
            for key in self._missing:
                self._clients.waiting.setdefault(key, set()).add(self)
            self._timer = None if seconds is None else self._loop.call_later(seconds, self._expire)

    def _grant(self) -> None:
        self._cancel_timer()
        self._send(protocol.Done() if self._wanted is None else protocol.Value(self._clients.values[self._wanted]))

    def _expire(self) -> None:
        missing = sorted(self._missing)
        self._unpark()
        self._send(protocol.Missing(missing))

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


class _Rude(Exception):
    """The client violates the protocol."""


def _need(sock: socket.socket, files: int) -> None:
    """Raise OSError unless this process can open this many files: an event loop that fails half-way complains when freed."""
    copies: list[socket.socket] = []
    try:
        for _ in range(files):
            copies.append(sock.dup())
    finally:
        for copy in copies:
            copy.close()


def _shutdown(sock: socket.socket) -> None:
    """Shut down a socket for all its copies: one in a forked child would keep the other side waiting."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
