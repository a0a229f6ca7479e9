"""Requests to join a job that runs, as its ranks see and answer them in the store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import msgspec

from xvcomm.abc.store import Add, NotSet, PrefixStore, Set, Store
from xvcomm.config import Config
from xvcomm.engine.session.joining import Joining, host_identity
from xvcomm.engine.session.presence import Presence
from xvcomm.engine.session.remaining import JobRanks
from xvcomm.errors import XvcommError
from xvcomm.rendezvous.store.guarded import GuardedStore
from xvcomm.types.deadline import Deadline

_SETTLE_SECONDS = 1.0
"""How long a newcomer may take between its two messages to the store."""
_LEAVE_SECONDS, _LOOK_SECONDS = 1.0, 0.2


class JoinRequest(msgspec.Struct, frozen=True, array_like=True):
    """A process asks to join.

    Attributes:
        number: the rank that it wants.
        who: in words.
        host: see `host_identity`.
        byte: see `Presence`.
        address: where it listens as long as it waits, see `Standby`; empty if it does not.
        name: of this request; another one after each attempt that failed.
    """

    number: int
    who: str
    host: str
    byte: int
    address: str
    name: str


class JoinReply(msgspec.Struct, frozen=True, array_like=True):
    """What the members answer a process that asks to join.

    Attributes:
        token: of the attempt to make the grown job.
        rank: in it.
        numbers: see `GrownJob`.
        newcomers: in words, by their ranks in it.
        decided: see `JoinRequests.note`.
        seconds: how long the members wait for all to join.
        refusal: why it cannot join; empty if it can.
    """

    token: str = ""
    rank: int = 0
    numbers: tuple[int, ...] = ()
    newcomers: dict[int, str] = {}
    decided: int = 0
    seconds: float = 0.0
    refusal: str = ""


REQUESTS, COUNT, ENDED, RANKS = "requests", "count", "ended", "ranks"
"""The part of the store that requests use; their count, whether the job has ended, and its ranks, in it."""
_decode_request = msgspec.msgpack.Decoder(JoinRequest).decode
decode_reply = msgspec.msgpack.Decoder(JoinReply).decode
_decode_names = msgspec.msgpack.Decoder(list[str]).decode


class JoinRequests:
    """The requests to join a job, as one of its ranks knows them; all ranks come to know the same, by their agreements.

    Attributes:
        store: in which the job has begun.
        joining: whether processes are joining: ranks that leave the job meanwhile have grown into the next one.

    Args:
        store: in which the job has begun.
        decided: the number of requests that were decided before this rank has joined.
        part: of the store that the job uses; empty if it uses all of it.
        runs: whether the job runs; else `begin` says that it does.
    """

    def __init__(self, store: Store, config: Config, decided: int = 0, *, part: str = "", runs: bool = True) -> None:
        self.store, self._config, self._part, self._runs = store, config, part, runs
        self._place, self._decided, self.joining = PrefixStore(REQUESTS, store), decided, False
        self._failed: dict[JoinRequest, JoinReply] = {}
        self._closed = self._leads = False

    def count(self, deadline: Deadline) -> int:
        """How many wait, those among them that have ended meanwhile; one request to the store."""
        return 0 if self._closed else self._counted(deadline) - self._decided + len(self._failed)

    def waiting(self, deadline: Deadline) -> tuple[list[JoinRequest], int]:
        """Those that wait and live, as far as can be told, and the number of requests up to now."""
        if self._closed:
            return [], self._decided
        count, found = self._counted(deadline), list[JoinRequest]()
        for each, failed in self._failed.items():
            again = msgspec.structs.replace(each, name=renamed(each.name, failed.token))
            # The rank that was to answer may have died before.
            if self.answer(each, failed, deadline) and self._waits(again.name):
                found.append(again)
        for number in range(self._decided + 1, count + 1):
            if not self._waits(str(number)):
                continue
            try:
                settling = Deadline.after(deadline.sooner(_SETTLE_SECONDS))
                found.append(_decode_request(self._place.get(f"request/{number}", settling)))
            except NotSet:
                self.refuse(str(number), "it did not say in time who it is; start it again", deadline)
        ended = self.ended(found)
        return [each for each in found if each not in ended], count

    def ended(self, requests: Sequence[JoinRequest]) -> list[JoinRequest]:
        """Those of some requests whose processes have ended, as far as this process can tell."""
        presence, host = Presence.take(self._config.shm_dir), host_identity(self._config.shm_dir, self._config.host)
        near = [each for each in requests if each.host == host]
        listening = {each.address: each for each in requests if each.address and each not in near}
        refusing = self._place.ended(listening) if listening else ()
        return [each for each in near if not presence.held(each.byte)] + [listening[address] for address in refusing]

    def answer(self, request: JoinRequest, reply: JoinReply, deadline: Deadline) -> bool:
        """Answer a newcomer that all members have agreed on, unless another rank has done so; whether it still waits."""
        mine = msgspec.msgpack.encode(reply)
        return not decode_reply(self._place.decide(f"answer/{request.name}", mine, deadline)).refusal

    def again(
        self, requests: Sequence[JoinRequest], token: str, deadline: Deadline, check: Callable[[], None]
    ) -> list[JoinRequest]:
        """Those that are made again by the deadline, after an attempt that failed; sooner if all have. Others are refused.

        The store keeps one decision for all members.

        Args:
            token: of the attempt.
            check: see `GuardedStore`.
        """
        if not requests:
            return []
        place = GuardedStore(REQUESTS, self.store, check, check)
        names = {each: renamed(each.name, token) for each in requests}
        awaited = list(requests)
        while awaited:
            try:
                keys = [f"again/{names[each]}" for each in awaited]
                place.wait(keys, Deadline.after(deadline.sooner(_LOOK_SECONDS)))
                break
            except NotSet:
                ended = self.ended(awaited)
                awaited = [] if deadline.expired() else [each for each in awaited if each not in ended]
        came, settling = [n for n in names.values() if place.has(f"again/{n}")], Deadline.after(_LEAVE_SECONDS)
        decided = _decode_names(place.decide(f"again/{token}", msgspec.msgpack.encode(came), settling))
        for name in set(names.values()).difference(decided):
            self.refuse(name, "it did not answer the ranks of the job in time; start it again", settling)
        return [msgspec.structs.replace(each, name=name) for each, name in names.items() if name in decided]

    def refuse(self, name: str, why: str, deadline: Deadline) -> None:
        """Answer a request that comes to nothing."""
        self._place.decide(f"answer/{name}", msgspec.msgpack.encode(JoinReply(refusal=why)), deadline)

    def note(self, decided: int, failed: Mapping[JoinRequest, JoinReply] = MappingProxyType({})) -> None:
        """The members have decided on the requests up to a number.

        Args:
            failed: those that wait again, with the reply of the attempt that failed.
        """
        self._decided, self._failed = decided, dict(failed)

    def following(self, decided: int, part: str) -> JoinRequests:
        """Those to the job that this one is to grow into, after so many were decided; see the constructor."""
        return JoinRequests(self.store, self._config, decided, part=part, runs=False)

    def meet(self, rank: int, joined: Sequence[Joining]) -> None:
        """This rank knows all ranks of the job."""
        self._ranks = JobRanks(joined[0].job, self._part, {})
        for each in joined:
            self._ranks.bytes.setdefault(each.info.host, {})[each.info.rank] = each.byte
        self._leads = rank == 0
        if self._runs:
            self.begin()

    def begin(self) -> None:
        """The job runs: when all its ranks have left, it has ended. Rank 0 tells those that wait which ones these are."""
        self._runs = True
        if self._leads:
            with contextlib.suppress(XvcommError):
                self._place.set(RANKS, msgspec.msgpack.encode(self._ranks), Deadline.after(_SETTLE_SECONDS))

    def close(self) -> None:
        """No rank of this job takes processes in any more: it has grown into another one, or the store is lost."""
        self._closed = True

    def leave(self, job: tuple[str, int, int], lost: Collection[int], left: Callable[[int], bool]) -> None:
        """This rank leaves the job; the last one tells those that wait, and those that come later, that it has ended.

        Args:
            job: its name, this rank, and the number of ranks; see `Session`.
            lost: ranks that have ended.
            left: whether such a rank has left before in good order.
        """
        if self._closed or not self._runs:
            return
        name, rank, size = job
        with contextlib.suppress(XvcommError):
            soon, died = Deadline.after(_LEAVE_SECONDS), {other for other in list(lost) if not left(other)}
            (_, gone), _ = self._place.exchange(
                [Set(f"left/{name}/{rank}", b""), Add(f"left/{name}", 1)], deadline=soon
            )
            if int(gone) + len(died) >= size:
                if died:  # A rank that counts as lost, because it cannot be reached, may have left, too.
                    others = [f"left/{name}/{other}" for other in range(size) if other not in died]
                    self._place.wait(others, Deadline.after(0))
                self._place.set(ENDED, b"", soon)

    def _waits(self, name: str) -> bool:
        """Whether a request is without an answer, and not withdrawn."""
        return not self._place.has(f"answer/{name}")

    def _counted(self, deadline: Deadline) -> int:
        try:
            return int(self._place.get(COUNT, Deadline.after(0)))
        except NotSet:
            return self._decided


def renamed(name: str, token: str) -> str:
    """The name of a request after an attempt that failed."""
    return f"{name}-{token}"


def numbered(members: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """The numbers of those that join: what each wants, if that is free, or else the next one after all others.

    Args:
        members: the numbers that are taken.
    """
    taken, found = set(members), []
    for number in wanted:
        given = max((*taken, *wanted)) + 1 if number in taken else number
        taken.add(given)
        found.append(given)
    return found
