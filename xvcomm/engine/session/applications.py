"""Processes that apply to join a job that runs: what they and its ranks tell each other through the store."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from xvcomm.abc.store import NotSet, PrefixStore, Standby, Store
from xvcomm.config import Config
from xvcomm.engine.session.joining import Joining, host_identity
from xvcomm.engine.session.presence import Presence
from xvcomm.engine.session.remaining import JobRanks, Remaining
from xvcomm.engine.session.succession import spare_ports
from xvcomm.errors import Aborted, DeadlineExceeded, XvcommError
from xvcomm.rendezvous.store.guarded import GuardedStore
from xvcomm.types.deadline import Deadline

_SETTLE_SECONDS = 1.0
"""How long an applicant may take between its two requests."""
_LEAVE_SECONDS, _LOOK_SECONDS = 1.0, 0.2


class Applicant(msgspec.Struct, frozen=True, array_like=True):
    """A process that applies.

    Attributes:
        number: the rank that it wants.
        who: in words.
        host: see `host_identity`.
        byte: see `Presence`.
        address: where it listens as long as it waits, see `Standby`; empty if it does not.
        name: of its application; another one after each attempt that failed.
    """

    number: int
    who: str
    host: str
    byte: int
    address: str
    name: str


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """What the members answer an applicant.

    Attributes:
        token: of the attempt to make the grown job.
        rank: in it.
        numbers: see `Growth`.
        newcomers: in words, by their ranks in it.
        applied: see `Applications.note`.
        seconds: how long the members wait for all to join.
        refusal: why it cannot join; empty if it can.
    """

    token: str = ""
    rank: int = 0
    numbers: tuple[int, ...] = ()
    newcomers: dict[int, str] = {}
    applied: int = 0
    seconds: float = 0.0
    refusal: str = ""


_ENDED, _RANKS = "ended", "ranks"
_decode_applicant = msgspec.msgpack.Decoder(Applicant).decode
_decode_offer = msgspec.msgpack.Decoder(Offer).decode
_decode_names = msgspec.msgpack.Decoder(list[str]).decode


class Applications:
    """The applications to a job, as one of its ranks knows them; all ranks come to know the same, by their agreements.

    Attributes:
        store: in which the job has begun.
        joining: whether processes are joining: ranks that leave the job meanwhile have grown into the next one.

    Args:
        store: in which the job has begun.
        applied: the number of applications that were decided before this rank has joined.
        part: of the store that the job uses; empty if it uses all of it.
        runs: whether the job runs; else `begin` says that it does.
    """

    def __init__(self, store: Store, config: Config, applied: int = 0, *, part: str = "", runs: bool = True) -> None:
        self.store, self._config, self._part, self._runs = store, config, part, runs
        self._place, self._applied, self.joining = PrefixStore("applying", store), applied, False
        self._failed: dict[Applicant, Offer] = {}
        self._closed = self._leads = False

    def count(self, deadline: Deadline) -> int:
        """How many wait, those among them that have ended meanwhile; one request to the store."""
        return 0 if self._closed else self._counted(deadline) - self._applied + len(self._failed)

    def waiting(self, deadline: Deadline) -> tuple[list[Applicant], int]:
        """Those that wait and live, as far as can be told, and the number of applications up to now."""
        if self._closed:
            return [], self._applied
        applied, found = self._counted(deadline), list[Applicant]()
        for each, failed in self._failed.items():
            again = msgspec.structs.replace(each, name=renamed(each.name, failed.token))
            # The rank that was to make the offer may have died before.
            if self.offer(each, failed, deadline) and self._waits(again.name):
                found.append(again)
        for number in range(self._applied + 1, applied + 1):
            if not self._waits(str(number)):
                continue
            try:
                settling = Deadline.after(deadline.sooner(_SETTLE_SECONDS))
                found.append(_decode_applicant(self._place.get(f"applicant/{number}", settling)))
            except NotSet:
                self.refuse(str(number), "it did not say in time who it is; start it again", deadline)
        ended = self.ended(found)
        return [each for each in found if each not in ended], applied

    def ended(self, applicants: Sequence[Applicant]) -> list[Applicant]:
        """Those of some applicants whose processes have ended, as far as this process can tell."""
        presence, host = Presence.take(self._config.shm_dir), host_identity(self._config.shm_dir, self._config.host)
        near = [each for each in applicants if each.host == host]
        listening = {each.address: each for each in applicants if each.address and each not in near}
        refusing = self._place.ended(listening) if listening else ()
        return [each for each in near if not presence.held(each.byte)] + [listening[address] for address in refusing]

    def offer(self, applicant: Applicant, offer: Offer, deadline: Deadline) -> bool:
        """Answer an applicant that all members have agreed on, unless another rank has done so; whether it still waits."""
        mine = msgspec.msgpack.encode(offer)
        return not _decode_offer(self._place.decide(f"answer/{applicant.name}", mine, deadline)).refusal

    def again(
        self, applicants: Sequence[Applicant], token: str, deadline: Deadline, check: Callable[[], None]
    ) -> list[Applicant]:
        """Those that have applied again at the deadline, after an attempt that failed; sooner if all have. Others are refused.

        The store keeps one decision for all members.

        Args:
            token: of the attempt.
            check: see `GuardedStore`.
        """
        if not applicants:
            return []
        place = GuardedStore("applying", self.store, check, check)
        names = {each: renamed(each.name, token) for each in applicants}
        awaited = list(applicants)
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
        """Answer an application that comes to nothing."""
        self._place.decide(f"answer/{name}", msgspec.msgpack.encode(Offer(refusal=why)), deadline)

    def note(self, applied: int, failed: Mapping[Applicant, Offer] = MappingProxyType({})) -> None:
        """The members have decided on the applications up to a number.

        Args:
            failed: those that wait again, with the offer of the attempt that failed.
        """
        self._applied, self._failed = applied, dict(failed)

    def following(self, applied: int, part: str) -> Applications:
        """Those to the job that this one is to grow into, after so many were decided; see the constructor."""
        return Applications(self.store, self._config, applied, part=part, runs=False)

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
                self._place.set(_RANKS, msgspec.msgpack.encode(self._ranks), Deadline.after(_SETTLE_SECONDS))

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
            self._place.set(f"left/{name}/{rank}", b"", soon)
            if self._place.add(f"left/{name}", 1, soon) + len(died) >= size:
                # A rank that counts as lost, because it cannot be reached, may have left, too.
                others = [f"left/{name}/{other}" for other in range(size) if other not in died]
                self._place.wait(others, Deadline.after(0))
                self._place.set(_ENDED, b"", soon)

    def _waits(self, name: str) -> bool:
        """Whether an application is without an answer, and not withdrawn."""
        return not self._place.has(f"answer/{name}")

    def _counted(self, deadline: Deadline) -> int:
        try:
            return int(self._place.get("applied", Deadline.after(0)))
        except NotSet:
            return self._applied


@dataclass(frozen=True, slots=True)
class Growth:
    """What a job that others have grown into knows from the start.

    Attributes:
        numbers: the number of each rank, by which programs know it: the one in the job that the first ranks joined.
        applications: to it.
        check: called while ranks wait for each other in the store; raises if the job cannot be made any more.
    """

    numbers: tuple[int, ...]
    applications: Applications
    check: Callable[[], None]


def part(prefix: str, store: Store, growth: Growth | None) -> Store:
    """A part of a store in which ranks join; waits end early there if the job is one that others have grown into."""
    return PrefixStore(prefix, store) if growth is None else GuardedStore(prefix, store, growth.check)


class Application:
    """One process's application to join a job that runs. Closing it withdraws it, unless it was answered.

    Args:
        store: in which the job has begun.
        rank: the number that this process wants.
    """

    def __init__(self, store: Store, rank: int, config: Config, deadline: Deadline) -> None:
        place = PrefixStore("applying", store)
        self._place, self._rank, self._name, self._answered = place, rank, "", False
        self._standby: Standby | None = place.standby(spare_ports(config))
        try:
            presence = Presence.take(config.shm_dir)
            number = str(place.add("applied", 1, deadline))
            mine = Applicant(
                rank, f"process {os.getpid()} on {socket.gethostname()}", host_identity(config.shm_dir, config.host),
                presence.byte, self._standby.address if self._standby is not None else "", number,
            )  # fmt: skip
            self._name, self._entry = number, f"applicant/{number}"
            self._remaining = Remaining(store, f"applying/{_RANKS}", config, self._left)
            place.set(self._entry, msgspec.msgpack.encode(mine), deadline)
        except BaseException:
            self.close()
            raise

    def answer(self, deadline: Deadline) -> Offer:
        """Wait until the members answer.

        Raises:
            DeadlineExceeded: they did not in time.
            Aborted: they do not take this process, or the job has ended.
        """
        while True:
            with contextlib.suppress(NotSet):
                soon = Deadline.after(deadline.sooner(_LOOK_SECONDS))
                return self._accepted(_decode_offer(self._place.get(f"answer/{self._name}", soon)))
            if self._place.has(_ENDED) or not self._place.has(self._entry):  # a folder is removed with the job
                raise self._refused("the job has ended")
            if self._remaining.over():
                raise self._refused(
                    "the job has ended, all its ranks have died or left; start the whole job again, without XVCOMM_REJOIN"
                )
            if deadline.expired():
                offer = self._withdraw()
                if offer is not None:
                    return self._accepted(offer)
                raise DeadlineExceeded(
                    "the ranks of the job did not call grow() in time; they take processes in only there. A larger "
                    "XVCOMM_REJOIN_TIMEOUT lets this one wait longer",
                    rank=self._rank, op="init",
                )  # fmt: skip

    def _left(self, job: str, rank: int) -> bool:
        return self._place.has(f"left/{job}/{rank}")

    def _accepted(self, offer: Offer) -> Offer:
        self._answered = True
        if offer.refusal:
            raise self._refused(offer.refusal)
        return offer

    def _refused(self, why: str) -> Aborted:
        return Aborted(f"this process cannot join: {why}", rank=self._rank, op="init")

    def again(self, token: str, deadline: Deadline) -> None:
        """Apply once more, after an attempt failed that others have ended."""
        self._name, self._answered = renamed(self._name, token), False
        self._place.set(f"again/{self._name}", b"", deadline)

    def _withdraw(self) -> Offer | None:
        """Say that this process waits no more; what the members have offered meanwhile, if they have."""
        mine = msgspec.msgpack.encode(Offer(refusal="it waits no more"))
        with contextlib.suppress(XvcommError):
            found = self._place.decide(f"answer/{self._name}", mine, Deadline.after(_LEAVE_SECONDS))
            return None if found == mine else _decode_offer(found)
        return None

    def close(self) -> None:
        """Wait no more. Idempotent."""
        if self._name and not self._answered:
            self._answered = True
            self._withdraw()
        if self._standby is not None:
            self._standby.close()


def renamed(name: str, token: str) -> str:
    """The name of an application after an attempt that failed."""
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
