"""The carrier of a process: the tables that compiled code works on, and its thread."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from functools import partial
from typing import Any

import numpy as np

from xvcomm.errors import ResourceError
from xvcomm.memory.ring import RingEnd
from xvcomm.system.threads import Daemon
from xvcomm.wire import records
from xvcomm.wire.frames import FRAME
from xvcomm.wire.progress import assist, detach, lose, progress_address, put, run, take, wake_address, withdraw
from xvcomm.wire.records import KNOWN, SINK_BYTES, UP, Link, Rail, Wire
from xvcomm.wire.tls import Channel

_LINKS, _RAILS, _WIRES, _WIRES_OF_LINK = 1 << 16, 1 << 12, 1 << 16, 1 << 12


class WireEnd:
    """This process's half of a ring that is mirrored on another host.

    Attributes:
        index: in the carrier's table.
        record: see `records.WIRE`.
    """

    def __init__(self, index: int, link: int, name: int, group: int, end: RingEnd, there: int) -> None:
        ring = end.layout
        self.index = index
        self._end = end  # which owns the counter that compiled code reads
        self._owners = np.zeros(ring.lanes * ring.slots, np.int64)
        self._sources = np.zeros(ring.lanes * ring.slots, np.int64)
        self._frames = np.zeros(ring.lanes * ring.slots, FRAME)
        self.record = Wire(
            link=link, name=name, group=group, there=there, producer=end.producer, ring=end.address, geometry=end.geometry,
            counter=end.counter, turn=end.turn, replays=end.replays, open=2 if there < 0 else 1, owners=self._owners.ctypes.data,
            sources=self._sources.ctypes.data, frames=self._frames.ctypes.data, entries=-1,
        )  # fmt: skip
        if not end.producer:
            end.direct = ctypes.addressof(self.record) + Wire.direct.offset

    def settled(self) -> bool:
        """Whether the other side knows why the ring has stopped, and has everything that was sent before; or nothing was sent,
        and it has not opened the ring.
        """
        unused = self.record.there < 0 and not (self._end.producer and self._end.sequence)
        return bool(unused or self.record.stop == KNOWN)


class Carrier:
    """Carries frames between rings and sockets until it is closed.

    One thread serves all rails, and threads that wait for messages help it. If a rail has much to carry, further threads serve
    other rails meanwhile.

    Attributes:
        address: of the record that movers call `progress` with.
        news: eventfd that is ready when a rail was lost, a process has left, a ring was offered or stopped, an answer has come.
    """

    def __init__(self, spins: int, threads: int) -> None:
        """Start the threads.

        Args:
            spins: rounds without work before a thread yields its core.
            threads: how many may carry at the same time, beside those that wait for messages.

        Raises:
            ResourceError: the system refuses one of them; none is left.
        """
        self._lock = threading.Lock()
        self._tables = {
            name: np.zeros(size, np.int64) for name, size in (("links", _LINKS), ("rails", _RAILS), ("wires", _WIRES))
        }
        self._sink = np.zeros(SINK_BYTES, np.uint8)
        self._poll = np.zeros(1 + _RAILS, records.POLLED)
        self._wake, self.news = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2))
        self._helpers = np.zeros(threads - 1, records.HELPER)
        self._helpers["wake"] = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(1, threads)]
        self._offers = np.zeros(records.OFFERS, records.OFFER)
        self._answers = np.zeros(records.ANSWERS, records.ANSWER)
        tables = {name: table.ctypes.data for name, table in self._tables.items()}
        self._record = records.Carrier(
            movers=(progress_address, wake_address), wake=self._wake, news=self.news, spins=spins,
            sink=self._sink.ctypes.data, poll=self._poll.ctypes.data, helpers=self._helpers.ctypes.data,
            helper_count=len(self._helpers), offers=self._offers.ctypes.data, answers=self._answers.ctypes.data, one=1,
            **tables,
        )  # fmt: skip
        self.address = ctypes.addressof(self._record)
        self._kept: list[Any] = []
        self.rails: list[Any] = []
        self._links: list[Any] = []
        self._threads = [Daemon("xvcomm-carrier", lambda: run(self.address))]
        for number in range(1, threads):
            self._threads.append(Daemon(f"xvcomm-carrier-{number}", partial(assist, self.address, number)))
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.close()
            raise

    def _put(self, record: Any, field: str, value: int) -> None:
        put(self.address, ctypes.addressof(record) + getattr(type(record), field).offset, value)

    def _append(self, table: str, count: str, record: Any) -> int:
        """Add a record to a table; its index."""
        index = int(getattr(self._record, count))
        if index == len(self._tables[table]):
            raise ResourceError(
                f"the carrier has no room for more than {index} {table}; use fewer communicators or channels"
            )
        self._tables[table][index] = ctypes.addressof(record)
        self._put(self._record, count, index + 1)
        self._kept.append(record)
        return index

    def add_link(self) -> int:
        """Make a link without rails and wires; its index."""
        wires = np.zeros(_WIRES_OF_LINK, np.int64)
        with self._lock:
            link = Link(wires=wires.ctypes.data)
            self._kept.append(wires)
            self._links.append(link)
            return self._append("links", "link_count", link)

    def link(self, index: int) -> Any:
        """The record of a link, to read."""
        return self._links[index]

    def add_rail(self, link: int, connection: socket.socket, tls: int = 0, channel: Channel | None = None) -> int:
        """Use a connection, and its TLS, which both stay open until `release`; the index of its rail."""
        with self._lock:
            index = next((i for i, rail in enumerate(self.rails) if rail.state == records.UNUSED), len(self.rails))
            if index == len(self.rails):
                rail = Rail()
                self.rails.append(rail)
                self._append("rails", "rail_count", rail)
            rail = self.rails[index]
            after_lock = Rail.copying.offset
            ctypes.memset(ctypes.addressof(rail) + after_lock, 0, ctypes.sizeof(rail) - after_lock)
            rail.fd, rail.link = connection.fileno(), link
            if channel is not None:
                rail.tls, rail.channel, rail.staged = tls, channel.address, channel.staged
            self._put(rail, "state", UP)
        self.wake()
        return index

    def drop(self, index: int) -> None:
        """Take a rail out of use; what it carried goes over others, as after a failure."""
        with self._lock:
            lose(self.address, index)
        self.wake()

    def release(self, index: int) -> None:
        """Let a lost rail's place be used again."""
        with self._lock:
            self._put(self.rails[index], "state", records.UNUSED)

    def offers(self) -> np.ndarray[Any, Any]:
        """The rings that other processes fill and that this one has not opened, since the last call; see `records.OFFER`."""
        return self._take(self._offers, "offer_count")

    def _take(self, table: np.ndarray[Any, Any], count: str) -> np.ndarray[Any, Any]:
        """What compiled code has put into a table since the last call."""
        found, place = np.zeros_like(table), self.address + getattr(records.Carrier, count).offset
        return found[: take(self.address, table.ctypes.data, place, table.itemsize, found.ctypes.data)]

    def expose(self, recorder: int) -> None:
        """Let other processes read a flight recorder, by its handle; 0: no longer."""
        self._put(self._record, "recorder", recorder)

    def ask(self, link: int, number: int, wanted: int) -> None:
        """Ask the process at the other end of a link for the newest records of its flight recorder, at most ANSWERS of them."""
        self._put(self._links[link], "wanted", wanted)
        self._put(self._links[link], "ask", number)
        self.wake()

    def answers(self) -> np.ndarray[Any, Any]:
        """The answers that have come since the last call; see `records.ANSWER`."""
        return self._take(self._answers, "answer_count")

    def add_wire(self, link: int, name: int, group: int, end: RingEnd, there: int) -> WireEnd:
        """Mirror a ring end by the ring of this name in the process at the other end of a link; `there`: its index, or -1."""
        with self._lock:
            wire = WireEnd(int(self._record.wire_count), link, name, group, end, there)
            self._append("wires", "wire_count", wire.record)
            self._kept.append(wire)
            of_link = self._links[link]
            count = int(of_link.wire_count)
            if count == _WIRES_OF_LINK:
                raise ResourceError(
                    f"two ranks have more than {count} rings between them; use fewer communicators or channels"
                )
            ctypes.c_int64.from_address(of_link.wires + 8 * count).value = wire.index
            self._put(of_link, "wire_count", count + 1)
        self.wake()
        return wire

    def withdraw(self, wire: WireEnd) -> None:
        """Touch the array no more of a message that was given up."""
        withdraw(self.address, wire.index)

    def detach(self, wire: WireEnd) -> bool:
        """Stop to mirror a ring; False while a rail still sends from its memory."""
        return not detach(self.address, wire.index)

    def leave(self, link: int) -> None:
        """Tell the process at the other end that this one has closed its session."""
        self._put(self._links[link], "leave", 1)
        self.wake()

    def wake(self) -> None:
        """Let the carrier's thread look at links and wires."""
        os.eventfd_write(self._wake, 1)

    def look(self) -> None:
        """Let the carrier's thread look at the rings, if it sleeps: a message was enqueued whose mover does not carry frames."""
        if self._record.asleep:
            self.wake()

    def close(self) -> None:
        """End the threads. No ring may be attached, and no connection is closed."""
        self._record.over = 1
        self.wake()
        helpers = self._helpers["wake"].tolist()
        for descriptor in helpers:
            os.eventfd_write(descriptor, 1)
        for thread in self._threads:
            thread.join()
        for descriptor in (self._wake, self.news, *helpers):
            os.close(descriptor)
