"""The sockets on which a store's server listens: on no more interfaces than the other ranks need."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from ipaddress import ip_address

from xvcomm.errors import StoreError
from xvcomm.system import limits

SERVING = "serve the store"
"""What a process does, in the error of a limit."""
_BACKLOG = 4096
_LOOPBACK = ("localhost", "::1")


def listen(host: str, port: int) -> list[socket.socket]:
    """Listen on the addresses of a name of this host, all with one port.

    If the name resolves to loopback or to another host's address here, which others may see differently, listen on all
    interfaces.

    Args:
        host: name or address by which others reach this host.
        port: 0 for any free port.

    Raises:
        StoreError: the port is in use or not permitted.
        ResourceError: too many files are open.
    """
    if not 0 <= port < 1 << 16:
        raise StoreError(f"cannot serve on port {port}: ports lie between 0 and 65535")
    try:
        if host in _LOOPBACK or host.startswith("127."):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return [socket.create_server((host, port), family=family, backlog=_BACKLOG)]
        return _on_addresses(host, port) or [_everywhere(port)]
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StoreError(
                f"port {port} of {host} is in use by another job or program; choose another port for the store "
                f"(`ss -ltnp 'sport = :{port}'` shows which)"
            ) from None
        what = f"cannot serve on {host}:{port}: {error.strerror}; choose another address or port"
        raise limits.reached(error, SERVING) or StoreError(what) from None


def close(listeners: Iterable[socket.socket]) -> None:
    """Close the sockets."""
    for listener in listeners:
        listener.close()


def _on_addresses(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of the name; none if they are not addresses of this host."""
    listeners: list[socket.socket] = []
    try:
        for family, _, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            address = str(place[0])
            if not ip_address(address.partition("%")[0]).is_loopback:
                same = listeners[0].getsockname()[1] if listeners else port
                listeners.append(socket.create_server((address, same, *place[2:]), family=family, backlog=_BACKLOG))
    except OSError as error:
        close(listeners)
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            return []
        raise
    return listeners


def _everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)
