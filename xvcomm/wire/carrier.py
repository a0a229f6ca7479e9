"""The carrier of a process: the tables that compiled code works on, and its thread."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from functools import partial
from typing import Any

import numpy as np

from xvcomm.abc.cards import Pair, Registered
from xvcomm.errors import ResourceError
from xvcomm.system.threads import Daemon
from xvcomm.trace.format import Question
from xvcomm.wire import records
from xvcomm.wire.changes import (
    choose,
    copy_to_ring_address,
    land,
    lose,
    put,
    report,
    retire,
    take,
    use,
    withdraw,
)
from xvcomm.wire.posting import drain, greet, greeted
from xvcomm.wire.progress import assist, progress_address, run, wake_address
from xvcomm.wire.records import OF_LINK, PLACES, SINK_BYTES, Link, Rail, Rdma
from xvcomm.wire.regions import registered_address, release
from xvcomm.wire.tls import Channel
from xvcomm.wire.verbs import Queue
from xvcomm.wire.wires import Need, Offer, WireEnd, WireTable

_LINKS, _RAILS = 1 << 16, 1 << 12


class PostedRail:
    """A queue pair as the carrier uses it.

    Attributes:
        record: of the rail, see `records.RAIL`.
        rdma: see `records.RDMA`.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._flights = np.zeros(records.FLIGHTS, records.FLIGHT)
        self.rdma = Rdma(
            queue=pair.queue, completions=pair.completions, device=pair.device, there=pair.there, inbox=pair.inbox,
            outbox=pair.outbox, outbox_key=pair.outbox_key, inline=pair.inline, flights=self._flights.ctypes.data,
            **pair.loopback._asdict(),
        )  # fmt: skip
        self.record = Rail(fd=pair.fd, rdma=ctypes.addressof(self.rdma))
        self._queue = Queue.from_address(pair.queue)

    def progress(self) -> tuple[int, int]:
        """How many requests have ended, and how many have not."""
        ended = int(self._queue.ended)
        return ended, int(self._queue.posted) - ended

    def greet(self) -> None:
        """Send the first frame; both sides do so once both are connected."""
        greet(ctypes.addressof(self.record))

    def greeted(self) -> bool:
        """Whether the first frames have gone both ways.

        Raises:
            ResourceError: one has failed; with the reason.
        """
        found = greeted(ctypes.addressof(self.record))
        if found < 0:
            raise ResourceError(self._pair.failure())
        return bool(found)


class Carrier:
    """Carries frames between rings and sockets until it is closed.

    One thread serves all rails, and threads that wait for messages help it. If a rail has much to carry, or such a thread copies
    much, further threads serve rails meanwhile.

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
        self._lock = threading.RLock()  # a signal handler may close communicators at any point
        self._tables = {
            name: np.zeros(size, np.int64) for name, size in (("links", _LINKS), ("rails", _RAILS), ("wires", PLACES))
        }
        self._sink = np.zeros(SINK_BYTES, np.uint8)
        self._poll = np.zeros(1 + _RAILS, records.POLLED)
        self._wake, self.news = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2))
        self._helpers = np.zeros(threads - 1, records.HELPER)
        self._helpers["wake"] = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(1, threads)]
        self._answers = np.zeros(records.KEPT_ANSWERS, records.ANSWER)
        self._failures = np.zeros(records.FAILURES, records.FAILURE)
        self._regions = np.zeros(records.REGIONS, records.REGION)
        tables = {name: table.ctypes.data for name, table in self._tables.items()}
        self._record = records.Carrier(
            movers=(progress_address, wake_address, registered_address, copy_to_ring_address),
            wake=self._wake, news=self.news, spins=spins,
            sink=self._sink.ctypes.data, poll=self._poll.ctypes.data, helpers=self._helpers.ctypes.data,
            helper_count=len(self._helpers), answers=self._answers.ctypes.data, failures=self._failures.ctypes.data, one=1,
            regions=self._regions.ctypes.data, **tables,
        )  # fmt: skip
        self.address = ctypes.addressof(self._record)
        self._kept: list[Any] = []
        self.rails: list[Any] = []
        self._wires = WireTable(self.address)
        self._links: list[Any] = []
        self._offers: list[np.ndarray[Any, Any]] = []
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
            raise ResourceError(f"the carrier has no room for more than {index} {table}")
        self._tables[table][index] = ctypes.addressof(record)
        self._put(self._record, count, index + 1)
        self._kept.append(record)
        return index

    def add_link(self) -> int:
        """Make a link without rails and wires; its index."""
        wires, offers = np.zeros(OF_LINK, np.int64), np.zeros(OF_LINK, records.OFFER)
        with self._lock:
            link = Link(wires=wires.ctypes.data, offers=offers.ctypes.data)
            self._kept.append(wires)
            self._offers.append(offers)
            self._links.append(link)
            return self._append("links", "link_count", link)

    def link(self, index: int) -> Any:
        """The record of a link, to read."""
        return self._links[index]

    def add_rail(
        self, link: int, path: int, route: int, connection: socket.socket, tls: int = 0, channel: Channel | None = None
    ) -> int:
        """Use a connection, and its TLS, which both stay open until `release`; the index of its rail.

        Args:
            path: number of its path in the link.
            route: number of the first path between the same addresses; rails of one route are not compared.
        """
        wanted = Rail(fd=connection.fileno(), path=path, route=route)
        if channel is not None:
            wanted.tls, wanted.channel, wanted.staged = tls, channel.address, channel.staged
        return self._use(link, wanted)

    def use_pair(self, link: int, path: int, posted: PostedRail) -> int:
        """Use a queue pair that was greeted and stays open until `retire`; the index of its rail. `path`: as in `add_rail`."""
        posted.record.path = path
        return self._use(link, posted.record)

    def _use(self, link: int, wanted: Any) -> int:
        with self._lock:
            index = next((i for i, rail in enumerate(self.rails) if rail.state == records.UNUSED), len(self.rails))
            if index == len(self.rails):
                rail = Rail()
                self.rails.append(rail)
                self._append("rails", "rail_count", rail)
            rail = self.rails[index]
            after_lock, wanted.link = Rail.copying.offset, link
            place, source = (ctypes.addressof(record) + after_lock for record in (rail, wanted))
            ctypes.memmove(place, source, ctypes.sizeof(rail) - after_lock)
            use(self.address, index)
        self.wake()
        return index

    def choose(self, index: int, *, chosen: bool) -> None:
        """Let a rail be one of those that alone carry slots, or no longer. Where all of them are lost, the others carry."""
        choose(self.address, index, int(chosen))
        self.wake()

    def drop(self, index: int) -> None:
        """Take a rail out of use; what it carried goes over others, as after a failure."""
        with self._lock:
            lose(self.address, index)
        self.wake()

    def drain(self, index: int) -> bool:
        """Whether all requests of a lost rail have ended, whose queue pair was put into the error state."""
        return bool(drain(ctypes.addressof(self.rails[index])))

    def land(self, index: int) -> None:
        """Let the slots of a lost rail's WRITEs be sent again: the other side lets none of these arrive any more. Idempotent."""
        land(self.address, index)
        self.wake()

    def retire(self, index: int) -> None:
        """Let a lost rail's place be used again. Of a queue pair: drained, and landed."""
        with self._lock:
            retire(self.address, index)
        self.wake()

    def report(self, link: int, pair: int, peer: int, answer: bool) -> None:
        """Tell the process at the other end of a link that a queue pair here has failed, and which was joined with it there."""
        report(self.address, link, pair, peer, answer)
        self.wake()

    def failures(self) -> np.ndarray[Any, Any]:
        """What other processes have told of failed queue pairs since the last call; see `records.FAILURE`."""
        return self._take(self._failures, self._record, "failure_count")

    def offers(self) -> list[Offer]:
        """The rings that other processes have opened and this one has not, since the last call."""
        offering = [(i, link) for i, link in enumerate(list(self._links)) if link.offer_count]
        return [
            Offer.of(index, *found)
            for index, link in offering
            for found in self._take(self._offers[index], link, "offer_count")
        ]

    def _take(self, table: np.ndarray[Any, Any], record: Any, count: str) -> np.ndarray[Any, Any]:
        """What compiled code has put into a table since the last call; `count`: the record's field that says how much."""
        found, place = np.empty_like(table), ctypes.addressof(record) + getattr(type(record), count).offset
        return found[: take(self.address, table.ctypes.data, place, table.itemsize, found.ctypes.data)]

    def expose(self, recorder: int) -> None:
        """Let other processes read a flight recorder, by its handle; 0: no longer."""
        self._put(self._record, "recorder", recorder)

    def ask(self, link: int, number: int, question: Question) -> None:
        """Ask the process at the other end of a link, with a number that the answer repeats."""
        for field, value in zip(Question._fields, question, strict=True):
            self._put(self._links[link], field, value)
        self._put(self._links[link], "ask", number)
        self.wake()

    def answers(self) -> np.ndarray[Any, Any]:
        """The answers that have come since the last call; see `records.ANSWER`."""
        return self._take(self._answers, self._record, "answer_count")

    def add_wire(self, wire: WireEnd) -> None:
        """Mirror a ring end by the ring of the same name in the process at the other end of its link.

        Raises:
            ResourceError: there is no room for it.
        """
        with self._lock:
            self._wires.add(wire)
        self.wake()

    def need_of_rdma(self, link: int) -> Need:
        """What the rings of a link need that have slots in a GPU's memory at either end."""
        with self._lock:
            return self._wires.need_of_rdma(link)

    def moved(self, link: int) -> int:
        """How many slots the rings of a link have received, and how many of those that they sent were consumed."""
        with self._lock:  # so that no ring is unmapped meanwhile
            return self._wires.moved(link)

    def withdraw(self, wire: WireEnd) -> int:
        """Touch the array no more of a message that was given up; its address if RDMA devices may still use it, else 0."""
        return int(withdraw(self.address, wire.address))

    def put_region(self, index: int, address: int, nbytes: int, registered: Registered) -> None:
        """Let RDMA devices use an array for messages. `index`: of a region that is not in use."""
        region = self._regions[index]
        region["bytes"], region["iova"], region["closing"], region["keys"], region["given"] = (
            nbytes, registered.address, 0, 0, 0
        )  # fmt: skip
        for device, key in enumerate(registered.keys):
            region["keys"][device], region["given"][device] = key
        with self._lock:  # else the count could fall again, below a region that another thread has put
            self._put(self._record, "region_count", max(index + 1, int(self._record.region_count)))
        put(self.address, self._region(index), address)

    def release_region(self, index: int) -> bool:
        """Let new slots of messages not use an array any more; whether devices use it no more either."""
        return not release(self.address, index)

    def drop_region(self, index: int) -> None:
        """Forget an array, which is about to be deregistered."""
        put(self.address, self._region(index), 0)

    def _region(self, index: int) -> int:
        """Where a region's address is."""
        return int(self._regions.ctypes.data) + index * self._regions.itemsize

    def detach(self, wire: WireEnd, *, anyway: bool = True) -> bool:
        """Stop to mirror a ring, if it is settled or in any case; whether its memory may be unmapped: no rail sends from there.

        Idempotent, and right for a wire that was not added.
        """
        with self._lock:
            return self._wires.remove(wire, anyway=anyway)

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
