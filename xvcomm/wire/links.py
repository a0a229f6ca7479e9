"""What joins this process with one other: makes the rails, replaces lost ones, and tells when the other is gone.

Everything here runs in the event loop of `Network`. Either side of a link connects; where both do, the lower rank's connections
stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xvcomm.abc import transport as abc
from xvcomm.abc.cards import Cards
from xvcomm.errors import AuthenticationError, ResourceError, XvcommError
from xvcomm.system import heartbeat
from xvcomm.system.notice import notice
from xvcomm.types.deadline import Deadline
from xvcomm.types.route import MAX_RAILS, RDMA, Ends, Route
from xvcomm.wire import handshake
from xvcomm.wire.carrier import Carrier
from xvcomm.wire.connections import ends, set_up
from xvcomm.wire.incoming import PROTOCOL
from xvcomm.wire.link_pairs import LinkPairs
from xvcomm.wire.paths import Paths
from xvcomm.wire.rails import SILENT_SECONDS, STALL_SECONDS, Rail
from xvcomm.wire.reachability import REMEDY, Search, connect, reason, told
from xvcomm.wire.records import DOWN
from xvcomm.wire.sockets import TAMPERED
from xvcomm.wire.tls import Tls

_RETRY_SECONDS = 0.5
_REMEDY = f"{REMEDY}; `xvcomm doctor --reach`, started as the ranks are, shows who reaches whom"
_NOTICE_SECONDS = 0.5
"""A process at which nothing listens any more may have left in good order: so long the job's store has to tell of it."""
_RDMA_RETRY_SECONDS = 2.0
"""How long a route of RDMA that has failed is left alone; the others carry meanwhile."""
_AWAIT_SECONDS, _AWAIT_PAUSE_SECONDS = 10.0, 0.002
"""How long the first ring of a GPU to a process waits for a rail; without one of RDMA it lies in host memory for good."""
_TROUBLE_SECONDS = 1.0
"""How long it waits for another rail of RDMA after one could not be made."""
DRAIN_SECONDS = 1.0
"""How long the requests of queue pairs that are given back may take to end."""


@dataclass(frozen=True)
class Process:
    """What the links of a process have in common; see `Network`."""

    rank: int
    key: bytes
    carrier: Carrier
    tls: Tls | None
    timeout: float
    routes: Callable[[int], Sequence[Route]]
    lost: Callable[[int, str], None]
    cards: Cards | None = None
    congestion: str = ""  # TCP's congestion control
    blocked: set[str] = field(default_factory=set)  # addresses of which was said that they are
    said: set[tuple[str, str]] = field(default_factory=set)  # the same of RDMA, with the reason


class Link:
    """To the process of one rank.

    Attributes:
        rank: in the whole job.
        number: index of the carrier's record.
        rails: by the carrier's index.
        paths: where it has had rails.
        pairs: queue pairs of rails, and of lost ones.
        gone: whether the process has ended, has left, or cannot be reached.
    """

    def __init__(self, own: Process, rank: int) -> None:
        self._own, self.rank, self.number = own, rank, own.carrier.add_link()
        self.rails: dict[int, Rail] = {}
        self.paths = Paths()
        self.gone = False
        self.pairs = LinkPairs(own, rank, self.number, self.rails)
        self._troubles = self.pairs.troubles
        self._seen = self._heard = time.monotonic()  # when it last had a rail or its host answered; when something came
        self._accepted = -math.inf  # when its host has accepted a connection
        self._awaited = -math.inf  # until when the first ring has waited
        self._received = 0
        self._search = Search(())
        self._trouble = ""
        self._handshaking: set[socket.socket] = set()  # connections whose handshake has not ended
        self._stir = asyncio.Event()
        self._hurries = False  # whether to try all routes at once, since any answer of the host will do

    def doubt(self, seconds: float) -> None:
        """Nothing was heard of the process's host for some seconds, over other ways than this link's."""
        before = time.monotonic() - seconds
        if not self._search.proven and self._accepted < before:
            self._seen, self._hurries = min(self._seen, before), True
            self._stir.set()

    async def keep(self) -> None:
        """Make rails and replace lost ones, until the process is gone."""
        while not self.gone and not await self._find_routes():
            self._judge()
            await asyncio.sleep(_RETRY_SECONDS)
        async with asyncio.TaskGroup() as dials:
            while not self.gone:
                pause = _RETRY_SECONDS if self.rails else _RETRY_SECONDS / 5
                routes = self._search.begin_all() if self._hurries else self._search.begin(self._up(), pause)
                self._hurries = False
                for route in routes:
                    dials.create_task(self._dial(route))
                try:
                    async with asyncio.timeout(pause):
                        await self._stir.wait()
                except TimeoutError:
                    pass
                self._stir.clear()
                self._judge()

    async def _find_routes(self) -> bool:
        try:
            routes = await asyncio.to_thread(self._own.routes, self.rank)
        except Exception as error:
            self._trouble = str(error)
            return False
        self._search = Search(routes)
        for both in self._up():
            self._search.prove(both)
        self._trouble = "" if routes else "no address of one host goes with one of the other; set XVCOMM_NICS"
        return bool(routes)

    def _up(self) -> set[Ends]:
        return {rail.ends for rail in self.rails.values()} | self.pairs.making

    async def _dial(self, route: Route) -> None:
        """Try once to make a rail."""
        why, refused = "", False
        try:
            await asyncio.sleep(self._troubles.pause(route.ends))
            await self._connect(route)
        except handshake.Refused:
            # The other side connects; until then no other route of the interfaces is tried.
            await asyncio.sleep(_RETRY_SECONDS)
        except (OSError, handshake.Malformed) as error:
            why, refused = reason(error), isinstance(error, ConnectionRefusedError)
            if route.number >= RDMA and not isinstance(error, TimeoutError):
                self._troubles.note_route(f"{route}: {why}")
        except ResourceError as error:
            why = str(error)
            self.pairs.say(route.ends, why)
            await asyncio.sleep(_RDMA_RETRY_SECONDS)
        finally:
            self._search.end(route, why, refused=refused)
            self._stir.set()

    async def _connect(self, route: Route) -> None:
        own, before, used = self._own, self._seen, False
        connection = await connect(route)
        self._seen = self._accepted = time.monotonic()  # its host answers, however long its process is busy
        self._handshaking.add(connection)
        try:
            heartbeat.begin(connection, own.timeout)
            async with asyncio.timeout(handshake.SECONDS):
                key = await handshake.connect(connection, own.key, own.rank, self.rank, route.number, route.gids)
                heartbeat.end(connection)
                both = ends(connection, route.number, route.gids)
                if self._search.fits(route, self._up()) and not self.gone:
                    await self.use(connection, both, key, accepting=False)
                    used = True
        except (AuthenticationError, handshake.Malformed):
            self._seen = before
            raise
        finally:
            self._handshaking.discard(connection)
            if not used:
                connection.close()

    def objection(self, both: Ends) -> str:
        """Why a connection with these ends that the other process has made is not used, or nothing."""
        first = self._own.rank < self.rank
        if first and self._search.tries(both):
            return "this side connects at the moment"
        for index, rail in self.rails.items():
            if rail.ends == both:
                if first and time.monotonic() - rail.waits < STALL_SECONDS:
                    return "there is such a rail"
                self._own.carrier.drop(index)
        return "" if len(self.rails) < MAX_RAILS else f"a link has at most {MAX_RAILS} rails"

    async def use(self, connection: socket.socket, both: Ends, key: bytes, *, accepting: bool) -> None:
        """Make a rail of a connection that has proved the job's key; see `Tls.secure`."""
        if both[2] >= RDMA:
            await self._use_rdma(connection, both)
            return
        set_up(connection, self._own.congestion)
        own, tls, channel = self._own, 0, None
        if own.tls is not None:
            tls, channel = own.tls.functions, await own.tls.secure(connection, key, accepting=accepting)
        path = self.paths.use("tcp", both)
        index = own.carrier.add_rail(self.number, path, self.paths.route(path), connection, tls, channel)
        self._add(index, Rail(connection, both, channel, path=path))
        own.blocked.discard(both[0])

    def _add(self, index: int, rail: Rail) -> None:
        self.rails[index] = rail
        self.paths.begin(rail.path, self._own.carrier.rails[index])
        self._search.prove(rail.ends)

    async def _use_rdma(self, connection: socket.socket, both: Ends) -> None:
        """Make a rail of a queue pair; the connection only tells when the other side gives it up."""
        made = await self.pairs.make(connection, both)
        path = self.paths.use("rdma", both)
        try:
            index = self._own.carrier.use_pair(self.number, path, made.posted)
        except ResourceError:
            made.give_back()
            raise
        self._add(index, Rail(connection, both, rdma=made, path=path))
        asyncio.get_running_loop().add_reader(connection.fileno(), self._hang_up, index, connection)

    def _hang_up(self, index: int, connection: socket.socket) -> None:
        """The other side has closed a connection beside a queue pair: it has given the rail up, or its process has ended."""
        asyncio.get_running_loop().remove_reader(connection.fileno())
        if index in self.rails and self.rails[index].connection is connection:
            self._own.carrier.drop(index)

    def _judge(self) -> None:
        """Decide whether a process without rails is gone, and say which interface is in no rail although others are."""
        if self.rails:
            self._seen = time.monotonic()
            self._say_blocked()
            if self._own.cards is not None and (why := self._troubles.verdict(up=self.direct)):
                self._lose(why)
            return
        self._troubles.excuse()
        search, timeout, now = self._search, self._own.timeout, time.monotonic()
        self._seen = max([self._seen, *(now - heartbeat.silence(connection) for connection in self._handshaking)])
        if search.ended() and now - self._seen > _NOTICE_SECONDS:
            why = f"nothing listens any more where it did ({told(search.failures)})"
        elif now - self._seen > timeout and search.waited():
            why = f"it cannot be reached ({self._trouble or told(search.failures) or 'no connection'}); {_REMEDY}"
        else:
            return
        self._lose(f"{why}; RDMA: {self._troubles.text}" if self._troubles.text else why)

    def _lose(self, why: str) -> None:
        if not self.gone:
            self.gone = True
            self._own.lost(self.rank, why)

    def _say_blocked(self) -> None:
        failures = self._search.blocked(self._up())
        silent = {route.local: route.interfaces[0] for route in failures if route.local not in self._own.blocked}
        for address, interface in silent.items():
            self._own.blocked.add(address)
            of_it = {route: why for route, why in failures.items() if route.local == address}
            notice(f"{interface} ({address}) carries nothing to rank {self.rank}: {told(of_it)}; {_REMEDY}")

    def clear(self) -> bool:
        """Forget the rails that compiled code has lost; whether the other side has broken the protocol on one."""
        broken, now = False, time.monotonic()
        seen = now - self._own.timeout / 2  # to find another route takes time, too
        for index, rail in list(self.rails.items()):
            record = self._own.carrier.rails[index]
            if record.state == DOWN:
                seen = max(seen, min(now, rail.waits))
                broken = broken or record.error in (PROTOCOL, TAMPERED)
                del self.rails[index]
                self.paths.end(rail.path, record)
                self._search.lose(rail.ends)
                if rail.rdma is None:
                    self._own.carrier.retire(index)
                else:
                    asyncio.get_running_loop().remove_reader(rail.connection.fileno())
                    self.pairs.give_up(index, rail.ends, rail.rdma, gone=self.gone)
                rail.connection.close()
                self._stir.set()
                if not self.rails:
                    self._seen = seen
                    self._search.forget()
        return broken

    def look(self) -> None:
        """Send a sign of life on each rail, and replace those that have stalled."""
        now, carrier = time.monotonic(), self._own.carrier
        received = sum(carrier.rails[index].received for index in self.rails)
        if received != self._received:
            self._received, self._heard = received, now
        self.paths.look()
        for index, rail in self.rails.items():
            record = carrier.rails[index]
            acknowledged, waiting = rail.progress(record.sent)
            if acknowledged != rail.acknowledged or waiting == 0:
                rail.acknowledged, rail.waits = acknowledged, math.inf
            else:
                rail.waits = min(rail.waits, now)
            record.ping = 1
        alive = any(now - rail.waits < STALL_SECONDS for rail in self.rails.values())
        timeout = self._own.timeout
        for index, rail in self.rails.items():
            if now - rail.waits > (rail.patience if alive else max(min(rail.patience, timeout), timeout / 2)):
                carrier.drop(index)
        self.pairs.look(gone=self.gone)

    @property
    def direct(self) -> bool:
        """Whether it has rails of RDMA."""
        return any(rail.rdma is not None for rail in list(self.rails.values()))

    def await_rails(self, deadline: Deadline) -> None:
        """Wait a while for a rail; of RDMA, if this process has a GPU whose memory its devices reach. Any other thread.

        To make one takes Python on both sides: too late once a kernel waits for a message and the driver for the kernel.
        """
        cards, begun = self._own.cards, time.monotonic()
        if self._awaited < 0:
            self._awaited = begun + _AWAIT_SECONDS  # later rings do not wait for what has not come until then
        wants_rdma = cards is not None and cards.has_direct and self._has_rdma_routes()
        while not self.gone and time.monotonic() < min(self._awaited, begun + deadline.left()):
            if self.rails and (not wants_rdma or self.direct):
                return
            if self.rails and begun - _TROUBLE_SECONDS < self._troubles.newest < time.monotonic() - _TROUBLE_SECONDS:
                return
            time.sleep(_AWAIT_PAUSE_SECONDS)

    def _has_rdma_routes(self) -> bool:
        try:
            return any(route.number >= RDMA for route in self._own.routes(self.rank))
        except XvcommError:  # the job's store fails, of which others tell
            return False

    def silent(self, since: float) -> bool:
        """Whether nothing has come for long, and not since a time either: the process is stopped, or its host is out of reach."""
        return time.monotonic() - max(self._heard, since) > SILENT_SECONDS

    def give_up(self) -> None:
        """Send nothing more: what a connection has begun to send and cannot end keeps its memory in use."""
        self.gone = True
        for index in self.rails:
            self._own.carrier.drop(index)

    def state(self) -> list[abc.Rail]:
        """Its rails, for the user."""
        records = self._own.carrier.rails
        return [
            abc.Rail(self.rank, rail.scheme, *rail.ends, records[i].sent, records[i].received)
            for i, rail in list(self.rails.items())
        ]

    def answers(self) -> bool:
        """Whether the other host has acknowledged what was sent to it, or has accepted a connection, a moment ago."""
        now, rails = time.monotonic(), list(self.rails.values())
        if rails:
            return any(now - rail.waits < STALL_SECONDS or rail.answers for rail in rails)
        return now - self._accepted < SILENT_SECONDS

    def told(self) -> str:
        """Its connections and their states in words, for the user."""
        return self.paths.told({rail.path: rail.waits for rail in list(self.rails.values())})

    def end_rdma(self) -> None:
        """Let nothing more arrive over RDMA. The process has left, or waits for nothing any more; the event loop has ended."""
        self.gone = True
        self.pairs.fail_all()

    def close(self) -> None:
        """Close the connections; nothing carries any more."""
        for rail in self.rails.values():
            with contextlib.suppress(OSError):
                rail.connection.shutdown(socket.SHUT_WR)
            rail.connection.close()

    def leaving(self) -> bool:
        """Whether the process has not acknowledged yet that this one leaves."""
        if self.gone or not self.rails:
            return False
        rails, carrier = list(self.rails.items()), self._own.carrier
        return carrier.link(self.number).leave != 2 or any(r.progress(0)[1] or carrier.rails[i].out for i, r in rails)
