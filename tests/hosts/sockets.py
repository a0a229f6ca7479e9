"""What a rank of a test between hosts sees of its sockets."""

import asyncio
import contextlib
import os
import socket

import psutil

from xvcomm.types.route import Route
from xvcomm.wire.reachability import connect


def between_hosts():
    """The connections of this process but the store's."""
    every = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]
    return [c for c in every if 29711 not in (c.laddr.port, c.raddr.port)]


def addresses_between_hosts():
    """Theirs, this side's first."""
    return [(connection.laddr.ip, connection.raddr.ip) for connection in between_hosts()]


def congestion_of(connections):
    """TCP's congestion control of each socket, sorted."""
    found = set()
    for connection in connections:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as copy:  # it may be closed
            name = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            found.add(name.rstrip(b"\0").decode())
    return sorted(found)


def listeners_in_use():
    """The sockets that have accepted such connections."""
    ports = {connection.laddr.port for connection in between_hosts()}
    every = psutil.Process().net_connections("tcp")
    return [c for c in every if c.status == psutil.CONN_LISTEN and c.laddr.port in ports]


def congestion_of_new():
    """TCP's congestion control with which a connection that is made to another host begins."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = Route("127.0.0.1", "127.0.0.1", listener.getsockname()[1], ("lo", "lo"))
        with asyncio.run(connect(here)) as connection:
            return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
