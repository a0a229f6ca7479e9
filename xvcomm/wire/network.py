"""The links of a process to processes on other hosts.

A thread with an event loop keeps them; no frame passes through it. A link is made when either side opens a ring.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from xvcomm.abc.cards import Cards, Pair
from xvcomm.abc.transport import PairTrial, Path, Rail
from xvcomm.memory.array_view import ArrayView
from xvcomm.memory.ring import RingEnd, RingLayout
from xvcomm.system import forking
from xvcomm.system.threads import Daemon
from xvcomm.trace.format import Answer, Question
from xvcomm.types.deadline import Deadline
from xvcomm.types.route import RDMA, Ends, Route
from xvcomm.wire import pair_trials
from xvcomm.wire.acceptor import Acceptor
from xvcomm.wire.arrays import Arrays
from xvcomm.wire.carrier import Carrier
from xvcomm.wire.halves import LINGER_SECONDS, Halves
from xvcomm.wire.links import DRAIN_SECONDS, Link, Process
from xvcomm.wire.questions import Questions
from xvcomm.wire.reachability import probe
from xvcomm.wire.tls import Tls

_LOOK_SECONDS = 0.2
_FLUSH_SECONDS = 1.0
_PROBES = 128
"""How many routes are tried at once."""
_PAIR_TRIALS = 32
"""How many queue pairs are tried at once; one that is not joined takes some seconds."""


class Network:
    """All links of this process.

    Attributes:
        carrier: carries the frames.
    """

    def __init__(
        self, rank: int, size: int, key: bytes, listeners: Sequence[socket.socket], routes: Callable[[int], Sequence[Route]],
        timeout: float, spins: int, threads: int, tls: Tls | None, lost: Callable[[int, str], None], left: Callable[[int], None],
        cards: Cards | None = None, asynchronous: bool = False, congestion: str = "",
    ) -> None:  # fmt: skip
        """Begin to accept connections.

        Args:
            rank: of this process in the whole job, as all ranks here.
            size: of the whole job.
            key: of the job; nobody is heard who does not prove it.
            listeners: bound sockets, which are closed with the network.
            routes: ways to a rank, the preferred ones first; may block.
            timeout: seconds without a sign of a host after which its ranks are lost.
            spins, threads: see `Carrier`.
            tls: what encrypts the connections, on all ranks or on none.
            lost, left: called for a rank whose process has died or cannot be reached, with the reason; that has left.
            cards: RDMA devices for the routes of RDMA; they stay the caller's, who closes them after the network.
            asynchronous: whether a thread may wait for messages and keep the interpreter lock, as in a GPU's driver.
            congestion: TCP's congestion control of the connections; the system's if left out.

        Raises:
            ResourceError: the system refuses a thread; the listeners stay the caller's.
        """
        self._left, self._asynchronous = left, asynchronous
        self.carrier = Carrier(spins, threads)
        self._process = Process(rank, key, self.carrier, tls, timeout, routes, lost, cards, congestion)
        self._questions = Questions(self.carrier)
        self._links: dict[int, Link] = {}
        self._of_number: dict[int, Link] = {}
        self._kept: set[Link] = set()
        self._parted: set[int] = set()
        self._lock = threading.Lock()
        self._closing = math.inf
        self._arrays = Arrays(self.carrier, cards)
        self._halves = Halves(self.carrier, cards, self._arrays, self._of_number.__getitem__)
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._acceptor = Acceptor(self._process, size, listeners, self._link, self._spawn)
        forking.register(self)
        self._thread = Daemon("xvcomm-network", self._run)
        try:
            self._thread.start()
        except BaseException:
            self.carrier.close()
            self._loop.close()
            raise

    @property
    def refused(self) -> int:
        """Connections that were closed because they did not prove the key, or broke the protocol."""
        return self._acceptor.refused

    def open_ring(
        self, rank: int, name: int, layout: RingLayout, deadline: Deadline, *, group: int, peer: int, producer: bool
    ) -> RingEnd:  # fmt: skip
        """This process's half of a ring, mirrored by the one of the same name in the process of a rank.

        The link is made on first use. A GPU's ring waits a while until it is there.

        Args:
            group: of the ring's communicator, see `Transport.open_ring`.
            deadline: for that.
            peer: the rank's number in the communicator.

        Raises:
            ResourceError: its memory cannot be had.
        """
        found = self._link(rank)
        self._loop.call_soon_threadsafe(self._keep, found)
        if self._asynchronous:
            found.await_rails(deadline)
        return self._halves.open(found.number, name, layout, group=group, peer=peer, producer=producer)

    def register(self, array: ArrayView) -> Callable[[], None]:
        """See `Transport.register`."""
        return self._arrays.add(array)

    def enter(self, group: int) -> None:
        """See `Transport.enter`."""
        self._halves.enter(group)

    def leave(self, group: int, word: int) -> None:
        """Stop by an abort word all rings of a communicator that others open and this process does not."""
        self._halves.leave(group, word)

    def ask(self, ranks: Sequence[int], question: Question, deadline: Deadline) -> dict[int, Answer]:
        """See `Transport.ask`. Makes links that are missing."""
        links = {rank: self._link(rank) for rank in ranks}
        for link in links.values():
            self._loop.call_soon_threadsafe(self._keep, link)
        numbers = {link.number: rank for rank, link in links.items() if not link.gone}
        found = self._questions.ask(list(numbers), question, deadline)
        return {numbers[number]: answer for number, answer in found.items()}

    def answers(self, rank: int) -> bool:
        """See `Transport.answers`."""
        found = self._links.get(rank)
        return found is not None and found.answers()

    def routes(self, rank: int) -> Sequence[Route]:
        """Ways to a rank; may block until they are known."""
        return self._process.routes(rank)

    def doubt(self, rank: int, seconds: float) -> None:
        """Nothing was heard of a rank's host for some seconds: find out whether it can be reached. Makes the link if needed."""
        found = self._link(rank)
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._loop.call_soon_threadsafe(self._doubt, found, seconds)

    def _doubt(self, link: Link, seconds: float) -> None:
        link.doubt(seconds)
        self._keep(link)

    def part(self, rank: int) -> None:
        """A rank has left in good order, as is known from elsewhere: so it is if no connection to it is up that will tell it."""
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._loop.call_soon_threadsafe(self._part, rank)

    def _part(self, rank: int) -> None:
        with self._lock:
            self._parted.add(rank)
            link = self._links.get(rank)
        if link is None:
            self._left(rank)
        else:
            self._settle(link)

    def _settle(self, link: Link) -> None:
        """Notice that a process has left: it has said so over the link, or the link has no rails to say it."""
        if not link.gone and (self.carrier.link(link.number).left or (link.rank in self._parted and not link.rails)):
            link.gone = True
            self._left(link.rank)

    def probe(self, ranks: Sequence[int]) -> dict[int, dict[Route, str]]:
        """Try every route to these ranks, without a link: why each does not work, or nothing."""
        own, at_once = self._process, asyncio.Semaphore(_PROBES)
        found = {rank: dict.fromkeys((r for r in own.routes(rank) if r.number == 0), "") for rank in ranks}

        async def every() -> None:
            pairs = [(rank, route) for rank, routes in found.items() for route in routes]
            tries = (probe(at_once, own.key, own.rank, rank, route) for rank, route in pairs)
            for (rank, route), why in zip(pairs, await asyncio.gather(*tries), strict=True):
                found[rank][route] = why

        asyncio.run_coroutine_threadsafe(every(), self._loop).result()
        return found

    def try_pairs(self, ranks: Sequence[int]) -> dict[int, list[PairTrial]]:
        """See `Transport.try_pairs`."""
        own, at_once = self._process, asyncio.Semaphore(_PAIR_TRIALS)
        cards = own.cards
        if cards is None:
            return {}
        routes = {rank: [route for route in own.routes(rank) if route.number == RDMA] for rank in ranks}

        async def every() -> dict[int, list[PairTrial]]:
            pairs = [(rank, ways) for rank, found in routes.items() for ways in _by_ends(found)]
            tries = (pair_trials.attempt(cards, at_once, own.key, own.rank, rank, ways) for rank, ways in pairs)
            found: dict[int, list[PairTrial]] = {rank: [] for rank in routes}
            for (rank, _), trial in zip(pairs, await asyncio.gather(*tries), strict=True):
                found[rank].append(trial)
            return found

        return asyncio.run_coroutine_threadsafe(every(), self._loop).result()

    def rails(self) -> list[Rail]:
        """See `Transport.rails`."""
        return [rail for link in list(self._links.values()) for rail in link.state()]

    def lose(self, rank: int, which: Ends) -> None:
        """Take a connection to a rank out of use as if it had broken, to try whether others replace it."""
        for index, rail in list(self._links[rank].rails.items()):
            if rail.ends == which:
                self.carrier.drop(index)

    def restrict(self, rank: int, only: Collection[Ends]) -> None:
        """See `Transport.restrict`."""
        if (link := self._links.get(rank)) is not None:
            for index, rail in list(link.rails.items()):
                self.carrier.choose(index, chosen=rail.ends in only)

    def paths(self) -> list[Path]:
        """See `Transport.paths`."""
        return [path for link in list(self._links.values()) for path in link.paths.read(link.rank)]

    def connections(self, rank: int) -> str:
        """See `Transport.connections`."""
        found = self._links.get(rank)
        return "" if found is None else found.told()

    def close(self) -> None:
        """Wait until the others have what was sent to them, but not long for those that are silent, and leave. Idempotent."""
        if not self._thread.is_alive():
            return
        self._closing = time.monotonic()
        until = self._closing + LINGER_SECONDS
        while self._halves.sweep() and time.monotonic() < until:
            time.sleep(0.001)
        for link in list(self._links.values()):
            if not link.gone:
                self.carrier.leave(link.number)
        until = time.monotonic() + _FLUSH_SECONDS
        while time.monotonic() < until and any(link.leaving() for link in list(self._links.values())):
            time.sleep(0.001)
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        for link in self._links.values():
            link.end_rdma()
        until = time.monotonic() + DRAIN_SECONDS
        for link in self._links.values():
            link.pairs.give_back(until)
        self._halves.close()
        self._arrays.close()
        self.carrier.close()
        for link in self._links.values():
            link.close()

    def after_fork(self) -> None:
        """Leave the connections to the parent: the child's copies would hide its death from the others."""
        connections = [rail.connection for link in self._links.values() for rail in link.rails.values()]
        for connection in [*self._acceptor.listeners, *connections]:
            if connection.fileno() >= 0:
                forking.leave_to_parent(connection.fileno())

    def _link(self, rank: int) -> Link:
        with self._lock:
            if rank not in self._links:
                found = self._links[rank] = Link(self._process, rank)
                found.gone = rank in self._parted
                self._of_number[found.number] = found
            return self._links[rank]

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._loop.add_reader(self.carrier.news, self._on_news)
        if self._process.cards is not None:
            self._process.cards.watch(self._loop.add_reader, self._on_failure)
        self._acceptor.start()
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._over.wait()
            self._look()
        self._loop.remove_reader(self.carrier.news)
        await self._acceptor.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._acceptor.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _keep(self, link: Link) -> None:
        """Let a task make and replace a link's rails."""
        if link not in self._kept and not link.gone:
            self._kept.add(link)
            self._spawn(link.keep())

    def _on_news(self) -> None:
        """Handle what compiled code has noticed."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.carrier.news)
        for number, pair, peer, answer in self.carrier.failures().tolist():
            self._of_number[number].pairs.hear_failure(pair, peer, answer=bool(answer))
        for link in list(self._links.values()):
            self._settle(link)
            if link.clear():
                self._acceptor.refuse(
                    f"a connection was closed that had proved to be rank {link.rank} and then broke the protocol"
                )
            self._settle(link)
            if not link.rails:
                self._keep(link)
        self._questions.hear()
        self._halves.look()
        self._halves.sweep()

    def _on_failure(self, why: str, pairs: Sequence[Pair]) -> None:
        """Handle what a device has reported of queue pairs."""
        for link in list(self._links.values()):
            link.pairs.fail(why, pairs)

    def _look(self) -> None:
        for link in list(self._links.values()):
            link.look()
        self.carrier.wake()
        if self._halves.sweep():
            for link in list(self._links.values()):
                if link.silent(self._closing) and not link.gone:
                    link.give_up()


def _by_ends(routes: Sequence[Route]) -> list[list[Route]]:
    """The routes with the same ends together: to ports of InfiniBand several connections over TCP lead."""
    found: dict[Ends, list[Route]] = {}
    for route in routes:
        found.setdefault(route.ends, []).append(route)
    return list(found.values())
