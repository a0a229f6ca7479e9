"""System calls on sockets from compiled code, and OpenSSL's functions on those with TLS: nothing blocks but `wait`."""

from __future__ import annotations

import errno
import socket
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from xvcomm.jit.atomics import copy_bytes
from xvcomm.jit.ccall import call_3
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at
from xvcomm.wire.records import POLLED, TOLD_BY_KERNEL, tls_at

_sendmsg = types.ExternalFunction("sendmsg", types.intp(types.int32, types.intp, types.int32))
_recv = types.ExternalFunction("recv", types.intp(types.int32, types.intp, types.intp, types.int32))
_ppoll = types.ExternalFunction("ppoll", types.int32(types.intp, types.intp, types.intp, types.intp))
_read = types.ExternalFunction("read", types.intp(types.int32, types.intp, types.intp))
_write = types.ExternalFunction("write", types.intp(types.int32, types.intp, types.intp))
_getsockopt = types.ExternalFunction(
    "getsockopt", types.int32(types.int32, types.int32, types.int32, types.intp, types.intp)
)
_errno_location = types.ExternalFunction("__errno_location", types.intp())

_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_AGAIN, _INTERRUPTED = errno.EAGAIN, errno.EINTR
POLLIN, POLLOUT = 1, 4
_TCP, _TCP_INFO, _TOLD_BYTES = socket.IPPROTO_TCP, socket.TCP_INFO, TOLD_BY_KERNEL.itemsize

polled_at = compiled_at(POLLED)

_PAUSE = np.dtype([("seconds", "i8"), ("nanoseconds", "i8")])
_pause_at = compiled_at(_PAUSE)

BLOCKED, CLOSED = -1, -2
"""Results of `send` and `receive`: not now; the other side has closed the connection. -3 and below: -3 - errno."""
TAMPERED = -3 - errno.EBADMSG
"""Of these: somebody between has changed what was sent over TLS."""

RECORD_BYTES = 16 << 10
"""Most bytes of a TLS record."""
WANT_READ, WANT_WRITE, _SYSTEM, _CLOSED = 2, 3, 5, 6
"""Results of SSL_get_error."""


@intrinsic
def _int32(typingctx: Any, address: Any) -> Any:
    """Load the 32-bit integer at `address`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(32).as_pointer()))

    return types.int32(types.intp), generate


@register_jitable
def _failure() -> int:
    number = _int32(_errno_location())
    if number == _AGAIN or number == _INTERRUPTED:
        return BLOCKED
    return -3 - number


@register_jitable
def _tls_failure(rail: Any, result: int) -> int:
    error = np.int32(call_3(tls_at(rail.tls).get_error, rail.channel, result, 0))
    if error == WANT_READ or error == WANT_WRITE:
        return BLOCKED
    if error == _CLOSED:
        return CLOSED
    return min(_failure(), CLOSED) if error == _SYSTEM else TAMPERED


@register_jitable
def _send_tls(rail: Any, count: int) -> Any:
    """Send one record. If it is BLOCKED, the next call must be the same."""
    parts = rail.parts
    data, nbytes = parts[0], parts[1]
    if count > 1:
        more = min(parts[3], RECORD_BYTES - nbytes)
        copy_bytes(rail.staged, data, nbytes)
        copy_bytes(rail.staged + nbytes, parts[2], more)
        data, nbytes = rail.staged, nbytes + more
    tls = tls_at(rail.tls)
    call_3(tls.clear_error, 0, 0, 0)
    sent = np.int32(call_3(tls.write, rail.channel, data, min(nbytes, RECORD_BYTES)))
    result = np.int64(sent) if sent > 0 else _tls_failure(rail, sent)
    rail.begun = 1 if result == BLOCKED else 0
    return result


@register_jitable
def _receive_tls(rail: Any, data: int, nbytes: int) -> Any:
    tls = tls_at(rail.tls)
    call_3(tls.clear_error, 0, 0, 0)
    got = np.int32(call_3(tls.read, rail.channel, data, min(nbytes, 1 << 30)))
    return np.int64(got) if got > 0 else _tls_failure(rail, got)


@register_jitable
def send(rail: Any, count: int) -> Any:
    """Send what is at the first `count` of `rail.parts`; the number of bytes sent, or BLOCKED, or a failure."""
    if rail.tls != 0:
        return _send_tls(rail, count)
    call = rail.call
    call[2], call[3] = address_of(rail, "parts"), count
    sent = _sendmsg(rail.fd, address_of(rail, "call"), _FLAGS)
    return sent if sent >= 0 else _failure()


@register_jitable
def receive(rail: Any, data: int, nbytes: int) -> Any:
    """Receive at most `nbytes`, of which there is at least one; BLOCKED, CLOSED, or a failure."""
    if rail.tls != 0:
        return _receive_tls(rail, data, nbytes)
    received = _recv(rail.fd, data, nbytes, _FLAGS)
    if received > 0:
        return received
    return CLOSED if received == 0 else _failure()


@register_jitable
def ask_kernel(rail: Any) -> bool:
    """Fill `rail.told`; False if the system does not tell as much."""
    rail.told_bytes = _TOLD_BYTES
    length = address_of(rail, "told_bytes")
    failed = _getsockopt(rail.fd, _TCP, _TCP_INFO, address_of(rail, "told"), length)
    return bool(failed == 0 and rail.told_bytes == _TOLD_BYTES)


@register_jitable
def wait(polled: int, count: int, pause: int, nanoseconds: int) -> int:
    """Block until one of the descriptors at `polled` is ready, or the time has passed; how many are ready."""
    time = _pause_at(pause)
    time.seconds, time.nanoseconds = nanoseconds // 1_000_000_000, nanoseconds % 1_000_000_000
    return _ppoll(polled, count, pause, 0)


@register_jitable
def raise_event(fd: int, one: int) -> None:
    """Add 1, the word at `one`, to an eventfd."""
    _write(fd, one, 8)


@register_jitable
def take_event(fd: int, word: int) -> None:
    """Reset an eventfd that is ready."""
    _read(fd, word, 8)
