"""This process's halves of rings between hosts: made when either end opens the ring, kept until the other side needs no more.

A process opens a ring of a communicator only once all others have entered that. So one that this process is not in it has closed:
rings of it that others open stop at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from xvcomm.abc.cards import Cards
from xvcomm.errors import ResourceError
from xvcomm.memory.ring import ABORT, Reason, RingEnd, RingLayout
from xvcomm.memory.segment import Segment
from xvcomm.system.notice import notice
from xvcomm.wire.arrays import Arrays
from xvcomm.wire.carrier import Carrier
from xvcomm.wire.links import Link
from xvcomm.wire.wires import Offer, WireEnd

LINGER_SECONDS = 10.0
"""How long a closed half is kept for the other side at most."""
_TELL_SECONDS = 1.0
"""The same after a failure, of which only the reason is left to tell."""
_EARLY_BYTES = 1 << 30
"""Most bytes of rings that other processes have begun to fill and this one has not opened. Pages count when they are filled,
or at once where RDMA devices may write to them."""
_NOBODY = -1
_REASONS = 1024
"""Of how many communicators that have failed, and are closed, this process knows why."""
_RANKS = 256
"""Of how many that have not failed it knows its rank: what others have answered meanwhile comes a moment later."""


class _Memory:
    """Memory of a half, which RDMA devices may use if there are some.

    Attributes:
        layout: of the half; its slots are apart in the GPU's memory, or behind the counters.
        segment: what lies in host memory.
        slots: as RDMA devices know them; None if they do not.
    """

    def __init__(self, layout: RingLayout, cards: Cards | None, *, producer: bool, direct: bool) -> None:
        self.slots = cards.direct(layout.capacity, producer=producer) if cards is not None and direct else None
        self.layout = replace(layout, apart=self.slots is not None)
        with contextlib.ExitStack() as undo:
            if self.slots is not None:
                undo.callback(self.slots.close)
            self.segment = Segment.anonymous(self.layout.size)
            undo.callback(self.segment.close)
            if cards is not None and self.slots is None:
                try:
                    self.slots = cards.register(self.segment.address + layout.data, layout.capacity)
                except ResourceError as error:
                    notice(f"a ring goes over TCP, because its memory cannot be registered for RDMA: {error}")
            undo.pop_all()

    def close(self, *, in_use: bool = False) -> None:
        """Unmap it; see `Registered.close`."""
        if self.slots is not None:
            self.slots.close(in_use=in_use)
        self.segment.close()


class _Lingering(NamedTuple):
    """A half that is closed, and kept for the other side.

    Attributes:
        stuck: see `RingEnd.stuck`.
        until: when it is unmapped at the latest.
    """

    memory: _Memory
    stuck: bool
    until: float


def _bytes_of(early: tuple[RingEnd, int]) -> int:
    """What a half takes in host memory and in the GPU's."""
    layout = early[0].layout
    return layout.data + layout.capacity


class Halves:
    """Those of all links of a process. Thread-safe.

    Args:
        cards: may read and write the slots; None without RDMA.
        arrays: that are registered.
        link: the link of a number.
    """

    def __init__(
        self, carrier: Carrier, cards: Cards | None, arrays: Arrays, link: Callable[[int], Link]
    ) -> None:  # fmt: skip
        self._carrier, self._cards, self._arrays, self._link = carrier, cards, arrays, link
        self._lock = threading.RLock()  # reentrant, because a signal handler may close at any point
        self._known: set[int] = set()  # names of the rings of which there is a half, or is about to be
        self._early: dict[int, tuple[RingEnd, int]] = {}
        self._offers: dict[int, Offer] = {}
        self._refused: dict[int, Offer] = {}  # for whose answer there was no room
        self._entered: set[int] = set()
        self._failed: dict[int, int] = {}  # abort words of communicators that are closed, the oldest first
        self._left: dict[int, int] = {}  # the same of those that have not failed
        self._lingering: dict[WireEnd, _Lingering] = {}

    def open(self, link: int, name: int, layout: RingLayout, *, group: int, peer: int, producer: bool) -> RingEnd:
        """See `Network.open_ring`. A half that was made when the producer's offer came may have messages already."""
        with self._lock:
            self._known.add(name)
            self._offers.pop(name, None)
            end, _ = self._early.pop(name, (None, 0))
        if end is not None:
            end.peer = peer
            return end
        return self._make(link, name, layout, group=group, peer=peer, producer=producer)

    def _make(
        self, link: int, name: int, layout: RingLayout, *, group: int, peer: int, producer: bool,
        offer: Offer | None = None, word: int = 0,
    ) -> RingEnd:  # fmt: skip
        with contextlib.ExitStack() as undo:
            undo.callback(self._known.discard, name)
            self._known.add(name)
            memory = _Memory(layout, self._cards, producer=producer, direct=self._link(link).direct)
            undo.callback(memory.close)
            end = RingEnd.create(memory.segment, memory.layout, peer=peer, producer=producer)
            end.slots = memory.slots.address if memory.layout.apart and memory.slots else 0
            end.abort(word)
            wire = WireEnd(link, name, group, end, memory.slots, offer)
            undo.callback(self._carrier.detach, wire)
            self._carrier.add_wire(wire)
            undo.pop_all()
        end.carrier, end.begun = self._carrier.address, self._carrier.look
        end.gave_up = partial(self._give_up, wire)
        end.carried = partial(self._carried, wire)
        end.told = lambda: wire.settled() or self._link(link).gone
        end.dispose = partial(self._linger, wire, memory, end)
        return end

    def _give_up(self, wire: WireEnd) -> None:
        """See `RingEnd.gave_up`."""
        if array := self._carrier.withdraw(wire):
            self._arrays.revoke(array)

    def _carried(self, wire: WireEnd) -> dict[int, dict[str, int]]:
        """See `RingEnd.carried`."""
        name = self._link(wire.link).paths.name
        return {message: {name(path): n for path, n in parts} for message, parts in wire.shares.read().items()}

    def look(self) -> None:
        """Handle the rings that others have opened and this process has not.

        For a producer's this side's half is made, so that its messages need not wait; but not in host memory because no rail
        of RDMA is up yet: this process waits for one when it opens the ring.
        """
        with self._lock:
            refused, self._refused = self._refused, {}
            offers = [*refused.values(), *self._carrier.offers()]
            # One of a half that exists came before that was made, which has told of itself.
            for offer in [offer for offer in offers if offer.sound() and offer.name not in self._known]:
                self._consider(offer)

    def _consider(self, offer: Offer) -> None:
        """Handle a ring that this process has not opened."""
        if offer.group not in self._entered:
            self._turn_away(offer)
            return
        self._offers[offer.name] = offer
        if self._cards is not None and self._cards.has_direct and not self._link(offer.link).direct:
            return
        if offer.producer and offer.layout.size + sum(map(_bytes_of, list(self._early.values()))) <= _EARLY_BYTES:
            with contextlib.suppress(ResourceError):  # then it is made when it is opened
                self._early[offer.name] = self._answer(offer), offer.group
                self._offers.pop(offer.name, None)

    def _answer(self, offer: Offer, word: int = 0) -> RingEnd:
        return self._make(
            offer.link, offer.name, offer.layout, group=offer.group, peer=_NOBODY, producer=not offer.producer,
            offer=offer, word=word,
        )  # fmt: skip

    def _turn_away(self, offer: Offer) -> None:
        """Stop a ring of a communicator that this process has closed; an earlier half may have had messages."""
        word = self._failed.get(offer.group) or self._left.get(offer.group)
        try:
            self._answer(offer, word or Reason.LEFT.word(max(0, offer.peer))).close()
        except ResourceError:
            self._refused[offer.name] = offer

    def enter(self, group: int) -> None:
        """Note that this process makes a communicator, whose rings others may open from now on."""
        with self._lock:
            self._entered.add(group)

    def leave(self, group: int, word: int) -> None:
        """Note that this process has closed a communicator: rings stop that it has not opened, by `word`. Idempotent."""
        with self._lock:
            self._entered.discard(group)
            words, most = (self._failed, _REASONS) if Reason.bad(word) else (self._left, _RANKS)
            words[group] = word
            if len(words) > most:
                words.pop(next(iter(words)), None)
            for name in [name for name, (_, of) in list(self._early.items()) if of == group]:
                end, _ = self._early.pop(name)
                end.abort(word)
                end.close()
            for offer in [offer for offer in list(self._offers.values()) if offer.group == group]:
                self._turn_away(self._offers.pop(offer.name))

    def _linger(self, wire: WireEnd, memory: _Memory, end: RingEnd, segment: Segment) -> None:
        """Unmap a ring once the other side has what was sent, or is gone."""
        failed = Reason.bad(ctypes.c_int64.from_address(segment.address + ABORT).value)
        until = time.monotonic() + (_TELL_SECONDS if failed else LINGER_SECONDS)
        with self._lock:
            self._lingering[wire] = _Lingering(memory, end.stuck, until)
        self._carrier.wake()
        self.sweep()

    def sweep(self, at_once: bool = False) -> bool:
        """Unmap the closed rings that nobody needs any more; whether others are left."""
        now = time.monotonic()
        with self._lock:
            if not at_once:
                self.look()  # so that no offer is left that came before a half was made which ends here
            for wire, each in list(self._lingering.items()):
                anyway = at_once or self._link(wire.link).gone or now > each.until
                if not (anyway or wire.settled()) or not self._carrier.detach(wire, anyway=anyway):
                    continue
                if self._lingering.pop(wire, None):  # else a signal handler was faster
                    each.memory.close(in_use=each.stuck)
                    self._known.discard(wire.name)
            return bool(self._lingering)

    def close(self) -> None:
        """Unmap everything; no thread carries any more."""
        for end, _ in self._early.values():
            end.close()
        self.sweep(at_once=True)
