"""What travels between a TCP store and its clients: length-prefixed msgpack, and the proofs of the job's secret.

Each side proves that it knows the secret before anything else is said. The server sends `Challenge`; the client
answers with its proof over both nonces and a nonce of its own; the server answers with its own proof, or refuses.
Every later message ends with a code under the connection's own key, which secret and nonces give, over the message and
its number in its direction. So nobody in between can alter, repeat, drop or reorder messages. They are not encrypted.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from xvcomm.errors import ConfigError

FRAME_LIMIT = 64 << 20
HELLO_LIMIT = 1 << 10
"""Bytes of a frame before the sender has proved that it knows the secret."""
HEADER = 4
NONCE = 32
CODE = 32
"""Bytes of a message's code."""
HANDSHAKE_SECONDS = 10.0

Side = Literal["client", "server"]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


class Challenge(Message, frozen=True):
    """Server: a fresh nonce."""

    nonce: bytes


class Answer(Message, frozen=True):
    """Client: its nonce, its proof, how many communicators it has had at this address (see `Refused`), its process."""

    nonce: bytes
    proof: bytes
    epoch: int
    process: str = ""


class Welcome(Message, frozen=True):
    """Server: its proof."""

    proof: bytes


class Refused(Message, frozen=True):
    """Server: the proof is wrong, or it serves another communicator than the next one of this client."""

    reason: Literal["secret", "epoch"]


class Set(Message, frozen=True):
    """Client: see `Store.set`."""

    key: str
    value: bytes


class Get(Message, frozen=True):
    """Client: see `Store.get`; `seconds` is what is left, None for ever."""

    key: str
    seconds: float | None


class Wait(Message, frozen=True):
    """Client: see `Store.wait`."""

    keys: list[str]
    seconds: float | None


class Add(Message, frozen=True):
    """Client: see `Store.add`."""

    key: str
    amount: int


class Done(Message, frozen=True):
    """Server: the request without a result was carried out."""


class Value(Message, frozen=True):
    """Server: what lies under the key."""

    value: bytes


class Total(Message, frozen=True):
    """Server: the sum."""

    total: int


class Missing(Message, frozen=True):
    """Server: time is up and these keys are not set."""

    keys: list[str]


class Failed(Message, frozen=True):
    """Server: the request makes no sense, and why."""

    reason: str


Request = Set | Get | Wait | Add
Reply = Done | Value | Total | Missing | Failed


class Malformed(Exception):
    """Bytes that are no message of this version, or not the one that is due."""


class Forged(Exception):
    """A message that the other side did not send, or not now."""


def _reader(kind: Any) -> Callable[[bytes], Any]:
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(payload: bytes) -> Any:
        try:
            return decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # bytes that are no UTF-8: ValueError
            raise Malformed(str(error)) from None

    return read


decode_challenge: Callable[[bytes], Challenge] = _reader(Challenge)
decode_answer: Callable[[bytes], Answer] = _reader(Answer)
decode_verdict: Callable[[bytes], Welcome | Refused] = _reader(Welcome | Refused)
decode_request: Callable[[bytes], Request] = _reader(Request)
decode_reply: Callable[[bytes], Reply] = _reader(Reply)
encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode


def frame(message: Message) -> bytes:
    """The bytes of a message of the handshake, its length before it."""
    payload = encode(message)
    return len(payload).to_bytes(HEADER, "big") + payload


class Seal:
    """Authenticates the messages of one direction of one connection, in their order; each side has one a direction.

    Args:
        secret: of the job.
        sender: whose messages these are.
        server_nonce, client_nonce: of the handshake.
    """

    def __init__(self, secret: str, sender: Side, server_nonce: bytes, client_nonce: bytes) -> None:
        self._key = _keyed(secret, f"session {sender}", server_nonce + client_nonce)
        self._count = 0

    def frame(self, payload: bytes) -> bytes:
        """The bytes of the next message, as `encode` gave it: its length before it and its code behind it."""
        return (len(payload) + CODE).to_bytes(HEADER, "big") + payload + self._code(payload)

    def open(self, sealed: bytes) -> bytes:
        """The next message out of what a frame held.

        Raises:
            Forged: its code is wrong.
        """
        payload = sealed[:-CODE]
        if not hmac.compare_digest(self._code(payload), sealed[-CODE:]):
            raise Forged
        return payload

    def _code(self, payload: bytes) -> bytes:
        number, self._count = self._count, self._count + 1
        return hmac.digest(self._key, number.to_bytes(8, "big") + payload, "sha256")


def need_secret(secret: str | None) -> str:
    """The secret, which must be set.

    Raises:
        ConfigError: it is not.
    """
    if not secret:
        raise ConfigError(
            "a TCP store needs the job's secret: set XVCOMM_SECRET to the same random text on all ranks, for instance "
            "the output of `openssl rand -hex 16`"
        )
    return secret


def prove(secret: str, side: Side, other: bytes, own: bytes, epoch: int) -> bytes:
    """HMAC-SHA256 over both nonces and the epoch; the side is part of it so that a proof cannot be sent back."""
    return _keyed(secret, side, other + own + str(epoch).encode())


def proven(secret: str, side: Side, other: bytes, own: bytes, epoch: int, proof: bytes) -> bool:
    """Whether the proof that `side` sent is right; takes the same time for every wrong one."""
    return hmac.compare_digest(prove(secret, side, other, own, epoch), proof)


def _keyed(secret: str, use: str, data: bytes) -> bytes:
    return hmac.digest(secret.encode(errors="surrogateescape"), f"xvcomm store 2 {use} ".encode() + data, "sha256")
