"""What travels between a TCP store and its clients: length-prefixed msgpack, and the proofs of the job's secret.

Each side proves that it knows the secret before anything else is said. The server sends `Challenge`; the client
answers with its proof over both nonces and a nonce of its own; the server answers with its own proof, or refuses.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Literal

import msgspec

from xvcomm.errors import ConfigError

FRAME_LIMIT = 64 << 20
HELLO_LIMIT = 1 << 10
"""Bytes of a frame before the sender has proved that it knows the secret."""
HEADER = 4
NONCE = 32
HANDSHAKE_SECONDS = 10.0


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


class Challenge(Message, frozen=True):
    """Server: a fresh nonce."""

    nonce: bytes


class Answer(Message, frozen=True):
    """Client: its nonce, its proof, and how many communicators it has had at this address (see `Refused`)."""

    nonce: bytes
    proof: bytes
    epoch: int


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

decode_challenge = msgspec.msgpack.Decoder(Challenge).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
decode_verdict: Callable[[bytes], Welcome | Refused] = msgspec.msgpack.Decoder(Welcome | Refused).decode
decode_request: Callable[[bytes], Request] = msgspec.msgpack.Decoder(Request).decode
decode_reply: Callable[[bytes], Reply] = msgspec.msgpack.Decoder(Reply).decode
_encode = msgspec.msgpack.Encoder().encode


def frame(message: Message) -> bytes:
    """The bytes of a message, its length before it."""
    payload = _encode(message)
    return len(payload).to_bytes(HEADER, "big") + payload


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


def prove(secret: str, side: Literal["client", "server"], other: bytes, own: bytes) -> bytes:
    """HMAC-SHA256 over both nonces; the side is part of it so that a proof cannot be sent back."""
    return hmac.digest(
        secret.encode(errors="surrogateescape"), f"xvcomm store 1 {side} ".encode() + other + own, "sha256"
    )


def proven(secret: str, side: Literal["client", "server"], other: bytes, own: bytes, proof: bytes) -> bool:
    """Whether the proof that `side` sent is right; takes the same time for every wrong one."""
    return hmac.compare_digest(prove(secret, side, other, own), proof)
