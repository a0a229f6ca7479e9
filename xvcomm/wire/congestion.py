"""TCP's congestion control of connections between hosts: without pauses between packets, unless the host is far."""

from __future__ import annotations

import contextlib
import socket

_PACED, _UNPACED = b"bbr", (b"cubic", b"reno")
"""The congestion control that makes pauses between packets, and those that replace it, the preferred one first."""


def _of(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def unpace(sock: socket.socket) -> None:
    """Let a connection begin without pauses between packets: of a socket that is to connect, or that listens.

    If a connection begins with `bbr`, Linux paces it ever after, whatever congestion control it has later: with 12 connections
    and `cubic`, the first messages of 64 KiB after a rest took three times as long.
    """
    if _of(sock) == _PACED:
        for name in _UNPACED:
            with contextlib.suppress(OSError):  # not every user may choose each of them
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
                break


def pace(connection: socket.socket) -> None:
    """Give a connection that began after `unpace` the pauses of the system's congestion control, if that makes any."""
    with socket.socket(connection.family) as untouched:
        if _of(untouched) == _PACED:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _PACED)
