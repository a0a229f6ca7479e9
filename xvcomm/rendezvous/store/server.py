"""The server of a TCP store: one thread that accepts clients, and serves them until it is closed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Sequence

from xvcomm.rendezvous.store import protocol
from xvcomm.rendezvous.store.clients import Clients, Connection, shut_down
from xvcomm.rendezvous.store.listening import SERVING, close, listen
from xvcomm.system import forking, limits
from xvcomm.system.threads import Daemon

CLOSE_GRACE = 10.0
"""Seconds for which a process that closes continues to serve ranks that have not closed."""
_LOOP_FILES, _FIRST_CLIENT_FILES = 3, 2
"""File descriptors that an event loop opens, and that a client in this process adds: both ends of its connection."""
_ACCEPT_PAUSE = 0.1


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
        accepted: Sequence[socket.socket] = (),
    ) -> None:
        """Bind the port and start to serve.

        Args:
            host: the server listens on the addresses of this name alone, on loopback for this host only. If it resolves to
                loopback or to another host's address here, which others may see differently, it listens on all interfaces.
            port: 0 for any free port.
            epoch: serve only clients with this number; None serves all. Ranks that meet repeatedly at a fixed address count up,
                so that they do not join a server that is about to close.
            listeners: sockets that listen at `host` already; `port` is not read then.
            accepted: connections of clients that these have accepted already.

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
        self._clients = Clients(secret, epoch)
        self._listeners, self._accepted = listeners, accepted
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
        for sock in self._accepted:
            with contextlib.suppress(OSError):  # the client is gone
                await self._connect(sock)
        accepting = [self._loop.create_task(self._accept(listener)) for listener in self._listeners]
        await self._stop.wait()
        end = self._loop.time() + self._grace
        await self._clients.drain(end)
        self._open = False
        for listener in self._listeners:
            shut_down(listener)
        await asyncio.gather(*accepting)
        close(self._listeners)
        await self._clients.drain(end)  # those that have come meanwhile: a pause of `_accept` takes a moment
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
                await self._connect(sock)
            except OSError:
                # Shut down, or temporarily out of file descriptors.
                await asyncio.sleep(_ACCEPT_PAUSE if self._open else 0)

    async def _connect(self, sock: socket.socket) -> None:
        await self._loop.connect_accepted_socket(lambda: Connection(self._clients), sock)


def _need(sock: socket.socket, files: int) -> None:
    """Raise OSError unless this process can open this many files: an event loop that fails half-way complains when freed."""
    copies: list[socket.socket] = []
    try:
        for _ in range(files):
            copies.append(sock.dup())
    finally:
        for copy in copies:
            copy.close()
