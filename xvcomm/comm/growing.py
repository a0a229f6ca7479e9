"""Makes a job of the ranks of another one and of processes that have asked to join it: all of them make it, or none."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from xvcomm.abc.store import NotSet, Store
from xvcomm.comm.shrinking import Shrinking
from xvcomm.config import Config
from xvcomm.engine.context import Context
from xvcomm.engine.session.grown_job import GrownJob
from xvcomm.engine.session.join_requests import JoinReply, JoinRequest, JoinRequests, numbered
from xvcomm.engine.session.pending_request import PendingRequest
from xvcomm.engine.session.session import Session
from xvcomm.engine.session.survivors import Decision
from xvcomm.engine.session.watchdog import Rounds
from xvcomm.errors import DeadlineExceeded, PeerLost, XvcommError
from xvcomm.rendezvous.store.failure import Failure, Outcome, cause, decode_outcome
from xvcomm.rendezvous.store.guarded import GuardedStore
from xvcomm.system import heartbeat
from xvcomm.types.deadline import Deadline
from xvcomm.types.opcode import OpCode

_LOOK_SECONDS = 0.1
_NEWCOMERS_SECONDS = 0.3
_GROWN = "on a communicator of a job that has grown; make it anew by split() of what grow() returned"
_SHARE = 0.5
"""The part of the time that is left in which newcomers must join; in the rest the members go on without one that does not."""
_AGAIN_SECONDS = 3.0
"""How long newcomers may take to ask again after an attempt that failed; the next one goes on without those that do not."""
_SETTLE_SECONDS = 2.0
"""How long the store may take to keep the outcome after the deadline, since the others are to learn of it."""


class Attempt:
    """One attempt of members and newcomers to make the job that they agreed on. The store keeps one outcome for all.

    Ranks are those of the grown job.

    Args:
        requests: to join the grown job.
        lost: the ranks that have ended, as far as this process knows, in words.
        unreachable: see `GuardedStore`.
    """

    def __init__(
        self, reply: JoinReply, requests: JoinRequests, config: Config, deadline: Deadline,
        lost: Callable[[], Mapping[int, str]] = dict[int, str], unreachable: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._rank, self._size, self._config, self._deadline = reply.rank, len(reply.numbers), config, deadline
        self._numbers, self._newcomers = reply.numbers, reply.newcomers
        self._lost, self._unreachable, self._over = lost, unreachable, False
        self._kept = contextlib.ExitStack()
        self._grown = GrownJob(reply.numbers, requests, self._check)
        self._place = GuardedStore(_part(reply.token), requests.store, lambda: None, lambda: self._unreachable())

    def run(self) -> Context | Failure:
        """The grown job's communicator; or why there is none, if that is not this process's own failure, which is raised."""
        session = None
        try:
            session = Session(
                self._place, self._rank, self._size, self._config, self._deadline, self._kept.close, self._grown
            )
            made = Context(session, "0", tuple(range(self._size)), self._deadline, OpCode.INIT)
            outcome = self._confirm(session)
            if outcome is None:
                # Check nothing any more, and let go of the job before, as the grown one keeps this object.
                self._over, self._lost, self._unreachable = True, dict[int, str], lambda: None
                self._grown.requests.begin()
                return made
            raise outcome.error()
        except BaseException as error:
            try:
                outcome = self._settle(error) if isinstance(error, XvcommError) else None
            finally:
                if session is not None:
                    session.give_up(error)
            if outcome is None or outcome.peer == self._rank:
                if outcome is not None and isinstance(late := outcome.error(), DeadlineExceeded):
                    raise late from error
                raise
            return outcome

    def keep(self, close: Callable[[], None]) -> None:
        """Let a function close the store once the grown job is closed."""
        self._kept.callback(close)

    def _check(self) -> None:
        """Raise if the grown job cannot be made any more."""
        if self._over:
            return
        with contextlib.suppress(NotSet):
            outcome = decode_outcome(self._place.get("outcome", Deadline.after(0))).failure
            if outcome is not None:
                raise outcome.error()
        for rank, words in self._lost().items():
            raise PeerLost(words, rank=self._rank, peer=rank)

    def _confirm(self, session: Session) -> Failure | None:
        """Wait until all have made it; None if they have."""
        place, deadline = self._place, self._deadline
        place.set(f"made/{self._rank}", b"", deadline)
        if place.add("made", 1, deadline) == self._size:
            return self._decide(Outcome())
        while True:
            try:
                return decode_outcome(place.get("outcome", Deadline.after(deadline.sooner(_LOOK_SECONDS)))).failure
            except NotSet:
                pass
            try:
                self._check()
            except PeerLost as error:
                return self._settle(error)
            gone = next((rank for rank in range(self._size) if session.liveness.gone(rank)), None)
            if gone is not None:
                return self._settle(PeerLost(f"grow: {self._lost_rank(gone)}", peer=gone))
            if deadline.expired():
                return self._settle(self._missing())

    def _lost_rank(self, rank: int) -> str:
        if rank in self._newcomers:
            return f"{self._newcomers[rank]} has ended, which joined as rank {self._numbers[rank]}"
        return f"rank {self._numbers[rank]} of the job is lost; go on without it by shrink()"

    def _missing(self) -> DeadlineExceeded:
        for rank in range(self._size):
            if not self._place.has(f"made/{rank}"):
                return self._late(rank)
        return DeadlineExceeded("grow: the store did not answer in time", peer=self._rank)

    def _late(self, rank: int) -> DeadlineExceeded:
        """The error for a rank that has not joined in time."""
        number = self._numbers[rank]
        if rank in self._newcomers:
            text = (
                f"{self._newcomers[rank]} did not join as rank {number} in time; the ranks of the job go on without it, and "
                "it may be started again"
            )
        else:
            text = f"rank {number} of the job did not join the newcomers in time; go on by shrink()"
        return DeadlineExceeded(f"grow: {text}", peer=rank)

    def _settle(self, error: XvcommError) -> Failure | None:
        """The outcome, which is this error if there was none; None if all have made it.

        Raises:
            XvcommError: this error, if the store cannot keep it.
        """
        found = cause(error, self._rank, socket.gethostname())
        if isinstance(found, DeadlineExceeded) and found.peer is not None:
            found = self._late(found.peer)
        try:
            return self._decide(Outcome(Failure.of(found)))
        except XvcommError:
            raise error from None

    def _decide(self, outcome: Outcome) -> Failure | None:
        settling = Deadline.after(max(self._deadline.left(), _SETTLE_SECONDS))
        return decode_outcome(self._place.decide("outcome", msgspec.msgpack.encode(outcome), settling)).failure


def _part(token: str) -> str:
    """The part of the store that a grown job uses, by the token of the attempt to make it."""
    return f"grown/{token}"


class Growing:
    """Takes processes that ask to join into a job, together with all its ranks.

    Args:
        shrinking: of the communicator of all ranks.
    """

    def __init__(self, shrinking: Shrinking) -> None:
        self._shrinking, self._session = shrinking, shrinking.context.session
        self._looked = 0.0

    def run(self, deadline: Deadline) -> Context:
        """Close the communicator, and make the new one, in another job if there are newcomers.

        Whether the members go on without a newcomer is decided by the outcome of the attempt, which all read in the store.

        Raises:
            XvcommError: see `Shrinking.run`.
            PeerLost: a rank is lost; `Shrinking.run` goes on without it.
        """
        shrinking = self._shrinking
        decision = shrinking.decision or shrinking.agree(OpCode.GROW, deadline)
        gone = shrinking.lost(decision)
        if gone is not None:
            shrinking.decision = decision  # on which ranks may act that shrink
            raise PeerLost(
                f"grow: {shrinking.name(gone)} is lost, {self._session.liveness.last_words(gone)}; go on without it by shrink()",
                rank=self._session.rank, peer=gone, op="grow",
            )  # fmt: skip
        if decision.decided is not None:
            self._session.join_requests.note(decision.decided)
        newcomers, attempts = list(decision.newcomers), 0
        while newcomers:
            token = f"{decision.token}.{attempts}"
            made = self._attempt(decision, newcomers, token, deadline)
            if isinstance(made, Context):
                return made
            newcomers, attempts = made, attempts + 1
        return shrinking.make(decision, OpCode.GROW, deadline)

    def _attempt(
        self, decision: Decision, newcomers: Sequence[JoinRequest], token: str, deadline: Deadline
    ) -> Context | list[JoinRequest]:
        """Make the grown job; or the newcomers that are left for another attempt, because one has failed."""
        session, members, decided = self._session, decision.members, decision.decided or 0
        before = [session.numbers[rank] for rank in members]
        given = numbered(before, [each.number for each in newcomers])
        numbers = tuple(sorted((*before, *given)))
        place = {number: rank for rank, number in enumerate(numbers)}
        new = {place[number]: each for number, each in zip(given, newcomers, strict=True)}
        old = {place[number]: rank for number, rank in zip(before, members, strict=True)}
        own, joining = place[session.numbers[session.rank]], Deadline.after(deadline.left() * _SHARE)
        who = {rank: each.who for rank, each in new.items()}
        reply = JoinReply(token, own, numbers, who, decided, joining.left())
        replies = {each: msgspec.structs.replace(reply, rank=rank) for rank, each in new.items()}
        withdrawn = dict[int, str]()
        attempt = Attempt(
            reply, session.join_requests.following(decided, _part(token)), session.config, joining,
            partial(self._lost, old, new, withdrawn), session.check_store,
        )  # fmt: skip
        session.join_requests.joining = True
        try:
            if session.rank == members[0]:
                for rank, each in new.items():
                    if not session.join_requests.answer(each, replies[each], joining):
                        withdrawn[rank] = f"grow: {each.who} waits no more"
            made = attempt.run()
        except BaseException:
            session.join_requests.joining = False
            session.join_requests.note(decided, replies)
            raise
        if isinstance(made, Context):
            self._shrinking.end()
            for group in session.supervision.contexts():
                group.lifecycle.close(_GROWN)
            attempt.keep(session.hand_over())
            return made
        session.join_requests.joining = False
        if made.peer in new:
            left = [each for rank, each in new.items() if rank != made.peer]
            again = Deadline.after(min(_AGAIN_SECONDS, deadline.left() * _SHARE))
            try:
                return session.join_requests.again(left, token, again, session.check_store)
            except BaseException:
                session.join_requests.note(decided, replies)
                raise
        session.join_requests.note(decided, replies)
        error = made.error()
        error.rank, error.peer, error.op = session.rank, old.get(made.peer) if made.peer is not None else None, "grow"
        raise error

    def _lost(
        self, old: Mapping[int, int], new: Mapping[int, JoinRequest], withdrawn: Mapping[int, str]
    ) -> Mapping[int, str]:
        session, liveness = self._session, self._session.liveness
        lost = {
            rank: f"grow: {self._shrinking.name(before)} is lost, {liveness.last_words(before)}; go on without it by shrink()"
            for rank, before in old.items()
            if liveness.gone(before)
        }
        if not lost and session.rank == old[min(old)] and time.monotonic() - self._looked > _NEWCOMERS_SECONDS:
            ended = session.join_requests.ended(list(new.values()))
            lost = {rank: f"grow: {each.who} has ended, which joined" for rank, each in new.items() if each in ended}
            self._looked = time.monotonic()
        return lost or withdrawn


def rejoin(store: Store, rank: int, config: Config, deadline: Deadline, on_close: Callable[[], None]) -> Context:
    """Join a job that runs, when its ranks call `grow`; blocks until they do.

    Args:
        store: in which the job has begun.
        rank: the number that this process wants.
        on_close: called once, when everything is closed.

    Raises:
        DeadlineExceeded: they did not in time.
        Aborted: the job has ended, or its ranks do not take this process.
        StoreError: the store's host has not answered for XVCOMM_PEER_TIMEOUT.
    """
    patience = max(config.peer_timeout, heartbeat.LEAST_SECONDS)

    def look() -> None:
        """Wait no more for a host that does not answer: this process has no other way to the job yet."""
        if store.unheard() > patience:
            store.give_up()

    with (
        contextlib.closing(Rounds(look)),
        contextlib.closing(PendingRequest(store, rank, config, deadline)) as request,
    ):
        while True:
            reply = request.answer(deadline)
            # As long as the members wait, so that this one's own time decides nothing for them.
            joining = Deadline.after(reply.seconds)
            requests = JoinRequests(store, config, reply.decided, part=_part(reply.token), runs=False)
            attempt = Attempt(reply, requests, config, joining)
            made = attempt.run()
            if isinstance(made, Context):
                attempt.keep(on_close)
                return made
            request.again(reply.token, deadline)
