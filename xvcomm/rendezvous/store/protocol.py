"""Protocol between a TCP store and its clients: length-prefixed msgpack, authenticated with the job's secret.

First each side proves that it knows the secret. The server sends `Challenge`; the client answers with its own nonce and a proof
over both nonces; the server answers with its proof, or refuses. Every later message ends with an HMAC over the message and its
sequence number, under a key for this connection and direction that is derived from secret and nonces. So messages cannot be
altered, repeated, dropped or reordered on the way. They are not encrypted.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from xvcomm.abc.store import Step
from xvcomm.errors import ConfigError

FRAME_LIMIT = 64 << 20
HELLO_LIMIT = 1 << 10
"""Maximum bytes of a frame until the sender has proved that it knows the secret."""
HEADER = 4
NONCE = 32
CODE = 32
"""Bytes of a message's HMAC."""
HANDSHAKE_SECONDS = 10.0

Side = Literal["client", "server"]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base class of all messages."""


class Challenge(Message, frozen=True):
    """Server: a new nonce."""

    nonce: bytes


class Answer(Message, frozen=True):
    """Client: its nonce, its proof, the number of communicators it has had at this address (see `Refused`), its process.

    Without a number it joins a job that runs, whatever that is.
    """

    nonce: bytes
    proof: bytes
    epoch: int | None
    process: str = ""


class Welcome(Message, frozen=True):
    """Server: its proof."""

    proof: bytes


class Refused(Message, frozen=True):
    """Server: the proof is wrong (`secret`), or it serves another communicator than the client's next one (`epoch`)."""

    reason: Literal["secret", "epoch"]


class Exchange(Message, frozen=True):
    """Client: see `Store.exchange`; `seconds` is the time left to wait for the keys, None without a deadline."""

    steps: list[Step]
    keys: list[str]
    seconds: float | None


class Read(Message, frozen=True):
    """Client: the values of `place/N` from N = `first` on, as many as are set; waits for the first one as `Exchange` does."""

    place: str
    first: int
    seconds: float | None


class Will(Message, frozen=True):
    """Client: once this connection is closed, add 1 to `key` and set `key/SUM` to `value`, unless `unless` is set.

    The same with `silence`, if it is not empty, each time that its host has not answered for `patience` seconds.
    """

    key: str
    value: bytes
    unless: str
    silence: bytes
    patience: float


class Done(Message, frozen=True):
    """Server: success, for requests without a result."""


class Values(Message, frozen=True):
    """Server: values of the keys, in order; not all that are set if they are many."""

    values: list[bytes]


class Exchanged(Message, frozen=True):
    """Server: what the steps give, and the values of the keys, None for those that are not set."""

    done: list[bytes]
    found: list[bytes | None]


class Failed(Message, frozen=True):
    """Server: the request cannot be carried out, with the reason."""

    reason: str


Request = Exchange | Read | Will
Reply = Exchanged | Done | Values | Failed


class Malformed(Exception):
    """The bytes are not a message of this version, or not the message expected now."""


class Forged(Exception):
    """The other side did not send this message, or not at this point."""


def _reader(kind: Any) -> Callable[[bytes], Any]:
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(payload: bytes) -> Any:
        try:
            return decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: the bytes are not UTF-8
            raise Malformed(str(error)) from None

    return read


decode_challenge: Callable[[bytes], Challenge] = _reader(Challenge)
decode_answer: Callable[[bytes], Answer] = _reader(Answer)
decode_verdict: Callable[[bytes], Welcome | Refused] = _reader(Welcome | Refused)
decode_request: Callable[[bytes], Request] = _reader(Request)
decode_reply: Callable[[bytes], Reply] = _reader(Reply)
encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode


def frame(message: Message) -> bytes:
    """The bytes of a handshake message, prefixed by its length."""
    payload = encode(message)
    return len(payload).to_bytes(HEADER, "big") + payload


class Seal:
    """Authenticates the messages of one direction of a connection, in order. Each side has one per direction.

    Args:
        secret: of the job.
        sender: the side that sends in this direction.
        server_nonce, client_nonce: from the handshake.
    """

    def __init__(self, secret: str, sender: Side, server_nonce: bytes, client_nonce: bytes) -> None:
        self._key = _keyed(secret, f"session {sender}", server_nonce + client_nonce)
        self._count = 0

    def frame(self, payload: bytes) -> bytes:
        """The bytes of the next message, whose `payload` comes from `encode`: length, payload, HMAC."""
        return (len(payload) + CODE).to_bytes(HEADER, "big") + payload + self._code(payload)

    def open(self, sealed: bytes) -> bytes:
        """Verify the next message and return its payload.

        Raises:
            Forged: its HMAC is wrong.
        """
        payload = sealed[:-CODE]
        if not hmac.compare_digest(self._code(payload), sealed[-CODE:]):
            raise Forged
        return payload

    def _code(self, payload: bytes) -> bytes:
        number, self._count = self._count, self._count + 1
        return hmac.digest(self._key, number.to_bytes(8, "big") + payload, "sha256")


def need_secret(secret: str | None) -> str:
    """Return the secret.

    Raises:
        ConfigError: it is not set.
    """
    if not secret:
        raise ConfigError(
            "a TCP store needs the job's secret: set XVCOMM_SECRET to the same random text on all ranks, for instance "
            "the output of `openssl rand -hex 16`"
        )
    return secret


def prove(secret: str, side: Side, other: bytes, own: bytes, epoch: int | None) -> bytes:
    """HMAC-SHA256 over both nonces and the epoch. It includes the side, so that a proof cannot be reflected to its sender."""
    return _keyed(secret, side, other + own + str(epoch).encode())


def proven(secret: str, side: Side, other: bytes, own: bytes, epoch: int | None, proof: bytes) -> bool:
    """Whether the proof that `side` sent is correct. Compares in constant time."""
    return hmac.compare_digest(prove(secret, side, other, own, epoch), proof)


def _keyed(secret: str, use: str, data: bytes) -> bytes:
    return hmac.digest(secret.encode(errors="surrogateescape"), f"xvcomm store 4 {use} ".encode() + data, "sha256")
