"""The links of a process to processes on other hosts: makes their rails, replaces lost ones, and tells who is gone.

A thread with an event loop does this; no frame passes through it. Either side of a link connects, whichever opens a ring first;
where both do, the lower rank's connections stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from xvcomm.errors import AuthenticationError
from xvcomm.memory.ring import RingEnd, RingLayout
from xvcomm.system import forking
from xvcomm.system.notice import notice
from xvcomm.system.strangers import Strangers
from xvcomm.system.threads import Daemon
from xvcomm.trace.format import Excerpt
from xvcomm.types.deadline import Deadline
from xvcomm.wire import handshake
from xvcomm.wire.carrier import Carrier
from xvcomm.wire.connections import ends, hang_up, queued, set_up
from xvcomm.wire.halves import LINGER_SECONDS, Halves
from xvcomm.wire.incoming import PROTOCOL
from xvcomm.wire.questions import Questions
from xvcomm.wire.records import DOWN, MAX_RAILS
from xvcomm.wire.route import Route
from xvcomm.wire.sockets import TAMPERED
from xvcomm.wire.tls import Channel, Tls

_CONNECT_SECONDS, _RETRY_SECONDS, _LOOK_SECONDS = 2.0, 0.5, 0.2
_STALL_SECONDS = 0.6
"""A rail is replaced if the other host has acknowledged nothing for this long, and another rail of the link works."""
_SAY_SECONDS = 60.0
"""How long nothing is said of refused connections after one was told of."""
_FLUSH_SECONDS = 1.0


@dataclass(eq=False)
class _Rail:
    """A connection, its TLS, and when the other host last acknowledged something on it."""

    connection: socket.socket
    ends: tuple[str, str]
    channel: Channel | None
    acknowledged: int = 0
    moved: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class _Peer:
    """A process at the other end of a link."""

    rank: int
    link: int
    rails: dict[int, _Rail] = field(default_factory=dict)
    seen: float = field(default_factory=time.monotonic)  # when it last had a rail
    reasons: dict[str, str] = field(default_factory=dict)
    connecting: bool = False
    keeper: asyncio.Task[None] | None = None
    gone: bool = False


class Network:
    """All links of this process.

    Attributes:
        carrier: carries the frames.
        refused: connections that were closed because they did not prove the key, or broke the protocol.
    """

    def __init__(
        self, rank: int, size: int, key: bytes, listeners: Sequence[socket.socket], routes: Callable[[int], Sequence[Route]],
        timeout: float, spins: int, tls: Tls | None, lost: Callable[[int, str], None], left: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Begin to accept connections.

        Args:
            rank: of this process in the whole job, as all ranks here.
            size: of the whole job.
            key: of the job; nobody is heard who does not prove it.
            listeners: bound sockets, which are closed with the network.
            routes: ways to a rank; may block.
            timeout: seconds without a sign of a host after which its ranks are lost.
            spins: see `Carrier`.
            tls: what encrypts the connections, on all ranks or on none.
            lost, left: called for a rank whose process has died or cannot be reached, with the reason; that has left.
        """
        self._rank, self._size, self._key, self._listeners, self._routes = rank, size, key, listeners, routes
        self._timeout, self._tls, self._lost, self._left = timeout, tls, lost, left
        self.carrier = Carrier(spins)
        self._questions = Questions(self.carrier)
        self._peers: dict[int, _Peer] = {}
        self._lock = threading.Lock()
        self._of_link: dict[int, _Peer] = {}
        self._halves = Halves(self.carrier, lambda link: self._of_link[link].gone)
        self.refused, self._silent_until = 0, 0.0
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: Strangers[socket.socket] = Strangers(self._crowd_out)
        forking.register(self)
        self._thread = Daemon("xvcomm-network", self._run)
        self._thread.start()

    def open_ring(self, rank: int, name: int, layout: RingLayout, *, group: int, peer: int, producer: bool) -> RingEnd:
        """This process's half of a ring, mirrored by the one of the same name in the process of a rank.

        The link is made on first use.

        Args:
            group: of the ring's communicator, see `Transport.open_ring`.
            peer: the rank's number in the communicator.

        Raises:
            ResourceError: its memory cannot be had.
        """
        found = self._peer(rank)
        self._loop.call_soon_threadsafe(self._keep, found)
        return self._halves.open(found.link, name, layout, group=group, peer=peer, producer=producer)

    def leave(self, group: int, word: int) -> None:
        """Stop by an abort word all rings of a communicator that others open and this process does not."""
        self._halves.leave(group, word)

    def ask(self, rank: int, wanted: int, deadline: Deadline) -> Excerpt | None:
        """The newest records of a rank's flight recorder; None if it does not answer in time. Makes the link if there is none."""
        found = self._peer(rank)
        self._loop.call_soon_threadsafe(self._keep, found)
        return None if found.gone else self._questions.ask(found.link, wanted, deadline)

    def close(self) -> None:
        """Wait until the others have what was sent to them, and leave. Idempotent."""
        if not self._thread.is_alive():
            return
        until = time.monotonic() + LINGER_SECONDS
        while self._halves.sweep() and time.monotonic() < until:
            time.sleep(0.001)
        for peer in self._peers.values():
            if not peer.gone:
                self.carrier.leave(peer.link)
        until = time.monotonic() + _FLUSH_SECONDS
        while time.monotonic() < until and any(map(self._leaving, list(self._peers.values()))):
            time.sleep(0.001)
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._halves.close()
        self.carrier.close()
        for peer in self._peers.values():
            for rail in peer.rails.values():
                with contextlib.suppress(OSError):
                    rail.connection.shutdown(socket.SHUT_WR)
                rail.connection.close()

    def after_fork(self) -> None:
        """Leave the connections to the parent: the child's copies would hide its death from the others."""
        connections = [rail.connection for peer in self._peers.values() for rail in peer.rails.values()]
        for connection in [*self._listeners, *connections]:
            if connection.fileno() >= 0:
                forking.leave_to_parent(connection.fileno())

    def _leaving(self, peer: _Peer) -> bool:
        """Whether a process has not acknowledged yet that this one leaves."""
        if peer.gone or not peer.rails:
            return False
        unsent = self.carrier.link(peer.link).leave != 2
        return unsent or any(
            queued(rail.connection) or self.carrier.rails[i].out for i, rail in list(peer.rails.items())
        )

    def _peer(self, rank: int) -> _Peer:
        with self._lock:
            if rank not in self._peers:
                found = self._peers[rank] = _Peer(rank, self.carrier.add_link())
                self._of_link[found.link] = found
            return self._peers[rank]

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._loop.add_reader(self.carrier.news, self._on_news)
        for listener in self._listeners:
            listener.setblocking(False)
            self._spawn(self._accept(listener))
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._over.wait()
            self._look()
        self._loop.remove_reader(self.carrier.news)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            await self._strangers.room()
            try:
                connection, _ = await self._loop.sock_accept(listener)
            except OSError:  # out of descriptors, for the moment
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            self._strangers.enter(connection)
            self._spawn(self._greet(connection))

    async def _greet(self, connection: socket.socket) -> None:
        """Check who has connected, and use the connection as a rail."""
        peer = None
        try:
            connection.setblocking(False)
            async with asyncio.timeout(handshake.SECONDS):
                proven = await handshake.accept(connection, self._key, self._rank, self._size)
                peer = self._peer(proven.rank)
                refusal = self._objection(peer, connection)
                await handshake.admit(connection, proven.proof, refusal)
                if not refusal:
                    await self._use(peer, connection, proven.key, accepting=True)
                    return
        except (AuthenticationError, handshake.Malformed) as error:
            self._refuse(str(error) or "a connection was refused that does not speak this protocol")
        except TimeoutError:
            if peer is None:
                self._refuse("a connection was closed that did not prove the job's key in time")
        except OSError:
            self.refused += peer is None
        finally:
            self._strangers.leave(connection)
        connection.close()

    def _crowd_out(self, connection: socket.socket) -> None:
        self._say("connections were closed that had not proved the job's key, because there were too many of them")
        hang_up(connection)

    def _refuse(self, why: str) -> None:
        """Count a connection that was closed for what it did."""
        self.refused += 1
        self._say(why)

    def _say(self, why: str) -> None:
        """Warn of refused connections, unless that was done a short time ago."""
        if time.monotonic() >= self._silent_until:
            self._silent_until = time.monotonic() + _SAY_SECONDS
            notice(f"{why} (said once a minute; Communicator.refused() counts them)")

    def _objection(self, peer: _Peer, connection: socket.socket) -> str:
        """Why a connection of another process is not used, or nothing."""
        if peer.connecting and self._rank < peer.rank:
            return "this side connects at the moment"
        both = ends(connection)
        for index, rail in peer.rails.items():
            if rail.ends == both:
                if self._rank < peer.rank and time.monotonic() - rail.moved < _STALL_SECONDS:
                    return "there is such a rail"
                self.carrier.drop(index)
        return "" if len(peer.rails) < MAX_RAILS else f"a link has at most {MAX_RAILS} rails"

    async def _use(self, peer: _Peer, connection: socket.socket, key: bytes, *, accepting: bool) -> None:
        set_up(connection)
        tls, channel = 0, None
        if self._tls is not None:
            tls, channel = self._tls.functions, await self._tls.secure(connection, key, accepting=accepting)
        index = self.carrier.add_rail(peer.link, connection, tls, channel)
        peer.rails[index] = _Rail(connection, ends(connection), channel)

    def _keep(self, peer: _Peer) -> None:
        """Let a task make and replace a link's rails."""
        if peer.keeper is None and not peer.gone:
            peer.keeper = self._spawn(self._maintain(peer))

    async def _maintain(self, peer: _Peer) -> None:
        routes: Sequence[Route] = ()
        while not peer.gone:
            if not routes:
                try:
                    routes = await asyncio.to_thread(self._routes, peer.rank)
                    if not routes:
                        peer.reasons["interfaces"] = (
                            "no address of one host goes with one of the other; set XVCOMM_NICS"
                        )
                except Exception as error:
                    peer.reasons["store"] = str(error)
            here = {rail.ends for rail in peer.rails.values()}
            peer.connecting = True
            try:
                await asyncio.gather(
                    *(self._dial(peer, route) for route in routes if (route.local, route.remote) not in here)
                )
            finally:
                peer.connecting = False
            self._judge(peer)
            await asyncio.sleep(_RETRY_SECONDS if peer.rails else _RETRY_SECONDS / 5)

    async def _dial(self, peer: _Peer, route: Route) -> None:
        """Try once to make a rail."""
        family = socket.AF_INET6 if ":" in route.remote else socket.AF_INET
        way = f"{route.local} to {route.remote} port {route.port}"
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.bind((route.local, 0))
            async with asyncio.timeout(_CONNECT_SECONDS):
                await self._loop.sock_connect(connection, (route.remote, route.port))
            peer.seen = time.monotonic()  # its host answers, however long its process is busy
            async with asyncio.timeout(handshake.SECONDS):
                key = await handshake.connect(connection, self._key, self._rank, peer.rank)
                if ends(connection) not in {rail.ends for rail in peer.rails.values()}:
                    await self._use(peer, connection, key, accepting=False)
                    peer.reasons.pop(way, None)
                    return
        except handshake.Refused:
            pass  # the other side connects
        except TimeoutError:
            peer.reasons[way] = "no answer"
        except handshake.Malformed as error:
            peer.reasons[way] = f"what answers is no rank of this version {error}"
        except OSError as error:  # AuthenticationError is one
            peer.reasons[way] = error.strerror or str(error)
            if isinstance(error, ConnectionRefusedError) and not peer.rails:
                peer.seen = min(peer.seen, time.monotonic() - self._timeout)
        except asyncio.CancelledError:
            connection.close()
            raise
        connection.close()

    def _judge(self, peer: _Peer) -> None:
        """Decide whether a process without rails is gone."""
        now = time.monotonic()
        if peer.rails:
            peer.seen = now
        elif now - peer.seen > self._timeout and not peer.gone:
            peer.gone = True
            reasons = "; ".join(f"{way}: {why}" for way, why in peer.reasons.items())
            self._lost(peer.rank, f"it cannot be reached ({reasons or 'no connection'})")

    def _on_news(self) -> None:
        """Handle what compiled code has noticed."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.carrier.news)
        for peer in list(self._peers.values()):
            for index, rail in list(peer.rails.items()):
                if self.carrier.rails[index].state == DOWN:
                    if self.carrier.rails[index].error in (PROTOCOL, TAMPERED):
                        self._refuse(
                            f"a connection was closed that had proved to be rank {peer.rank} and then broke the protocol"
                        )
                    del peer.rails[index]
                    rail.connection.close()
                    self.carrier.release(index)
            if not peer.gone and self.carrier.link(peer.link).left:
                peer.gone = True
                self._left(peer.rank)
            elif not peer.rails and not peer.gone:
                peer.seen = time.monotonic()
                self._keep(peer)
        self._questions.hear()
        self._halves.look()
        self._halves.sweep()

    def _look(self) -> None:
        """Send a sign of life on each rail, and replace those that have stalled."""
        now = time.monotonic()
        for peer in list(self._peers.values()):
            for index, rail in peer.rails.items():
                record = self.carrier.rails[index]
                acknowledged = record.sent - queued(rail.connection)
                if acknowledged != rail.acknowledged or acknowledged == record.sent:
                    rail.acknowledged, rail.moved = acknowledged, now
                record.ping = 1
            alive = [rail for rail in peer.rails.values() if now - rail.moved < _STALL_SECONDS]
            for index, rail in peer.rails.items():
                if now - rail.moved > (_STALL_SECONDS if alive else self._timeout):
                    self.carrier.drop(index)
        self.carrier.wake()
        self._halves.sweep()
