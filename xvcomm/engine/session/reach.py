"""How this rank reaches those of the job: the transport that joins it with each, and what can be asked over it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from xvcomm.abc.transport import Transport, choose
from xvcomm.engine.session.joining import Joining
from xvcomm.trace.format import Answer, Question
from xvcomm.types.deadline import Deadline


class Reach:
    """That of one rank.

    Args:
        joined: what each rank has told of itself.
    """

    def __init__(self, transports: Sequence[Transport], joined: Sequence[Joining], rank: int) -> None:
        self._transports, self._joined, self._rank = transports, joined, rank

    def scheme(self, rank: int) -> str:
        """The scheme of the transport to another rank."""
        return choose(self._joined[self._rank].offers, self._joined[rank].offers).scheme

    def transport(self, rank: int) -> Transport:
        """What joins this rank with another one."""
        scheme = self.scheme(rank)
        return next(t for t in self._transports if t.capabilities().scheme == scheme)

    def ask(self, ranks: Collection[int], question: Question, deadline: Deadline) -> dict[int, Answer]:
        """Ask ranks of other hosts, see `Transport.ask`."""
        by = {transport: [r for r in ranks if self.transport(r) is transport] for transport in self._transports}
        asked = [transport.ask(members, question, deadline) for transport, members in by.items() if members]
        return {rank: answer for found in asked for rank, answer in found.items()}

    def answers(self, rank: int) -> bool:
        """Whether the host of a rank of another one answers."""
        return self.transport(rank).answers(rank)
