"""A process that asks to join a job that runs: its request, from the first message to the reply."""

from __future__ import annotations

import contextlib

import msgspec

from xvcomm.abc.store import NotSet, PrefixStore, Standby, Store
from xvcomm.config import Config
from xvcomm.engine.session.join_requests import (
    COUNT,
    ENDED,
    RANKS,
    REQUESTS,
    JoinReply,
    JoinRequest,
    decode_reply,
    renamed,
)
from xvcomm.engine.session.joining import host_identity
from xvcomm.engine.session.presence import Presence
from xvcomm.engine.session.remaining import Remaining
from xvcomm.engine.session.succession import spare_ports
from xvcomm.errors import Aborted, DeadlineExceeded, XvcommError
from xvcomm.rendezvous.store.join import who
from xvcomm.types.deadline import Deadline

_LEAVE_SECONDS, _LOOK_SECONDS = 1.0, 0.2


class PendingRequest:
    """This process's request to join a job that runs, until it is answered. Closing it withdraws it.

    Args:
        store: in which the job has begun.
        rank: the number that this process wants.
    """

    def __init__(self, store: Store, rank: int, config: Config, deadline: Deadline) -> None:
        place = PrefixStore(REQUESTS, store)
        self._place, self._rank, self._name, self._answered = place, rank, "", False
        self._standby: Standby | None = place.standby(spare_ports(config))
        try:
            presence = Presence.take(config.shm_dir)
            number = str(place.add(COUNT, 1, deadline))
            mine = JoinRequest(
                rank, who(), host_identity(config.shm_dir, config.host), presence.byte,
                self._standby.address if self._standby is not None else "", number,
            )  # fmt: skip
            self._name, self._entry = number, f"request/{number}"
            self._remaining = Remaining(store, f"{REQUESTS}/{RANKS}", config, self._left)
            place.set(self._entry, msgspec.msgpack.encode(mine), deadline)
        except BaseException:
            self.close()
            raise

    def answer(self, deadline: Deadline) -> JoinReply:
        """Wait until the members answer.

        Raises:
            DeadlineExceeded: they did not in time.
            Aborted: they do not take this process, or the job has ended.
        """
        while True:
            with contextlib.suppress(NotSet):
                soon = Deadline.after(deadline.sooner(_LOOK_SECONDS))
                return self._accepted(decode_reply(self._place.get(f"answer/{self._name}", soon)))
            if self._place.has(ENDED) or not self._place.has(self._entry):  # a folder is removed with the job
                raise self._refused("the job has ended")
            if self._remaining.over():
                raise self._refused(
                    "the job has ended, all its ranks have died or left; start the whole job again, without XVCOMM_REJOIN"
                )
            if deadline.expired():
                reply = self._withdraw()
                if reply is not None:
                    return self._accepted(reply)
                raise DeadlineExceeded(
                    "the ranks of the job did not call grow() in time; they take processes in only there. A larger "
                    "XVCOMM_REJOIN_TIMEOUT lets this one wait longer",
                    rank=self._rank, op="init",
                )  # fmt: skip

    def _left(self, job: str, rank: int) -> bool:
        return self._place.has(f"left/{job}/{rank}")

    def _accepted(self, reply: JoinReply) -> JoinReply:
        self._answered = True
        if reply.refusal:
            raise self._refused(reply.refusal)
        return reply

    def _refused(self, why: str) -> Aborted:
        return Aborted(f"this process cannot join: {why}", rank=self._rank, op="init")

    def again(self, token: str, deadline: Deadline) -> None:
        """Ask once more, after an attempt failed that others have ended."""
        self._name, self._answered = renamed(self._name, token), False
        self._place.set(f"again/{self._name}", b"", deadline)

    def _withdraw(self) -> JoinReply | None:
        """Say that this process waits no more; what the members have answered meanwhile, if they have."""
        mine = msgspec.msgpack.encode(JoinReply(refusal="it waits no more"))
        with contextlib.suppress(XvcommError):
            found = self._place.decide(f"answer/{self._name}", mine, Deadline.after(_LEAVE_SECONDS))
            return None if found == mine else decode_reply(found)
        return None

    def close(self) -> None:
        """Wait no more. Idempotent."""
        if self._name and not self._answered:
            self._answered = True
            self._withdraw()
        if self._standby is not None:
            self._standby.close()
