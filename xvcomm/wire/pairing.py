"""Makes a rail of RDMA: a queue pair, joined with one of the process at the other end of a proven connection, and tried."""

from __future__ import annotations

import asyncio
import socket
import time

from xvcomm.abc.cards import Cards, Pair
from xvcomm.errors import ResourceError
from xvcomm.wire import handshake
from xvcomm.wire.carrier import PostedRail
from xvcomm.wire.verbs import FLUSHED, Queue

_TRY_SECONDS = 3.0
"""How long a first frame may take: longer than a device repeats it."""
_POLL_SECONDS = 0.001
_SILENCE = (
    "nothing arrives over RDMA: does a firewall drop UDP port 4791? With InfiniBand: are the two ports in one fabric? Several "
    "fabrics may have the same prefix"
)


class PairRail:
    """A queue pair and its rail. The connection by which it was made stays open beside it, and tells when the process ends.

    Attributes:
        pair: see `cards`.
        posted: what the carrier works on.
        why: what a device has reported of it; empty if nothing.
        confirmed: the other side has told that its queue pair has failed: nothing of this one arrives there any more.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair, self.posted, self.confirmed, self.why = pair, PostedRail(pair), False, ""

    @property
    def names(self) -> tuple[int, int]:
        """What FAILED calls this queue pair, and the other side's: each device counts its own, so that two have equal numbers."""
        return self.pair.device << 32 | self.pair.number, self.pair.there << 32 | self.pair.peer

    @property
    def follows(self) -> bool:
        """Whether its failure has another cause, which is not known."""
        return self._flushed and not self.why

    def cause(self) -> tuple[str, str]:
        """How it has failed, and the same without its ends if a device has reported it; empty if it has not."""
        met = self.pair.failure()
        if self.why and (self._flushed or not met):
            return f"{self.pair.where}: {self.why}", self.why
        return met, met

    @property
    def _flushed(self) -> bool:
        return bool(Queue.from_address(self.pair.queue).status == FLUSHED)

    def give_back(self) -> None:
        """Give the queue pair back, which is in no rail."""
        self.pair.fail()
        self.pair.close()


async def pair_up(cards: Cards, connection: socket.socket, address: str) -> PairRail:
    """A queue pair that is joined with the other side's, who does the same.

    Args:
        connection: on which both sides have proved the job's key.
        address: of this side, by which the device is found.

    Raises:
        ResourceError: a device refuses on either side, or the first frame does not arrive.
        handshake.Malformed, OSError: as in `handshake.connect`.
    """
    pair, why = None, ""
    try:
        pair = await _make(cards, address)
    except ResourceError as error:
        why = str(error)
    try:
        theirs = await handshake.swap(connection, pair.description if pair else b"", why)
        assert pair is not None  # else it was refused
        try:
            await asyncio.to_thread(pair.connect, theirs)
        except ResourceError as error:
            why = str(error)
        await handshake.swap(connection, b"", why)
        made = PairRail(pair)
        await _try(made)
        await handshake.swap(connection, b"")
    except BaseException:
        if pair is not None:
            pair.fail()
            pair.close()
        raise
    return made


async def _make(cards: Cards, address: str) -> Pair:
    """A queue pair, made in a thread; if this is cancelled meanwhile, it is given back."""
    making = asyncio.ensure_future(asyncio.to_thread(cards.pair, address))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_give_back)
        raise


def _give_back(making: asyncio.Future[Pair]) -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().close()


async def _try(made: PairRail) -> None:
    """Exchange first frames."""
    made.posted.greet()
    until = time.monotonic() + _TRY_SECONDS
    while not made.posted.greeted():
        if time.monotonic() > until:
            raise ResourceError(_SILENCE)
        await asyncio.sleep(_POLL_SECONDS)
