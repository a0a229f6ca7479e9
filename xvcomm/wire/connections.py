"""What the kernel tells of a TCP connection, and what is set on it."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios

import numpy as np

from xvcomm.types.route import Ends
from xvcomm.wire.congestion import pace, unpace
from xvcomm.wire.records import TOLD_BY_KERNEL

_UNSENT_BYTES = 256 << 10
"""Bytes that the kernel holds unsent for a rail: few, so that a slow rail takes no more than it can carry."""
_NEAR_MICROSECONDS = 1000
"""A host with a shorter least round trip is near: in the same cluster."""


def set_up(connection: socket.socket, congestion: str) -> None:
    """Make a connection a rail's.

    Args:
        connection: began after `unpace`, and has carried the handshake.
        congestion: TCP's congestion control. If empty the system's; but none that makes pauses between packets to a near host:
            with `bbr` messages of 4 MiB over loopback took twice as long as with `cubic`.
    """
    if congestion:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    elif _near(connection):
        unpace(connection)  # if the host's route has another congestion control than the system
    else:
        pace(connection)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


def _near(connection: socket.socket) -> bool:
    size = TOLD_BY_KERNEL.itemsize
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size).ljust(size, b"\xff")
    return bool(np.frombuffer(told, TOLD_BY_KERNEL)["least_round_trip"][0] < _NEAR_MICROSECONDS)


def ends(connection: socket.socket, number: int, gids: tuple[str, str] | None = None) -> Ends:
    """The ends of a connection with this number, which are ports of InfiniBand if it joins these."""
    if gids is not None:
        return *gids, number
    return connection.getsockname()[0], connection.getpeername()[0], number


def queued(connection: socket.socket) -> int:
    """Bytes that the other host has not acknowledged."""
    try:
        number: int = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
    except (OSError, ValueError):
        return 0
    return number


def hang_up(connection: socket.socket) -> None:
    """Close both directions of a connection, so that a thread or task that waits for it wakes."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
