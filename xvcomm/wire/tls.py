"""TLS between two processes that have the job's key, without certificates; compiled code calls OpenSSL's functions.

TLS 1.3 with a pre-shared key, which both sides derive from the job's key and the nonces of this connection, and an ephemeral
key exchange: who learns the job's key later cannot read what was recorded before.

OpenSSL sends by write(2), which raises SIGPIPE on a lost connection. Its default action ends the process; Python ignores it, but
a program may restore that action. So compiled code calls OpenSSL with the signal blocked.
"""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
import signal
import socket
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_long, c_size_t, c_ubyte, c_uint, c_uint64, c_ulong, c_void_p
from functools import cache
from typing import Any

import numpy as np
from numba import types

from xvcomm.errors import AuthenticationError, ConfigError
from xvcomm.jit.ccall import call_3
from xvcomm.jit.compile import compiling, native
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at, python_type
from xvcomm.wire.records import Tls as Functions
from xvcomm.wire.sockets import RECORD_BYTES, WANT_READ, WANT_WRITE

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "TLS_method": (c_void_p,),
    "SSL_CTX_new": (c_void_p, c_void_p),
    "SSL_CTX_free": (None, c_void_p),
    "SSL_CTX_ctrl": (c_long, c_void_p, c_int, c_long, c_void_p),
    "SSL_CTX_set_options": (c_uint64, c_void_p, c_uint64),
    "SSL_set_verify": (None, c_void_p, c_int, c_void_p),
    "SSL_CTX_set_num_tickets": (c_int, c_void_p, c_size_t),
    "SSL_CTX_set_ciphersuites": (c_int, c_void_p, c_char_p),
    "SSL_CTX_set_default_read_buffer_len": (None, c_void_p, c_size_t),
    "SSL_CTX_set_psk_client_callback": (None, c_void_p, c_void_p),
    "SSL_CTX_set_psk_server_callback": (None, c_void_p, c_void_p),
    "SSL_new": (c_void_p, c_void_p),
    "SSL_free": (None, c_void_p),
    "SSL_set_fd": (c_int, c_void_p, c_int),
    "SSL_set_accept_state": (None, c_void_p),
    "SSL_set_connect_state": (None, c_void_p),
    "SSL_do_handshake": (c_int, c_void_p),
    "SSL_session_reused": (c_int, c_void_p),
    "SSL_get_error": (c_int, c_void_p, c_int),
    "SSL_read": (c_int, c_void_p, c_void_p, c_int),
    "SSL_write": (c_int, c_void_p, c_void_p, c_int),
    "ERR_clear_error": (None,),
    "ERR_get_error": (c_ulong,),
    "ERR_reason_error_string": (c_char_p, c_ulong),
}
_MODE, _READ_AHEAD, _LEAST_VERSION = 33, 41, 123  # of SSL_CTX_ctrl
_PARTIAL_WRITE, _MOVING_BUFFER, _TLS_1_3, _VERIFY_PEER, _IGNORE_EOF = 1, 2, 0x304, 1, 1 << 7
_SUITES = b"TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256"
_READ_BYTES = 128 << 10
_IDENTITY = b"xvcomm\0"
_ClientKey = CFUNCTYPE(c_uint, c_void_p, c_char_p, POINTER(c_ubyte), c_uint, POINTER(c_ubyte), c_uint)
_ServerKey = CFUNCTYPE(c_uint, c_void_p, c_char_p, POINTER(c_ubyte), c_uint)

_thread_mask = types.ExternalFunction("pthread_sigmask", types.int32(types.int32, types.intp, types.intp))
_pending = types.ExternalFunction("sigpending", types.int32(types.intp))
_is_member = types.ExternalFunction("sigismember", types.int32(types.intp, types.int32))
_accept = types.ExternalFunction("sigtimedwait", types.int32(types.intp, types.intp, types.intp))
_BLOCK, _SET, _PIPE = int(signal.SIG_BLOCK), int(signal.SIG_SETMASK), int(signal.SIGPIPE)
_SET_BYTES = 128
"""Of sigset_t."""

_CHANNEL = np.dtype([
    ("ssl", "i8"),  # address of OpenSSL's object
    *((name, "i8") for name in ("read", "write", "get_error")),  # addresses of its functions
    ("pipe", "u1", _SET_BYTES),  # the set of SIGPIPE, and two others
    ("before", "u1", _SET_BYTES),
    ("now", "u1", _SET_BYTES),
    ("pause", "i8", 2),  # no time, as struct timespec
])  # fmt: skip
_Record, _channel_at = python_type(_CHANNEL), compiled_at(_CHANNEL)


@register_jitable
def _guarded(channel: Any, function: int, data: int, nbytes: int) -> Any:
    """Call one of OpenSSL's functions with SIGPIPE blocked, and forget the one that it raises."""
    pipe, before, now = address_of(channel, "pipe"), address_of(channel, "before"), address_of(channel, "now")
    _thread_mask(_BLOCK, pipe, before)
    result = np.int32(call_3(function, channel.ssl, data, nbytes))
    if result <= 0 and _is_member(before, _PIPE) == 0:
        _pending(now)
        if _is_member(now, _PIPE) != 0:
            _accept(pipe, 0, address_of(channel, "pause"))
    _thread_mask(_SET, before, 0)
    return result


def _read(address: int, data: int, nbytes: int) -> Any:
    channel = _channel_at(address)
    return _guarded(channel, channel.read, data, nbytes)


def _write(address: int, data: int, nbytes: int) -> Any:
    channel = _channel_at(address)
    return _guarded(channel, channel.write, data, nbytes)


def _get_error(address: int, result: int, unused: int) -> Any:
    channel = _channel_at(address)
    return call_3(channel.get_error, channel.ssl, result, 0)


@cache
def _compiled() -> list[int]:
    """Addresses of the compiled functions of a channel: read, write, get_error."""
    with compiling():
        return [native("int64(int64, int64, int64)", function) for function in (_read, _write, _get_error)]


class Channel:
    """One side of a TLS connection, freed with the last reference to it.

    Attributes:
        address: of what compiled code calls the functions of `Tls` with.
        staged: address of a buffer for one record.
    """

    def __init__(self, library: Any, context: int) -> None:
        self._library = library
        self.ssl: int = library.SSL_new(context)
        functions = (_address(library, name) for name in ("SSL_read", "SSL_write", "SSL_get_error"))
        self._record = _Record(self.ssl, *functions)
        self.address = ctypes.addressof(self._record)
        ctypes.CDLL(None).sigaddset(c_void_p(self.address + _Record.pipe.offset), _PIPE)
        self._staged = np.zeros(RECORD_BYTES, np.uint8)
        self.staged = self._staged.ctypes.data

    def __del__(self) -> None:
        self._library.SSL_free(self.ssl)


class Tls:
    """What the connections of a process have in common.

    Attributes:
        functions: address of what compiled code calls.
    """

    def __init__(self) -> None:
        """Raises ConfigError: there is no OpenSSL."""
        self._library = library = _openssl()
        self._keys: dict[int, bytes] = {}
        self._callbacks = _ClientKey(self._client_key), _ServerKey(self._server_key)
        self._context = context = library.SSL_CTX_new(library.TLS_method())
        library.SSL_CTX_ctrl(context, _LEAST_VERSION, _TLS_1_3, None)
        library.SSL_CTX_ctrl(context, _MODE, _PARTIAL_WRITE | _MOVING_BUFFER, None)
        library.SSL_CTX_ctrl(context, _READ_AHEAD, 1, None)
        library.SSL_CTX_set_default_read_buffer_len(context, _READ_BYTES)
        library.SSL_CTX_set_options(context, _IGNORE_EOF)  # the frames say themselves where they end
        library.SSL_CTX_set_num_tickets(context, 0)
        library.SSL_CTX_set_ciphersuites(context, _SUITES)
        library.SSL_CTX_set_psk_client_callback(context, self._callbacks[0])
        library.SSL_CTX_set_psk_server_callback(context, self._callbacks[1])
        self._functions = Functions(*_compiled(), _address(library, "ERR_clear_error"))
        self.functions = ctypes.addressof(self._functions)

    def __del__(self) -> None:
        if hasattr(self, "_context"):
            self._library.SSL_CTX_free(self._context)

    def _client_key(self, channel: int, hint: Any, identity: Any, most: int, key: Any, most_key: int) -> int:
        ctypes.memmove(identity, _IDENTITY, len(_IDENTITY))
        return self._server_key(channel, None, key, most_key)

    def _server_key(self, channel: int, identity: Any, key: Any, most: int) -> int:
        mine = self._keys[channel]
        ctypes.memmove(key, mine, len(mine))
        return len(mine)

    async def secure(self, connection: socket.socket, key: bytes, *, accepting: bool) -> Channel:
        """Begin TLS on a connection whose other side does so, too.

        Args:
            key: of this connection, the same on both sides.
            accepting: whether the other side has made the connection.

        Raises:
            AuthenticationError: the other side has another key, or somebody between has changed what was sent.
            OSError: the connection was lost.
        """
        library, channel = self._library, Channel(self._library, self._context)
        library.SSL_set_fd(channel.ssl, connection.fileno())
        if accepting:
            library.SSL_set_accept_state(channel.ssl)
        else:
            library.SSL_set_connect_state(channel.ssl)
            library.SSL_set_verify(channel.ssl, _VERIFY_PEER, None)  # no certificate will do instead of the key
        self._keys[channel.ssl] = key
        try:
            while True:
                library.ERR_clear_error()
                result = library.SSL_do_handshake(channel.ssl)
                if result == 1:
                    break
                await self._wait(connection, channel, result)
        finally:
            del self._keys[channel.ssl]
        if not library.SSL_session_reused(channel.ssl):
            raise AuthenticationError("a connection was refused whose TLS handshake did without the job's key")
        return channel

    async def _wait(self, connection: socket.socket, channel: Channel, result: int) -> None:
        """Wait until the handshake can go on."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        error = self._library.SSL_get_error(channel.ssl, result)
        if error == WANT_READ:
            add, remove = loop.add_reader, loop.remove_reader
        elif error == WANT_WRITE:
            add, remove = loop.add_writer, loop.remove_writer
        else:
            reason = self._library.ERR_reason_error_string(self._library.ERR_get_error())
            if not reason:
                raise ConnectionResetError("the connection was closed during the TLS handshake")
            raise AuthenticationError(f"a connection was refused whose TLS handshake failed: {reason.decode()}")
        add(connection, ready.set)
        try:
            await ready.wait()
        finally:
            remove(connection)


def _openssl() -> Any:
    """The library with OpenSSL that Python uses itself, or else the system's."""
    tried = []
    for path in filter(None, (_of_python(), ctypes.util.find_library("ssl"))):
        try:
            library = ctypes.CDLL(path)
            for name, (result, *arguments) in _SIGNATURES.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
            return library
        except (OSError, AttributeError) as error:
            tried.append(str(error))
    raise ConfigError(f"XVCOMM_TLS=1 needs OpenSSL 1.1.1 or newer, libssl: {'; '.join(tried) or 'there is none'}")


def _address(library: Any, name: str) -> int:
    return ctypes.cast(getattr(library, name), c_void_p).value or 0


def _of_python() -> str | None:
    try:
        import _ssl
    except ImportError:
        return None
    return getattr(_ssl, "__file__", None)
