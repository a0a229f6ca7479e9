"""A port that a process keeps, so that it can serve the successor of the job's store."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
import time
from collections.abc import Collection, Sequence
from ipaddress import ip_address

from xvcomm.abc.store import Standby
from xvcomm.errors import ResourceError, StoreError
from xvcomm.rendezvous.store import listening
from xvcomm.rendezvous.store.server import CLOSE_GRACE, TcpServer
from xvcomm.system import forking

_ANSWER_SECONDS = 0.3
_AT_ONCE = 128
"""How many addresses are tried at once, and how many processes may ask for a successor that is not served."""


def place(address: str) -> tuple[str, int]:
    """Host and port of a standby's address."""
    host, port = address.split()
    return host, int(port)


def ended(addresses: Collection[str]) -> list[str]:
    """See `Store.ended`."""
    every = list(addresses)
    return [found for begin in range(0, len(every), _AT_ONCE) for found in _refusing(every[begin : begin + _AT_ONCE])]


def _refusing(addresses: Sequence[str]) -> list[str]:
    """The addresses that refuse a connection."""
    found: list[str] = []
    poll, until = select.poll(), time.monotonic() + _ANSWER_SECONDS
    with contextlib.ExitStack() as opened:
        tried: dict[int, tuple[str, socket.socket]] = {}
        for address in addresses:
            host, port = place(address)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sock = opened.enter_context(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            if sock.connect_ex((host, port)) == errno.ECONNREFUSED:
                found.append(address)
            else:
                tried[sock.fileno()] = address, sock
                poll.register(sock, select.POLLOUT)
        while tried and (left := until - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(1000 * left):
                address, sock = tried.pop(descriptor)
                poll.unregister(descriptor)
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED:
                    found.append(address)
    return found


class TcpStandby(Standby):
    """Listens from the start, so that its address is known to all, and answers nothing before it serves.

    A process that connects before waits, and learns at once of the end of this one. One that only looks whether this one has
    ended closes its connection.
    """

    def __init__(self, listeners: list[socket.socket], host: str, secret: str) -> None:
        """Keep listening sockets; `open` makes them.

        Args:
            host: the address on which they listen.
            secret: of the job.
        """
        self.address, self.local = f"{host} {listeners[0].getsockname()[1]}", ip_address(host).is_loopback
        self._listeners, self._host, self._secret = listeners, host, secret
        self._asking: list[socket.socket] = []
        self._server: TcpServer | None = None
        self._closed = False
        self._serving = threading.Lock()
        self._poll = select.poll()
        for listener in listeners:
            listener.setblocking(False)
            self._poll.register(listener, select.POLLIN)
        forking.register(self)

    @classmethod
    def open(cls, host: str, ports: Sequence[int], secret: str) -> TcpStandby | None:
        """Listen on an address of this host, on the first of these ports that is free; None if none is.

        On loopback any port will do.
        """
        for port in (0,) if ip_address(host).is_loopback else ports:
            with contextlib.suppress(StoreError, ResourceError):
                return cls(listening.listen(host, port), host, secret)
        return None

    def wanted(self) -> bool:
        with self._serving:
            if self._server is not None or self._closed:
                return False
            while len(self._asking) < _AT_ONCE and self._poll.poll(0) and (asking := self._accept()):
                self._asking += asking
            ended = [sock for sock in self._asking if _hung_up(sock)]
            listening.close(ended)
            self._asking = [sock for sock in self._asking if sock not in ended]
            return bool(self._asking)

    def _accept(self) -> list[socket.socket]:
        """Connections that wait, at most one of each listener."""
        found = []
        for listener in self._listeners:
            with contextlib.suppress(OSError):  # none, or there is no descriptor for it
                found.append(listener.accept()[0])
        return found

    def serve(self) -> None:
        with self._serving:
            if self._server is None and not self._closed:
                asking, self._asking = self._asking, []
                self._server = TcpServer(self._host, 0, self._secret, listeners=self._listeners, accepted=asking)

    def close(self) -> None:
        with self._serving:
            if self._closed:
                return
            self._closed = True
        if self._server is not None:
            self._server.close(CLOSE_GRACE)
        listening.close([*self._listeners, *self._asking])

    def after_fork(self) -> None:
        """Leave the port to the parent, so that others learn of its end."""
        self._serving = threading.Lock()  # the copied lock may be held by a thread that the child does not have
        for sock in (*self._listeners, *self._asking):
            if sock.fileno() >= 0:
                forking.leave_to_parent(sock.fileno())


def _hung_up(sock: socket.socket) -> bool:
    """Whether the other end of a connection that has sent nothing is closed."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
