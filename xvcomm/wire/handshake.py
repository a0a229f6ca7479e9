"""Mutual proof of the job's secret on a new connection, before any frame is read.

The accepting side sends a nonce. The connecting side answers with its own nonce, who it is, and a proof over all of this; the
accepting side answers with its proof. A proof is an HMAC under the job's key, so a recorded handshake proves nothing against a
fresh nonce, and the two sides' proofs differ, so none can be reflected.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from xvcomm.errors import AuthenticationError, ResourceError

SECONDS = 10.0
"""How long a connection may take for it."""
PROBE = -1
"""Number of a connection that only shows that it can be made; it is refused after the proofs."""
PROBE_RDMA = -2
"""Number of a connection over which two queue pairs are joined, tried and given back; see `pair_trials`."""
_LIMIT = 1 << 10
_NONCE = 32
_REFUSAL = 400  # characters
_VERSION = 11


Gid = Annotated[str, Meta(max_length=45)]
"""Of a port of InfiniBand, as an address."""


class Challenge(msgspec.Struct, frozen=True, array_like=True):
    """Accepting side: a new nonce."""

    version: int
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Connecting side: a new nonce, both ranks as numbers of the whole job, the connection's number and the proof.

    Between ports of InfiniBand also the GIDs of its own and of the other side's.
    """

    nonce: bytes
    rank: int
    peer: int
    number: int
    proof: bytes
    gids: tuple[Gid, Gid] | None = None


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """Accepting side: its proof, or why the connection is not used."""

    proof: bytes
    refusal: str = ""


class Half(msgspec.Struct, frozen=True, array_like=True):
    """Either side, where the connection stands for a rail of RDMA: what its queue pair needs, or why there is none."""

    description: bytes
    refusal: str = ""


_DECODERS: dict[type[msgspec.Struct], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Challenge, Hello, Verdict, Half)
}


class Refused(Exception):
    """The accepting side does not use the connection; gives the reason in words."""


class Malformed(Exception):
    """The other side does not speak this protocol."""


def _prove(
    key: bytes, side: str, accepting: bytes, connecting: bytes, rank: int, peer: int, number: int,
    gids: tuple[str, str] | None,
) -> bytes:  # fmt: skip
    text = f"xvcomm wire {_VERSION} {side} {rank} {peer} {number} {gids} ".encode()
    return hmac.digest(key, text + accepting + connecting, "sha256")


async def _send(connection: socket.socket, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    await asyncio.get_running_loop().sock_sendall(connection, len(data).to_bytes(2, "big") + data)


async def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = await asyncio.get_running_loop().sock_recv(connection, count - len(data))
        if not piece:
            raise ConnectionResetError("the connection was closed during the handshake")
        data += piece
    return data


async def _receive(connection: socket.socket, kind: type[msgspec.Struct]) -> msgspec.Struct:
    length = int.from_bytes(await _exactly(connection, 2), "big")
    if length > _LIMIT:
        raise Malformed
    try:
        return _DECODERS[kind].decode(await _exactly(connection, length))
    except msgspec.MsgspecError as error:
        raise Malformed(str(error)) from None


class Proven(NamedTuple):
    """The rank that has proved the key on a connection that this side has accepted.

    Attributes:
        rank: the other side's, in the whole job.
        number: of the connection among those on its route, or `PROBE`, or `PROBE_RDMA`.
        proof: for `admit`.
        key: of this connection, for TLS.
        gids: of the ports of InfiniBand that it joins, this side's first; None if it joins none.
    """

    rank: int
    number: int
    proof: bytes
    key: bytes
    gids: tuple[str, str] | None


async def connect(
    connection: socket.socket, key: bytes, rank: int, peer: int, number: int, gids: tuple[str, str] | None = None
) -> bytes:  # fmt: skip
    """Prove the key on a connection that this side has made, and check the other side's proof.

    Args:
        rank, peer: this process and the one that is expected, as numbers of the whole job.
        number, gids: see `Route`; the former may be `PROBE`, or `PROBE_RDMA`.

    Returns:
        A key of this connection, for TLS.

    Raises:
        Refused: the other side does not want the connection, or not now.
        AuthenticationError: it has another key.
        Malformed: what answers is no process of this version.
        OSError: the connection was lost.
    """
    challenge = await _receive(connection, Challenge)
    assert isinstance(challenge, Challenge)
    if challenge.version != _VERSION or len(challenge.nonce) != _NONCE:
        raise Malformed("it speaks another version; install one xvcomm everywhere")
    nonce = secrets.token_bytes(_NONCE)
    proven = challenge.nonce, nonce, rank, peer, number, gids
    await _send(connection, Hello(nonce, rank, peer, number, _prove(key, "connect", *proven), gids))
    verdict = await _receive(connection, Verdict)
    assert isinstance(verdict, Verdict)
    if not hmac.compare_digest(verdict.proof, _prove(key, "accept", *proven)):
        raise AuthenticationError(f"what answers for rank {peer} does not have the job's key", rank=rank, peer=peer)
    if verdict.refusal:
        raise Refused(verdict.refusal)
    return _prove(key, "tls", *proven)


async def accept(connection: socket.socket, key: bytes, rank: int, size: int) -> Proven:
    """Check the proof on a connection that the other side has made, which must be another of the job's `size` ranks.

    Raises:
        AuthenticationError: the other side does not have the key, or wants another process.
        Malformed: it does not speak this protocol.
        OSError: the connection was lost.
    """
    own = secrets.token_bytes(_NONCE)
    await _send(connection, Challenge(_VERSION, own))
    hello = await _receive(connection, Hello)
    assert isinstance(hello, Hello)
    proven = own, hello.nonce, hello.rank, hello.peer, hello.number, hello.gids
    proof = _prove(key, "connect", *proven)
    named = hello.peer == rank != hello.rank and 0 <= hello.rank < size and len(hello.nonce) == _NONCE
    if not hmac.compare_digest(hello.proof, proof) or not named:
        raise AuthenticationError("a connection was refused whose maker does not have the job's key", rank=rank)
    accept, tls = (_prove(key, side, *proven) for side in ("accept", "tls"))
    gids = hello.gids and (hello.gids[1], hello.gids[0])
    return Proven(hello.rank, hello.number, accept, tls, gids)


async def admit(connection: socket.socket, proof: bytes, refusal: str = "") -> None:
    """Answer a connection that `accept` has checked."""
    await _send(connection, Verdict(proof, refusal))


async def swap(connection: socket.socket, description: bytes, refusal: str = "") -> bytes:
    """Give the other side what its queue pair needs, for what this side's needs. Both sides do so, and wait for each other.

    Raises:
        ResourceError: one of the sides has no queue pair; with the reason.
        Malformed, OSError: as in `connect`.
    """
    await _send(connection, Half(description, refusal[:_REFUSAL]))
    theirs = await _receive(connection, Half)
    assert isinstance(theirs, Half)
    if refusal:
        raise ResourceError(refusal)
    if theirs.refusal:
        raise ResourceError(f"at the other end {theirs.refusal}")
    return theirs.description
