"""The queue pairs of one link: made for its rails, and given back once nothing of them can arrive at either side any more."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from xvcomm.abc.cards import Pair
from xvcomm.system.notice import notice
from xvcomm.types.route import Ends
from xvcomm.wire import handshake
from xvcomm.wire.pairing import PairRail, pair_up
from xvcomm.wire.rails import Rail
from xvcomm.wire.troubles import Troubles

if TYPE_CHECKING:
    from xvcomm.wire.links import Process


class LinkPairs:
    """Those of rails that are up, and of lost ones. Used in the event loop of `Network`, and by its owner once that has ended.

    Attributes:
        making: ends of the rails that are being made.
        troubles: what has gone wrong with them.
    """

    def __init__(self, own: Process, rank: int, number: int, rails: Mapping[int, Rail]) -> None:
        """Begin without any.

        Args:
            rank, number, rails: of the link.
        """
        self._own, self._rank, self._number, self._rails = own, rank, number, rails
        self._carrier = own.carrier
        self.making: set[Ends] = set()
        self.troubles = Troubles(own.carrier, number, own.timeout)
        self._failing: dict[int, PairRail] = {}  # of lost rails, by the carrier's index

    async def make(self, connection: socket.socket, both: Ends) -> PairRail:
        """A queue pair for a rail; raises as `pair_up` does."""
        cards = self._own.cards
        if cards is None:
            raise handshake.Malformed(
                "it wants RDMA, which is not in use here; set XVCOMM_RDMA to the same on all ranks"
            )
        self.making.add(both)
        try:
            return await pair_up(cards, connection, both[0])
        finally:
            self.making.discard(both)

    def _all(self) -> list[tuple[int, PairRail]]:
        """By the carrier's index."""
        up = [(index, rail.rdma) for index, rail in self._rails.items() if rail.rdma is not None]
        return [*up, *self._failing.items()]

    def fail(self, why: str, pairs: Sequence[Pair]) -> None:
        """A device has reported that queue pairs cannot be used any more."""
        for index, made in self._all():
            if made.pair in pairs:
                made.why = made.why or why
                self._carrier.drop(index)
                if index in self._failing:
                    self.troubles.explain(made.cause()[0])

    def hear_failure(self, here: int, there: int, *, answer: bool) -> None:
        """The other side has told that its queue pair has failed, by the names of both; see `PairRail.names`."""
        for index, made in self._all():
            if made.names == (here, there):
                made.confirmed = True
                self._carrier.drop(index)
                return
        if not answer and not self.making:  # it was given up here, and forgotten
            self._carrier.report(self._number, here, there, answer=True)

    def give_up(self, index: int, both: Ends, made: PairRail, *, gone: bool) -> None:
        """Let nothing more arrive over the queue pair of a lost rail, and tell the other side, which does the same.

        Args:
            gone: whether the other side is gone, and will not do so.
        """
        why, cause = made.cause()
        made.pair.fail()
        self._failing[index] = made
        self._carrier.report(self._number, *made.names, answer=made.confirmed)
        self._end(index, made, gone=gone)
        if gone:
            return
        if why:
            self.troubles.fail(both, why, follows=made.follows)
            self._warn(both, why, cause)
        elif made.confirmed:
            self.troubles.hear(f"{made.pair.where}: rank {self._rank} has given up its end")

    def say(self, both: Ends, why: str) -> None:
        """Say once why there is no RDMA between two addresses, and keep it for the case that nothing else carries."""
        self.troubles.note(why)
        self._warn(both, why, why)

    def _warn(self, both: Ends, why: str, cause: str) -> None:
        """Say it once for each address of this host and cause, however many ranks are reached from there."""
        if (both[0], cause) not in self._own.said:
            self._own.said.add((both[0], cause))
            notice(f"no RDMA from {both[0]} to {both[1]} of rank {self._rank}; it is tried again: {why}")

    def look(self, *, gone: bool) -> None:
        """Give back those of lost rails of which nothing arrives any more, and tell the other side of the others again."""
        for index, made in list(self._failing.items()):
            if not self._end(index, made, gone=gone):
                self._carrier.report(self._number, *made.names, answer=False)

    def _end(self, index: int, made: PairRail, *, gone: bool) -> bool:
        """Give a failed one back, if nothing of it can arrive at either side any more."""
        if not (made.confirmed or gone):
            return False
        self._carrier.land(index)
        if not self._carrier.drain(index):
            return False
        self._carrier.retire(index)
        made.pair.close()
        self._failing.pop(index, None)
        return True

    def fail_all(self) -> None:
        """Let nothing more arrive over any. The other process has left, or waits for nothing any more."""
        for index, made in self._all():
            self._carrier.drop(index)
            made.pair.fail()

    def give_back(self, until: float) -> None:
        """Give all back after `fail_all`, as far as their devices have ended all requests until a time."""
        for index, made in self._all():
            while not self._end(index, made, gone=True) and time.monotonic() < until:
                time.sleep(0.001)
