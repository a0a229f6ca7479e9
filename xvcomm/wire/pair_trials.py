"""Tries whether RDMA devices of two hosts form queue pairs: makes a pair, sends a frame each way, and frees it. Needs no link."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import msgspec

from xvcomm.abc.cards import Cards, QueueEnd
from xvcomm.abc.transport import PairTrial
from xvcomm.errors import ResourceError
from xvcomm.types.route import Route
from xvcomm.wire import handshake
from xvcomm.wire.pairing import pair_up
from xvcomm.wire.reachability import connect, reason

_decode = msgspec.msgpack.Decoder(QueueEnd).decode


async def attempt(
    cards: Cards, at_once: asyncio.Semaphore, key: bytes, rank: int, peer: int, routes: Sequence[Route]
) -> PairTrial:  # fmt: skip
    """Try the devices of routes to a rank, with the proof of the job's key.

    Args:
        routes: with the same ends; the first one counts over which there is a connection.
    """
    async with at_once:
        why = ""
        for route in routes:
            try:
                connection = await connect(route)
            except OSError as error:
                why = why or f"no connection over TCP, by which they are joined: {reason(error)}"
            else:
                return await _attempt(cards, connection, key, rank, peer, route)
        return _failed(routes[0], why)


async def _attempt(
    cards: Cards, connection: socket.socket, key: bytes, rank: int, peer: int, route: Route
) -> PairTrial:  # fmt: skip
    try:
        with connection:
            async with asyncio.timeout(handshake.SECONDS):
                await handshake.connect(connection, key, rank, peer, handshake.PROBE_RDMA, route.gids)
                return PairTrial(route, *await _join(cards, connection, route.local))
    except (OSError, handshake.Malformed, handshake.Refused) as error:
        return _failed(route, f"the connection by which they are joined was lost: {reason(error)}")


def _failed(route: Route, why: str) -> PairTrial:
    return PairTrial(route, None, None, why)


async def answer(cards: Cards | None, connection: socket.socket, gids: tuple[str, str] | None) -> None:
    """Join queue pairs over an accepted connection, whose other side has proved its rank.

    Args:
        gids: of the ports of InfiniBand, this side's first; without, the devices are those of the connection's addresses.

    Raises:
        handshake.Malformed, OSError: as in `handshake.connect`.
    """
    await _join(cards, connection, gids[0] if gids else connection.getsockname()[0])


async def _join(
    cards: Cards | None, connection: socket.socket, address: str
) -> tuple[QueueEnd | None, QueueEnd | None, str]:  # fmt: skip
    """This side's end, the other's, and why their queue pairs were not joined; both sides do so."""
    here: QueueEnd | None = None
    there: QueueEnd | None = None
    try:
        here, why = await _end(cards, address)
        there = _read(await handshake.swap(connection, msgspec.msgpack.encode(here) if here else b"", why))
        assert cards is not None
        made = await pair_up(cards, connection, address)
    except ResourceError as error:
        return here, there, str(error)
    made.give_back()
    return here, there, ""


async def _end(cards: Cards | None, address: str) -> tuple[QueueEnd | None, str]:
    """This side's end, or why there is none."""
    if cards is None:
        return None, "RDMA is not in use"
    try:
        return await asyncio.to_thread(cards.end, address), ""
    except ResourceError as error:
        return None, str(error)


def _read(data: bytes) -> QueueEnd:
    """The end that the other side has told."""
    try:
        return _decode(data)
    except msgspec.MsgspecError as error:
        raise handshake.Malformed(str(error)) from None
