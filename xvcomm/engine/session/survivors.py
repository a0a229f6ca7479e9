"""Agreement of a communicator's ranks, through the job's store, on who goes on: those that are left, and who joins them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from xvcomm.abc.store import NotSet, PrefixStore, Store
from xvcomm.engine.session.join_requests import JoinRequest
from xvcomm.engine.session.session import Session
from xvcomm.errors import DeadlineExceeded, StoreError
from xvcomm.types.deadline import Deadline

_LOOK_SECONDS, _PAUSE_SECONDS = 0.1, 0.02
_DOUBT_SECONDS = 0.3
"""After this time a rank of another host that has not come is tried: the store may not tell of its end."""
DISCORD_SECONDS = 2.0
"""How long the ranks that have come may take to agree on whether one of them is lost, before some are left out."""


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of one round, for all ranks that came. Ranks are numbers of the whole job.

    Attributes:
        members: the ranks that go on, in the order of the communicator; none if some did not come.
        late: the ranks that did not come in time.
        token: differs from round to round.
        by: the rank that has decided.
        newcomers: the processes that join; none unless all members are left and take processes in.
        decided: the number of join requests that are decided with it, see `JoinRequests.note`; None if it is not about them.
    """

    members: tuple[int, ...]
    late: tuple[int, ...]
    token: str
    by: int
    newcomers: tuple[JoinRequest, ...] = ()
    decided: int | None = None


class _Arrival(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says when it comes.

    Attributes:
        lost: the ranks that it has lost, and those that it leaves out.
        grows: whether it takes processes in.
        excluded: the ranks that it leaves out.
    """

    lost: tuple[int, ...]
    grows: bool
    excluded: tuple[int, ...]


_decode_decision = msgspec.msgpack.Decoder(Decision).decode
_decode_arrival = msgspec.msgpack.Decoder(_Arrival).decode


class Survivors:
    """The agreements of one communicator and of those that it was shrunk to, one after the other.

    In each round every rank says that it has come, and which others are gone as far as it knows. The lowest rank that is left
    decides as soon as all others that are left have come; if it dies, the next one does. A rank that others leave out, though it
    lives, does not decide. The store keeps the first decision.
    A rank that dies afterwards is missed when the new communicator is made, and all others come to the next round.

    Attributes:
        path: of the first communicator.
        rounds: how many there have been.
    """

    def __init__(self, session: Session, path: str) -> None:
        self.path, self.rounds = path, 0
        self._session, self._generation = session, b""

    def agree(
        self, ranks: Sequence[int], departed: set[int], deadline: Deadline, come: Callable[[], None],
        hear: Callable[[], None], *, grows: bool, since: int, excluded: Collection[int] = (),
    ) -> Decision:  # fmt: skip
        """One round; blocks until it is decided, at the latest at the deadline of the rank whose deadline is the first.

        Args:
            ranks: of the communicator, in its order.
            departed: those of them that have closed it, as far as this rank knows; without those that have come, afterwards.
            come: called once the others know that this rank has come.
            hear: adds to `departed` those of which this rank has learnt meanwhile, each once.
            grows: whether this rank takes in processes that have asked to join; none are if one of the ranks does not.
            since: the first round of this communicator.
            excluded: those of the ranks that are left out, though they may live.

        Raises:
            DeadlineExceeded: the store did not answer in time.
            PeerLost: the store is lost, and no rank can serve another one.
            StoreError: the store could not be reached until the deadline.
        """
        session = self._session
        while True:
            generation = None
            try:
                session.follow_store(deadline)
                generation = session.succession.generation
                if self._generation != session.succession.generation:
                    self._generation, self.rounds = session.succession.generation, 0
                    hear()
                    departed.clear()  # a rank that has come in another store has closed the communicator, too
                first, place = (f"shrink/{self.path}/{number}" for number in (since, self.rounds))
                decision = _Round(session, first, place, ranks, deadline, grows, excluded).run(departed, come, hear)
            except (StoreError, DeadlineExceeded) as error:  # a store that does not answer may be out of reach
                if deadline.expired():
                    raise
                if isinstance(error, StoreError):
                    session.succession.note_unreachable(generation)
                time.sleep(_PAUSE_SECONDS)
                continue
            if decision is not None:
                self.rounds += 1
                return decision


class _Round:
    """One round of `Survivors`.

    Args:
        first, place: prefix of the keys in the store, of the communicator's first round and of this one.
        ranks, grows, excluded: see `Survivors.agree`.
    """

    def __init__(
        self, session: Session, first: str, place: str, ranks: Sequence[int], deadline: Deadline, grows: bool,
        excluded: Collection[int],
    ) -> None:  # fmt: skip
        self._first = PrefixStore(first, session.store)
        self._session, self._place, self._ranks, self._grows = session, PrefixStore(place, session.store), ranks, grows
        self._deadline, self._begun = deadline, time.monotonic()
        self._generation = session.succession.generation
        self._gone, self._excluded = set(excluded), tuple(sorted(excluded))
        self._departed = set[int]()
        self._doubting = -1

    def run(self, departed: set[int], come: Callable[[], None], hear: Callable[[], None]) -> Decision | None:
        """The decision; None if the process has ended that serves the store, or another thread has left that."""
        session, place = self._session, self._place
        self._departed = departed
        mine = _Arrival(tuple(sorted(self._lost())), self._grows, self._excluded)
        place.set(f"here/{session.rank}", msgspec.msgpack.encode(mine), self._deadline)
        come()
        while session.succession.generation == self._generation and not session.succession.due():
            hear()
            left = self._left()
            leads = left[0] == session.rank
            decision = self._lead(left) if leads else self._decision(self._soon())
            if decision is not None:
                return decision
            if self._deadline.expired():
                return self._give_up(left)
            if self._doubting != left[0] and time.monotonic() - self._begun > _DOUBT_SECONDS:
                self._doubting = left[0]
                session.liveness.doubt(self._missing(left if leads else left[:1]))
        return None

    def _left(self) -> list[int]:
        """The ranks that are left as far as this one knows, the one that decides first.

        A rank that has closed the communicator is left if it did so because it came, in this round or an earlier one. Only the
        one that decides asks the store for all of these: the last of many ranks find that most have closed it.
        """
        gone = self._lost()
        left = [rank for rank in self._ranks if rank not in gone]
        while left[0] in self._departed and not _came(self._first, left[0]):
            del left[0]
        self._departed.discard(left[0])
        if left[0] == self._session.rank:
            self._departed -= {rank for rank in self._departed if _came(self._first, rank)}
        return [left[0], *(rank for rank in left[1:] if rank not in self._departed)]

    def _lost(self) -> set[int]:
        """The ranks that are gone, as far as this one knows."""
        own = self._session.rank
        self._gone.update(rank for rank in self._ranks if rank != own and self._session.liveness.gone(rank))
        return self._gone

    def _decision(self, deadline: Deadline) -> Decision | None:
        """The decision, if another rank decides it in time."""
        try:
            return _decode_decision(self._place.get("decision", deadline))
        except NotSet:
            return None

    def _lead(self, left: Sequence[int]) -> Decision | None:
        """Decide, if all ranks that are left come soon."""
        try:
            self._place.wait([f"here/{rank}" for rank in left], self._soon())
        except NotSet:
            return self._decision(Deadline.after(0))
        infos = self._session.infos
        came = {rank: self._arrival(rank, self._soon()) for rank in left}
        if self._unwanted(came) is not None:
            return self._decision(self._soon())
        told = {rank: arrival.lost for rank, arrival in came.items()}
        for rank, others in told.items():  # a rank of the same host knows it
            self._gone.update(other for other in others if infos[other].host == infos[rank].host)
        if self._gone.intersection(left):
            return None
        members = _joined(left, told)
        if len(members) < len(left) and not self._settled():
            time.sleep(self._deadline.sooner(_LOOK_SECONDS))
            return None
        if len(members) < len(self._ranks) or not all(arrival.grows for arrival in came.values()):
            return self._decide(members, ())
        return self._decide(members, (), *self._session.join_requests.waiting(self._deadline))

    def _arrival(self, rank: int, deadline: Deadline) -> _Arrival:
        return _decode_arrival(self._place.get(f"here/{rank}", deadline))

    def _unwanted(self, came: Mapping[int, _Arrival]) -> int | None:
        """A rank that has come and leaves this one out."""
        return next((rank for rank, arrival in came.items() if self._session.rank in arrival.excluded), None)

    def _settled(self) -> bool:
        """Whether ranks that have come, and do not reach each other, have had time to find out which of them is lost."""
        return self._deadline.expired() or time.monotonic() - self._begun > DISCORD_SECONDS

    def _give_up(self, left: Sequence[int]) -> Decision:
        """The decision once this rank's deadline has passed: the first rank for which it has finds out who is missing.

        Raises:
            DeadlineExceeded: others leave this rank out, and have longer to agree; or they leave out other ranks than this one.
        """
        settling, own = Deadline.after(DISCORD_SECONDS), self._session.rank
        missing = self._missing(left)
        came = {rank: self._arrival(rank, settling) for rank in left if rank not in missing}
        if (by := self._unwanted(came)) is not None:
            raise DeadlineExceeded(
                f"rank {by} of the job leaves out this rank, {own}, and the others have not agreed yet; call it again to learn "
                "of the outcome, or end this process",
                rank=own,
                peer=by,
            )
        named = {own: self._excluded} | {rank: arrival.excluded for rank, arrival in came.items()}
        if len(set(named.values())) > 1:
            each = ", ".join(f"rank {rank} {list(ranks) or 'none'}" for rank, ranks in sorted(named.items()))
            raise DeadlineExceeded(
                f"the ranks of the job exclude different ranks: {each}; all that go on must name the same", rank=own
            )
        other = self._decision(settling) if self._place.add("given up", 1, settling) > 1 else None
        return other or self._decide((), missing or left[:1])

    def _decide(
        self, members: Sequence[int], late: Sequence[int], newcomers: Sequence[JoinRequest] = (),
        decided: int | None = None,
    ) -> Decision:  # fmt: skip
        token, own = secrets.token_hex(4), self._session.rank
        mine = Decision(tuple(members), tuple(late), token, own, tuple(newcomers), decided)
        # Beyond the deadline, since the others are to learn of it.
        settling = Deadline.after(max(self._deadline.left(), DISCORD_SECONDS))
        return _decode_decision(self._place.decide("decision", msgspec.msgpack.encode(mine), settling))

    def _missing(self, left: Sequence[int]) -> list[int]:
        return [rank for rank in left if not _came(self._place, rank)]

    def _soon(self) -> Deadline:
        return Deadline.after(self._deadline.sooner(_LOOK_SECONDS))


def _came(place: Store, rank: int) -> bool:
    """Whether a rank has come to a round."""
    return place.has(f"here/{rank}")


def _joined(ranks: Sequence[int], lost: Mapping[int, Collection[int]]) -> list[int]:
    """The ranks that reach each other: of two where one has lost the other, the lower one.

    Args:
        lost: the ranks that each of them has lost.
    """
    kept: list[int] = []
    for rank in ranks:
        if not any(rank in lost[other] or other in lost[rank] for other in kept):
            kept.append(rank)
    return kept
