"""Which process serves the job's store, and which one does when that has ended."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence

from xvcomm.config import Config
from xvcomm.engine.session.joining import Place
from xvcomm.errors import AuthenticationError, DeadlineExceeded, PeerLost, StoreError
from xvcomm.rendezvous.store.moving import MovingStore
from xvcomm.types.deadline import Deadline

_GENERATION = "generation"
_TRY_SECONDS, _ANSWER_SECONDS, _PAUSE_SECONDS = 0.3, 2.0, 0.02


def spare_ports(config: Config) -> Sequence[int]:
    """The ports that a rank may keep for a successor of the store; none if they may be needed for other hosts' connections."""
    ports = config.port_range()
    if not config.ports:
        return ports
    needed = config.local_size or len(ports)
    return ports[needed:] if len(ports) >= 2 * needed else ()


class Succession:
    """Follows the job's store to another process, once the one that serves it has ended.

    Every rank keeps a port on which it can serve a successor, and has told its address to all when the job began. The lowest rank
    that lives serves: when another one asks for it, or when it needs the store itself. The successor is empty at first.

    Args:
        store: of the job; everything that uses it keeps this object.
        rank: of this process.
        ports: to try for other hosts; none if this rank is not to serve.
        gone: whether a rank has died or left.
        stricken: whether a rank of the same host has died: then the whole host may be out of reach.
        doubt: finds out which of some ranks are lost; it does not wait for that.

    Attributes:
        place: where this rank can serve.
        server: the rank with which the store ends; None if it ends with no rank.
        generation: differs from store to store, and is equal on all ranks that use the same one.
    """

    def __init__(
        self, store: MovingStore, rank: int, ports: Sequence[int], gone: Callable[[int], bool],
        stricken: Callable[[int], bool], doubt: Callable[[Sequence[int]], None],
    ) -> None:  # fmt: skip
        self._store, self._rank, self._gone, self._stricken, self._doubt = store, rank, gone, stricken, doubt
        self._standby = store.standby(ports) if ports else None
        self.place = Place(self._standby.address, self._standby.local) if self._standby is not None else Place()
        self.server: int | None = None
        self.generation = b""
        self._addresses: Sequence[str] = ()
        self._passed: set[int] = set()
        self._unreachable = False
        self._answered = False

    def open(self, places: Sequence[Place], server: int | None) -> None:
        """Learn where each rank can serve a successor.

        Args:
            places: by rank. Local ones are of use only if all are.
            server: the rank with which the store ends; None if it ends with no rank.
        """
        usable = all(place.local for place in places)
        self._addresses = [place.address if usable or not place.local else "" for place in places]
        self.server = server

    @property
    def suspect(self) -> int:
        """The rank that serves the store, as far as this one can tell: usually rank 0."""
        return 0 if self.server is None else self.server

    def look(self) -> None:
        """Serve a successor if it is due and another rank waits for it; call it regularly. Never blocks."""
        if self._standby is not None and self._standby.wanted() and self.due():
            self._standby.serve()

    def ended(self, ranks: Sequence[int]) -> list[int]:
        """Those of some ranks that have ended or left, as far as can be told by what they kept for a successor."""
        of = {self._addresses[rank]: rank for rank in ranks if self._addresses[rank]}
        return sorted(of[address] for address in self._store.ended(of))

    def note_unreachable(self, generation: bytes | None) -> None:
        """The store of this generation cannot be reached; the present one, if None.

        Nothing is noted of an earlier one: calls on it fail as soon as another thread has left it.
        """
        self._unreachable = self._unreachable or generation in (None, self.generation)

    def due(self) -> bool:
        """Whether the store has ended, will soon, or has to be tried, because ranks beside its server are lost.

        For the rank that serves it, it is there: if that served a successor as well, some ranks would use the one and others
        the other.
        """
        if self.server == self._rank:
            return False
        if self._unreachable or self.server is None:
            return self._unreachable
        return self._gone(self.server) or (not self._answered and self._stricken(self.server))

    def follow(self, deadline: Deadline, leaving: Callable[[], None]) -> None:
        """Use the successor from now on, if the store has ended; blocks until it is served, or the store answers after all. One
        thread may call it at a time.

        Args:
            leaving: called before the store so far is closed.

        Raises:
            PeerLost: no rank can serve it.
            DeadlineExceeded: names the rank that should.
        """
        if not self.due():
            return
        # At once, since each of them would be tried as a successor until it counts as lost.
        self._doubt([rank for rank in range(len(self._addresses)) if self._lives(rank) and self._stricken(rank)])
        if not self._answers():
            self._move(deadline, leaving)

    def _answers(self) -> bool:
        """Whether the store answers nevertheless, and its server has not left."""
        if self.server is not None and self._gone(self.server):
            return False
        try:
            self._store.wait([], Deadline.after(_TRY_SECONDS))
        except (StoreError, DeadlineExceeded):
            return False
        self._unreachable, self._answered = False, True
        return True

    def _move(self, deadline: Deadline, leaving: Callable[[], None]) -> None:
        while True:
            following = next((r for r, address in enumerate(self._addresses) if address and self._lives(r)), None)
            if following is None:
                raise PeerLost(
                    "the process that served the job's store has ended, and no rank that is left can serve another one; "
                    "restart the job",
                    rank=self._rank, peer=self.server,
                )  # fmt: skip
            if following == self._rank and self._standby is not None:
                self._standby.serve()
            try:
                found = self._store.successor(self._addresses[following], Deadline.after(deadline.sooner(_TRY_SECONDS)))
                generation = found.decide(_GENERATION, secrets.token_bytes(8), Deadline.after(_ANSWER_SECONDS))
            except (StoreError, DeadlineExceeded, AuthenticationError) as error:
                if not (isinstance(error, DeadlineExceeded) or self._may_return(following, error)):
                    self._passed.add(following)  # nothing listens there, another program does, or nobody is reached
                if not self._lives(following):
                    continue
                if self._answers():  # it was slow, or out of reach for a moment: nobody else serves a successor
                    return
                if deadline.expired():
                    raise DeadlineExceeded(
                        f"rank {following} of the job has not served the job's store in time, in place of the process that "
                        "served it before; it is stopped or very slow",
                        rank=self._rank, peer=following,
                    ) from None  # fmt: skip
                time.sleep(_PAUSE_SECONDS)
            else:
                # The same store, which answers again. To leave it would tell the others that this rank has died.
                if generation == self.generation and self._answers():
                    found.close()
                    return
                leaving()
                self._store.move(found)
                self.server, self._unreachable, self._answered = following, False, False
                self.generation = generation
                return

    def _may_return(self, rank: int, error: Exception) -> bool:
        """Whether a rank that is not reached serves the store so far and has not ended: others may reach it, and use that."""
        return rank == self.server and isinstance(error, StoreError) and not self.ended([rank])

    def _lives(self, rank: int) -> bool:
        return rank == self._rank or not (rank in self._passed or self._gone(rank))

    def close(self) -> None:
        """Serve no successor any more; waits a while for those who use it. Idempotent."""
        if self._standby is not None:
            self._standby.close()
