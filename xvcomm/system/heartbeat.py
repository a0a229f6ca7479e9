"""Whether the host at the other end of a connection still answers.

The kernels of both hosts ask and answer, so that no process takes part, and one that is stopped is not taken for a host that
cannot be reached.
"""

from __future__ import annotations

import ctypes
import socket

LEAST_SECONDS = 2.5
"""The shortest silence that says anything: the kernel asks once a second at most."""
_ASKED = 3
"""How often the kernel asks before a silence counts."""
_FOREVER_MS = (1 << 31) - 1
_BYTES = ("state", "ca_state", "retransmits", "probes", "backoff", "options", "scales", "flags")
_WORDS = (
    "rto", "ato", "snd_mss", "rcv_mss", "unacked", "sacked", "lost", "retrans", "fackets", "last_data_sent", "last_ack_sent",
    "last_data_recv", "last_ack_recv", "pmtu", "rcv_ssthresh", "rtt",
)  # fmt: skip


class _TcpInfo(ctypes.Structure):
    """The beginning of Linux' `struct tcp_info`."""

    _fields_ = [(name, ctypes.c_uint8) for name in _BYTES] + [(name, ctypes.c_uint32) for name in _WORDS]


def begin(sock: socket.socket, seconds: float) -> None:
    """Let the kernel ask the other host for an answer, so often that a `silence` of `seconds` counts.

    The connection stays open however long there is none: that the network fails does not end it.
    """
    every = max(1, int(seconds / _ASKED))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _FOREVER_MS)


def end(sock: socket.socket) -> None:
    """Let the kernel ask no more: the connection ends again if the network fails for as long as the system has it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)


def silence(sock: socket.socket) -> float:
    """Seconds since the other host has acknowledged anything, or longer if it does not acknowledge what was sent before; 0 if the
    system does not tell, or the socket is closed.
    """
    told = _told(sock)
    return 0.0 if told is None else max(float(told.last_ack_recv) / 1000, _in_vain(told))


def unheard(sock: socket.socket) -> float:
    """Seconds, at least, for which the kernel has sent the same again and again without an acknowledgement; 0 if it has not."""
    told = _told(sock)
    return 0.0 if told is None else _in_vain(told)


def _in_vain(told: _TcpInfo) -> float:
    """The sum of the timeouts that have passed, of which each is twice as long as the one before."""
    return float(told.rto) / 1e6 * (1 - 0.5**told.backoff) if told.retransmits else 0.0


def answers(sock: socket.socket) -> bool:
    """Whether the other host has acknowledged what was sent, or asked, last: also where its process takes nothing more."""
    told = _told(sock)
    return told is not None and told.retransmits == 0 and told.probes == 0


def round_trip(sock: socket.socket) -> float:
    """Seconds that an acknowledgement has taken of late; 0 if the system does not tell, or the socket is closed."""
    told = _told(sock)
    return 0.0 if told is None else float(told.rtt) / 1e6


def _told(sock: socket.socket) -> _TcpInfo | None:
    """What the kernel knows of a connection; None if the system does not tell, or the socket is closed."""
    size = ctypes.sizeof(_TcpInfo)
    try:
        told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    except OSError:
        return None
    return _TcpInfo.from_buffer_copy(told) if len(told) == size else None
