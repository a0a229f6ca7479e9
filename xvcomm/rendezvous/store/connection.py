"""A connection to a TCP store: frames, the mutual proof of the secret, and whether the other host hears."""

from __future__ import annotations

import math
import secrets
import socket
import time

from xvcomm.errors import AuthenticationError, StoreError
from xvcomm.rendezvous.store import protocol
from xvcomm.system import forking, heartbeat, processes
from xvcomm.types.deadline import Deadline

_LEAST_SECONDS = 0.01
"""Minimum timeout of an attempt to connect; a timeout of 0 would make the socket non-blocking."""
_PIECE = 1 << 18


class NotYet(Exception):
    """The server that answers is not the one of this communicator yet."""


class Connection:
    """One connection, used by one thread at a time.

    Attributes:
        took: seconds that it took to make.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.took = 0.0
        forking.register(self)
        self._seals: tuple[protocol.Seal, protocol.Seal] | None = None
        self._listens = False

    @property
    def local(self) -> str:
        """This host's address of the connection."""
        return str(self._sock.getsockname()[0])

    def trust(self, secret: str, theirs: bytes, own: bytes) -> None:
        """Authenticate all further messages; called once both sides have proved the secret."""
        self._seals = protocol.Seal(secret, "client", theirs, own), protocol.Seal(secret, "server", theirs, own)

    def ask(self, request: bytes, deadline: Deadline) -> protocol.Reply:
        """Send an encoded request and return the reply; raises what `exchange` raises, protocol.Forged and protocol.Malformed."""
        assert self._seals is not None
        ours, theirs = self._seals
        return protocol.decode_reply(theirs.open(self.exchange(ours.frame(request), protocol.FRAME_LIMIT, deadline)))

    def exchange(self, frame: bytes, limit: int, deadline: Deadline) -> bytes:
        """Send a frame and return the payload of the next one; raises OSError, TimeoutError at the deadline."""
        self._until(deadline)
        self._sock.sendall(frame, socket.MSG_NOSIGNAL)
        return self.receive(limit, deadline)

    def receive(self, limit: int, deadline: Deadline) -> bytes:
        """The payload of the next frame; raises OSError, also for a frame over the limit, and TimeoutError at the deadline."""
        length = int.from_bytes(self._exactly(protocol.HEADER, deadline), "big")
        if length > limit:
            raise StoreError(f"the answer has {length} bytes where {limit} are allowed")
        return self._exactly(length, deadline)

    def after_fork(self) -> None:
        """Close the child's copy; requests of a forked child fail."""
        self._sock.close()

    def outlast_the_network(self) -> None:
        """Stay open while the other host cannot be reached: only the end of a process closes the connection."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)

    def listen(self, patience: float) -> None:
        """Find out from now on whether the other host answers; stays open nevertheless."""
        heartbeat.begin(self._sock, patience)
        self._listens = True

    def silence(self) -> float:
        """See `Notices.silence`."""
        return heartbeat.silence(self._sock) if self._listens else 0.0

    def unheard(self) -> float:
        """Seconds for which a request has been sent in vain; 0 if the other host has acknowledged it."""
        return heartbeat.unheard(self._sock)

    def hang_up(self) -> None:
        """Shut down the connection, also while a thread waits on it."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Close it; no thread may use it any more."""
        self._sock.close()

    def _until(self, deadline: Deadline) -> None:
        left = deadline.left()
        if not left:
            raise TimeoutError("timed out")
        self._sock.settimeout(None if math.isinf(left) else left)

    def _exactly(self, count: int, deadline: Deadline) -> bytes:
        # Allocate for the bytes received, not for the length announced, which may be forged.
        data = bytearray()
        while len(data) < count:
            # Set the timeout before each recv: the socket's own timeout restarts with every byte.
            self._until(deadline)
            piece = self._sock.recv(min(count - len(data), _PIECE))
            if not piece:
                raise ConnectionResetError("connection closed")
            data += piece
        return bytes(data)


def dial(host: str, port: int, secret: str, epoch: int | None, deadline: Deadline) -> Connection:
    """Make one attempt to connect, with mutual proof of the secret."""
    until, begun = Deadline.after(max(deadline.sooner(protocol.HANDSHAKE_SECONDS), _LEAST_SECONDS)), time.monotonic()
    sock = socket.create_connection((host, port), timeout=until.left() or _LEAST_SECONDS)
    try:
        if sock.getsockname() == sock.getpeername():
            # If nobody listens, Linux may pick this port as the source port and connect the socket to itself.
            raise NotYet("connection refused")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(sock)
        link = Connection(sock)
        _handshake(link, host, port, secret, epoch, until)
        link.took = time.monotonic() - begun
        return link
    except BaseException:
        sock.close()
        raise


def _handshake(link: Connection, host: str, port: int, secret: str, epoch: int | None, deadline: Deadline) -> None:
    own = secrets.token_bytes(protocol.NONCE)
    try:
        theirs = protocol.decode_challenge(link.receive(protocol.HELLO_LIMIT, deadline)).nonce
        if len(theirs) != protocol.NONCE:
            raise protocol.Malformed
        answer = protocol.Answer(own, protocol.prove(secret, "client", theirs, own, epoch), epoch, processes.own())
        verdict = protocol.decode_verdict(link.exchange(protocol.frame(answer), protocol.HELLO_LIMIT, deadline))
    except (protocol.Malformed, StoreError):
        raise StoreError(
            f"the server at {host}:{port} is not an xvcomm store of this version; check XVCOMM_STORE"
        ) from None
    match verdict:
        case protocol.Refused("epoch"):
            raise NotYet("it still serves an earlier communicator of this job")
        case protocol.Welcome(proof) if protocol.proven(secret, "server", own, theirs, epoch, proof):
            link.trust(secret, theirs, own)
            return
    raise AuthenticationError(
        f"the store at {host}:{port} has a different secret: set XVCOMM_SECRET to the same text on all ranks of the job, "
        "or choose another address if the store belongs to another job"
    )


def _keep_alive(sock: socket.socket) -> None:
    """Detect within half a minute that the server's host is gone, also during a wait without deadline."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
