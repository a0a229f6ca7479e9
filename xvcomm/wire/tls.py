"""TLS between two processes that have the job's key, without certificates; compiled code calls OpenSSL's functions.

TLS 1.3 with a pre-shared key, which both sides derive from the job's key and the nonces of this connection, and an ephemeral
key exchange: who learns the job's key later cannot read what was recorded before.
"""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
import socket
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_long, c_size_t, c_ubyte, c_uint, c_uint64, c_ulong, c_void_p
from typing import Any

import numpy as np

from xvcomm.errors import AuthenticationError, ConfigError
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


class Channel:
    """One side of a TLS connection, freed with the last reference to it.

    Attributes:
        address: of OpenSSL's object.
        staged: address of a buffer for one record.
    """

    def __init__(self, library: Any, context: int) -> None:
        self._library = library
        self.address: int = library.SSL_new(context)
        self._staged = np.zeros(RECORD_BYTES, np.uint8)
        self.staged = self._staged.ctypes.data

    def __del__(self) -> None:
        self._library.SSL_free(self.address)


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
        called = ("SSL_read", "SSL_write", "SSL_get_error", "ERR_clear_error")
        self._functions = Functions(*(ctypes.cast(getattr(library, name), c_void_p).value for name in called))
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
        """
        library, channel = self._library, Channel(self._library, self._context)
        library.SSL_set_fd(channel.address, connection.fileno())
        if accepting:
            library.SSL_set_accept_state(channel.address)
        else:
            library.SSL_set_connect_state(channel.address)
            library.SSL_set_verify(channel.address, _VERIFY_PEER, None)  # no certificate will do instead of the key
        self._keys[channel.address] = key
        try:
            while True:
                library.ERR_clear_error()
                result = library.SSL_do_handshake(channel.address)
                if result == 1:
                    break
                await self._wait(connection, channel, result)
        finally:
            del self._keys[channel.address]
        if not library.SSL_session_reused(channel.address):
            raise AuthenticationError("a connection was refused whose TLS handshake did without the job's key")
        return channel

    async def _wait(self, connection: socket.socket, channel: Channel, result: int) -> None:
        """Wait until the handshake can go on."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        error = self._library.SSL_get_error(channel.address, result)
        if error == WANT_READ:
            add, remove = loop.add_reader, loop.remove_reader
        elif error == WANT_WRITE:
            add, remove = loop.add_writer, loop.remove_writer
        else:
            reason = (
                self._library.ERR_reason_error_string(self._library.ERR_get_error()) or b"the connection was closed"
            )
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


def _of_python() -> str | None:
    try:
        import _ssl
    except ImportError:
        return None
    return getattr(_ssl, "__file__", None)
