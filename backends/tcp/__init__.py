"""Transport between hosts over TCP, and over RDMA devices if it is given some: each end has its own half of a ring, and the wire
keeps the halves equal.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from xvcomm.abc.store import PrefixStore, Store
from xvcomm.abc.transport import Capabilities, Interface, Membership, PairTrial, Path, Rail, Transport
from xvcomm.backends.tcp import choice, interfaces
from xvcomm.backends.tcp.interfaces import Place
from xvcomm.config import Config
from xvcomm.memory.array_view import ArrayView
from xvcomm.memory.ring import RingEnd, RingLayout
from xvcomm.trace.format import Answer, Question
from xvcomm.trace.snapshot import Grades
from xvcomm.types.deadline import Deadline
from xvcomm.types.route import Ends, Route

if TYPE_CHECKING:
    from xvcomm.abc.cards import Cards
    from xvcomm.wire.network import Network

__all__ = ["TcpTransport"]

_MAX_THREADS = 12
_PATIENCE = 2.0
"""Seconds for which an address is waited for that a rank may never publish."""


_decode_place = msgspec.msgpack.Decoder(Place).decode


class TcpTransport(Transport):
    """Rings whose halves lie in memory of their own on each host.

    Attributes:
        network: this process's links, from `join` to `close`.
        places: what ranks have published, by rank, as far as it was asked for ahead of need.
    """

    def __init__(self, config: Config, host: str) -> None:
        self._config = config
        self.network: Network | None = None
        self.places: dict[int, bytes] = {}
        self._cards: Cards | None = None
        self._announce: Callable[[], None] = lambda: None
        self._meet: Callable[[Sequence[int]], None] = lambda members: None
        self._patience = config.timeout

    @classmethod
    def interfaces(cls, config: Config, env: Mapping[str, str]) -> Sequence[Interface]:
        return choice.examine(config, env)

    def capabilities(self) -> Capabilities:
        """See `Transport.capabilities`."""
        return Capabilities("tcp", "with TLS" if self._config.tls else "without TLS", rank_order=1)

    def join(self, membership: Membership) -> None:
        """See `Transport.join`: listens on the interfaces in use, opens their RDMA devices, and publishes the addresses."""
        from xvcomm.wire.network import Network  # which loads numba and the kernels
        from xvcomm.wire.tls import Tls

        config, store = self._config, PrefixStore("tcp", membership.store)
        key = hmac.digest((config.secret or "").encode(errors="surrogateescape"), membership.key, "sha256")
        listeners, mine = interfaces.listen(config)
        threads = _threads(config, membership.neighbours)

        places = self.places

        @cache
        def routes(rank: int) -> list[Route]:
            theirs = places.get(rank) or store.get(f"place/{rank}", Deadline.after(self._patience))
            return interfaces.routes(mine, _decode_place(theirs), threads, config.rdma_pairs)

        def meet(ranks: Sequence[int]) -> None:
            unknown = [rank for rank in ranks if rank not in places]
            _, found = store.exchange([], [f"place/{rank}" for rank in unknown], Deadline.after(self._patience), 0.0)
            places.update((rank, place) for rank, place in zip(unknown, found, strict=True) if place is not None)

        with contextlib.ExitStack() as failing:
            for listener in listeners:
                failing.callback(listener.close)
            failing.callback(self._close_cards)
            interfaces_used = {address.host: address.interface for address in mine.addresses}
            self._cards = membership.cards(config, interfaces_used, membership.device)
            if self._cards is not None:
                mine = mine.with_rdma(self._cards.reaches, self._cards.ports())
            place = msgspec.msgpack.encode(mine)
            mine_there = f"place/{membership.rank}"
            self._meet = meet
            self._announce = lambda: store.set(mine_there, place, Deadline.after(config.timeout))
            store.publish(mine_there, place, Deadline.after(config.timeout))
            self.network = Network(
                membership.rank, membership.size, key, listeners, routes, config.peer_timeout, int(config.spin_us),
                threads, Tls() if config.tls else None, membership.lost, membership.left, cards=self._cards,
                asynchronous=membership.device is not None and membership.device.capabilities().asynchronous,
                congestion=config.tcp_congestion or "",
            )  # fmt: skip
            failing.pop_all()

    def open_ring(
        self, name: str, peer: int, member: int, layout: RingLayout, store: Store, deadline: Deadline, *, producer: bool,
        job: str, group: int,
    ) -> RingEnd:  # fmt: skip
        """See `Transport.open_ring`."""
        assert self.network is not None
        half = RingLayout(layout.lanes, layout.slots, layout.slot_bytes, wired=True)
        return self.network.open_ring(
            member, _number(group, name), half, deadline, group=group, peer=peer, producer=producer
        )

    def register(self, array: ArrayView) -> Callable[[], None]:
        return super().register(array) if self.network is None else self.network.register(array)

    def announce(self) -> None:
        self._patience = _PATIENCE  # a rank that has ended publishes nothing in the new store
        self._announce()

    def enter(self, group: int) -> None:
        if self.network is not None:
            self.network.enter(group)

    def leave(self, group: int, word: int) -> None:
        if self.network is not None:
            self.network.leave(group, word)

    def expose(self, recorder: int) -> None:
        if self.network is not None:
            self.network.carrier.expose(recorder)

    def ask(self, members: Sequence[int], question: Question, deadline: Deadline) -> Mapping[int, Answer]:
        return {} if self.network is None else self.network.ask(members, question, deadline)

    def answers(self, member: int) -> bool:
        return self.network is not None and self.network.answers(member)

    def part(self, member: int) -> None:
        if (network := self.network) is not None:
            network.part(member)

    def meet(self, members: Sequence[int]) -> None:
        self._meet(members)

    def doubt(self, member: int, seconds: float) -> None:
        if (network := self.network) is not None:
            network.doubt(member, seconds)

    def probe(self, members: Sequence[int]) -> Mapping[int, Mapping[Route, str]]:
        return {} if self.network is None else self.network.probe(members)

    def try_pairs(self, members: Sequence[int]) -> Mapping[int, Sequence[PairTrial]]:
        return {} if self.network is None else self.network.try_pairs(members)

    def grades(self) -> Sequence[Grades]:
        return () if self._cards is None else self._cards.grades

    def rails(self) -> list[Rail]:
        return [] if self.network is None else self.network.rails()

    def restrict(self, member: int, only: Collection[Ends]) -> None:
        if (network := self.network) is not None:
            network.restrict(member, only)

    def paths(self) -> list[Path]:
        return [] if (network := self.network) is None else network.paths()

    def connections(self, member: int) -> str:
        return "" if (network := self.network) is None else network.connections(member)

    def refused(self) -> int:
        return 0 if self.network is None else self.network.refused

    def close(self) -> None:
        """See `Transport.close`; waits until the others have what was sent to them."""
        if self.network is not None:
            self.network.close()
            self.network = None
        self._close_cards()

    def _close_cards(self) -> None:
        if self._cards is not None:
            self._cards.close()
            self._cards = None


def _number(group: int, name: str) -> int:
    """A number of 62 bits that no other ring of the job has."""
    return int.from_bytes(hashlib.sha256(f"{group} {name}".encode()).digest()[:8], "little") >> 2


def _threads(config: Config, neighbours: int) -> int:
    """How many threads carry frames in each of so many ranks of this host."""
    return config.wire_threads or min(_MAX_THREADS, max(1, 3 * len(os.sched_getaffinity(0)) // (4 * neighbours)))
