"""A relay between ranks of several hosts by label, which keeps what passes."""

import contextlib
import selectors
import socket
import threading

import msgspec

from xvcomm.abc.store import PrefixStore
from xvcomm.backends.tcp.interfaces import Place
from xvcomm.testing.inside import context, forget_routes
from xvcomm.types.deadline import Deadline


class Relay:
    """Passes connections to a port of this host on, from `port`.

    Args:
        target: the port.
        change: of what passes, given as a bytearray, in place.

    Attributes:
        passed: of each connection the bytes of who connected, and those of who accepted.
    """

    def __init__(self, target, change=lambda data: None):
        self._target, self._change = target, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.passed = []
        self._over = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._over.is_set():
            for key, _ in self._selector.select(0.2):
                if key.fileobj is self._listener:
                    self._join()
                elif key.fileobj.fileno() >= 0:  # not closed for its other end just now
                    self._pass(key.fileobj, *key.data)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()

    def _join(self):
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            near.close()
            return
        record = bytearray(), bytearray()
        self.passed.append(record)
        for begin, end, kept in ((near, far, record[0]), (far, near, record[1])):
            begin.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(begin, selectors.EVENT_READ, (end, kept))

    def _pass(self, begin, end, kept):
        with contextlib.suppress(OSError):
            if data := bytearray(begin.recv(1 << 16)):
                self._change(data)
                kept += data
                end.sendall(data)
                return
        for side in (begin, end):
            self._selector.unregister(side)
            side.close()

    def close(self):
        self._over.set()
        self._thread.join()


def _store(comm):
    return PrefixStore("tcp", PrefixStore("transports", context(comm).session.store))


def port(comm):
    """Where this rank listens for ranks of the same network stack."""
    return _place(comm).loopback


def detour(comm, ports):
    """Let the ranks, which have no links yet, find each other at these ports."""
    _move(comm, loopback=ports[comm.rank])


def mislead(comm, rank):
    """Let the ranks, which have no links yet, look for a rank's first interface at a port where nobody listens."""
    if comm.rank == rank:
        first, *others = _place(comm).addresses
        _move(comm, addresses=[msgspec.structs.replace(first, port=1), *others])


def _place(comm):
    return msgspec.msgpack.decode(_store(comm).get(f"place/{comm.rank}", Deadline.after(10)), type=Place)


def _move(comm, **changes):
    place = msgspec.structs.replace(_place(comm), **changes)
    _store(comm).set(f"place/{comm.rank}", msgspec.msgpack.encode(place), Deadline.after(10))


@contextlib.contextmanager
def relayed(world, change=lambda data: None):
    """Relays, one to each rank of a world that has done nothing yet; they change what passes in place."""
    relays = [Relay(target, change) for target in world.run(port)]
    try:
        world.run(detour, [relay.port for relay in relays])
        world.run(forget_routes)
        yield relays
    finally:
        for relay in relays:
            relay.close()
