"""TCP's congestion control of connections between hosts: without pauses between packets, unless the host is far."""

from __future__ import annotations

import contextlib
import socket

_PACED, _UNPACED = b"bbr", (b"cubic", b"reno")
"""Prefix of the names of those that make pauses between packets; their replacements, the preferred one first."""


def _paced(sock: socket.socket) -> bytes:
    """The congestion control of a socket, if the system tells it and it makes pauses."""
    with contextlib.suppress(OSError):
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
        return name if name.startswith(_PACED) else b""
    return b""


def unpace(sock: socket.socket) -> None:
    """Let a socket make no pauses between packets: one that is to connect, one that listens, or a connection.

    If a connection begins with `bbr`, Linux paces it ever after, whatever congestion control it has later: with 12 connections
    and `cubic`, the first messages of 64 KiB after a rest took three times as long.
    """
    if _paced(sock):
        for name in _UNPACED:
            with contextlib.suppress(OSError):  # not every user may choose each of them
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
                break


def pace(connection: socket.socket) -> None:
    """Give a connection that began after `unpace` the system's congestion control, if that makes pauses and is allowed."""
    with contextlib.suppress(OSError), socket.socket(connection.family) as untouched:
        if name := _paced(untouched):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
