"""Transport between hosts over TCP, and over RDMA devices if it is given some: each end has its own half of a ring, and the wire
keeps the halves equal.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from xvcomm.abc.store import PrefixStore, Store
from xvcomm.abc.transport import Capabilities, Interface, Membership, PairTrial, Path, Rail, Transport
from xvcomm.backends.tcp import choice, interfaces
from xvcomm.backends.tcp.interfaces import Place
from xvcomm.config import Config
from xvcomm.memory.ring import RingEnd, RingLayout
from xvcomm.trace.format import Answer, Question
from xvcomm.trace.snapshot import Grades
from xvcomm.types.deadline import Deadline
from xvcomm.types.route import Route

if TYPE_CHECKING:
    from xvcomm.abc.cards import Cards
    from xvcomm.wire.network import Network

__all__ = ["TcpTransport"]

_MAX_THREADS = 12
_PATIENCE = 2.0
"""Seconds for which an address is waited for that a rank may never publish."""


class _Made(msgspec.Struct, frozen=True, array_like=True):
    """What the end that comes first tells the other: a name that no other ring of the job has, and the layout."""

    name: int
    lanes: int
    slots: int
    slot_bytes: int


_decode_place, _decode_made = msgspec.msgpack.Decoder(Place).decode, msgspec.msgpack.Decoder(_Made).decode


class TcpTransport(Transport):
    """Rings whose halves lie in memory of their own on each host.

    Attributes:
        network: this process's links, from `join` to `close`.
    """

    def __init__(self, config: Config, host: str) -> None:
        self._config = config
        self.network: Network | None = None
        self._cards: Cards | None = None
        self._publish: Callable[[], None] = lambda: None
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
        deadline = Deadline.after(config.timeout)
        if membership.rank == 0:
            store.set("key", secrets.token_bytes(32), deadline)
        key = hmac.digest((config.secret or "").encode(errors="surrogateescape"), store.get("key", deadline), "sha256")
        listeners, mine = interfaces.listen(config)
        threads = _threads(config, membership.neighbours)

        @cache
        def routes(rank: int) -> list[Route]:
            theirs = _decode_place(store.get(f"place/{rank}", Deadline.after(self._patience)))
            return interfaces.routes(mine, theirs, threads, config.rdma_pairs)

        with contextlib.ExitStack() as failing:
            for listener in listeners:
                failing.callback(listener.close)
            failing.callback(self._close_cards)
            interfaces_used = {address.host: address.interface for address in mine.addresses}
            self._cards = membership.cards(config, interfaces_used, membership.device)
            if self._cards is not None:
                mine = mine.with_rdma(self._cards.reaches, self._cards.ports())
            place = msgspec.msgpack.encode(mine)
            self._publish = lambda: store.set(f"place/{membership.rank}", place, Deadline.after(config.timeout))
            self._publish()
            self.network = Network(
                membership.rank, membership.size, key, listeners, routes, config.peer_timeout, int(config.spin_us),
                threads, Tls() if config.tls else None, membership.lost, membership.left, cards=self._cards,
                asynchronous=membership.device is not None and membership.device.capabilities().asynchronous,
            )  # fmt: skip
            failing.pop_all()

    def open_ring(
        self, name: str, peer: int, member: int, layout: RingLayout, store: Store, deadline: Deadline, *, producer: bool,
        job: str, group: int,
    ) -> RingEnd:  # fmt: skip
        """See `Transport.open_ring`."""
        assert self.network is not None
        if store.add(name + "/ends", 1, deadline) > 1:
            made = _decode_made(store.get(name, deadline))
        else:
            if not layout.fixed and layout == self._host_layout():
                layout = RingLayout(1, self._config.wire_slots, self._config.wire_slot_bytes)
            made = _Made(secrets.randbits(62), layout.lanes, layout.slots, layout.slot_bytes)
            store.set(name, msgspec.msgpack.encode(made), deadline)
        half = RingLayout(made.lanes, made.slots, made.slot_bytes, wired=True)
        return self.network.open_ring(member, made.name, half, deadline, group=group, peer=peer, producer=producer)

    def announce(self) -> None:
        self._patience = _PATIENCE  # a rank that has ended publishes nothing in the new store
        self._publish()

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

    def meet(self, member: int) -> None:
        if (network := self.network) is not None:
            network.routes(member)

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

    def paths(self) -> list[Path]:
        return [] if (network := self.network) is None else network.paths()

    def connections(self, member: int) -> str:
        return "" if (network := self.network) is None else network.connections(member)

    def refused(self) -> int:
        return 0 if self.network is None else self.network.refused

    def _host_layout(self) -> RingLayout:
        return RingLayout(self._config.ring_lanes, self._config.ring_slots, self._config.ring_slot_bytes)

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


def _threads(config: Config, neighbours: int) -> int:
    """How many threads carry frames in each of so many ranks of this host."""
    return config.wire_threads or min(_MAX_THREADS, max(1, 3 * len(os.sched_getaffinity(0)) // (4 * neighbours)))
