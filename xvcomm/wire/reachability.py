"""Which pairs of addresses join two processes of different hosts: the order in which they are tried, and what came of it."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from xvcomm.types.route import Ends, Route
from xvcomm.wire import handshake
from xvcomm.wire.congestion import unpace

_CONNECT_SECONDS = 1.4
"""How long a host may take to accept a connection: the kernel asks a second time after one second."""
GRACE_SECONDS = 3.0
"""How long nothing is said of an interface whose rail was lost."""
REMEDY = "let the hosts reach each other there (firewall, routes; XVCOMM_PORTS), or choose interfaces by XVCOMM_NICS"


async def connect(route: Route) -> socket.socket:
    """A connection by a route.

    Raises:
        OSError: there is none.
    """
    local, remote = route.hosts
    connection = socket.socket(socket.AF_INET6 if ":" in remote else socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        unpace(connection)
        connection.bind((local, 0))
        async with asyncio.timeout(_CONNECT_SECONDS):
            await asyncio.get_running_loop().sock_connect(connection, (remote, route.port))
    except BaseException:
        connection.close()
        raise
    return connection


def reason(error: Exception) -> str:
    """Why a route does not work, of an error of `connect` or of the handshake."""
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or "what answers there is no rank of this version"


async def probe(at_once: asyncio.Semaphore, key: bytes, rank: int, peer: int, route: Route) -> str:
    """Try a route to a rank twice, with the proof of the job's key; why it does not work, or nothing."""
    why = ""
    for _ in range(2):
        async with at_once:
            try:
                with await connect(route) as connection:
                    async with asyncio.timeout(handshake.SECONDS):
                        await handshake.connect(connection, key, rank, peer, handshake.PROBE)
            except handshake.Refused:  # as every probe
                return ""
            except (OSError, handshake.Malformed) as error:
                why = reason(error)
    return why


def free(routes: Iterable[Route], taken: Collection[tuple[str, str]]) -> list[Route]:
    """The routes whose interfaces are in none of these pairs."""
    here, there = ({pair[side] for pair in taken} for side in range(2))
    return [route for route in routes if route.interfaces[0] not in here and route.interfaces[1] not in there]


def disjoint(routes: Iterable[Route], taken: Collection[tuple[str, str, int]] = ()) -> list[Route]:
    """The first routes, in their order, of which those with one number have each network interface of either side once at most.

    Args:
        routes: to one process.
        taken: pairs of interfaces, and the number with which both are left out.
    """
    here, there = ({(pair[side], pair[2]) for pair in taken} for side in range(2))
    found = []
    for route in routes:
        near, far = ((interface, route.number) for interface in route.interfaces)
        if near not in here and far not in there:
            found.append(route)
            here.add(near)
            there.add(far)
    return found


def _place(route: Route) -> tuple[str, str, int]:
    """The interfaces that a route needs, and its number."""
    return (*route.interfaces, route.number)


def told(failures: Mapping[Route, str]) -> str:
    """The routes that do not work, each with its reason."""
    return "; ".join(dict.fromkeys(f"{route}: {why}" for route, why in failures.items()))


class Search:
    """The routes to a process: which to try next, and what is known of them.

    Rails are named by their ends.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        """`routes`: the preferred ones first."""
        self._routes = routes
        self._of_hosts = [route for route in routes if not route.via]
        self._interfaces = {(route.local, route.remote): route.interfaces for route in routes}
        self._trying: set[Route] = set()
        self._tried: dict[Route, float] = {}  # when, the last time
        self._refusing: set[Route] = set()
        self._proven: set[str] = set()
        self._lost: dict[tuple[str, str], float] = {}  # when a rail of these interfaces was lost
        self.failures: dict[Route, str] = {}

    def _of(self, ends: Ends) -> tuple[str, str]:
        """The interfaces of a rail, or its addresses if no route has them."""
        return self._interfaces.get(ends[:2], ends[:2])

    def begin(self, rails: Collection[Ends], pause: float) -> list[Route]:
        """The routes to try now, which are tried until their `end`.

        An interface that is in a rail, or is tried, is left alone. Of the other routes those come first that were not tried, then
        those that were tried longest ago, if that is `pause` seconds; but not where a route that was not tried waits for nothing
        but routes that are tried again, or two of those could keep it waiting in turn.
        """
        joined = [(*self._of(ends), ends[2]) for ends in rails]
        taken = [*joined, *map(_place, self._trying)]
        firmly = [*joined, *(_place(route) for route in self._trying if route not in self._tried)]
        fresh = [route for route in self._routes if route not in self._tried and route not in self._trying]
        found = disjoint(fresh, taken)
        waiting = [route for route in fresh if route not in found and disjoint([route], firmly)]
        before = time.monotonic() - pause
        due = [route for route in self._routes if self._tried.get(route, math.inf) <= before]
        due.sort(key=self._tried.__getitem__)
        found += disjoint(due, [*taken, *map(_place, (*found, *waiting))])
        self._trying.update(found)
        return found

    def begin_all(self) -> list[Route]:
        """All routes that were not tried, as if each interface could be in any number of rails; see `fits`.

        Without those between ports of InfiniBand, whose hosts are tried by others.
        """
        found = [route for route in self._of_hosts if route not in self._tried and route not in self._trying]
        self._trying.update(found)
        return found

    def fits(self, route: Route, rails: Collection[Ends]) -> bool:
        """Whether the interfaces of a route, with its number, are in none of these rails."""
        return bool(disjoint([route], [(*self._of(ends), ends[2]) for ends in rails]))

    def end(self, route: Route, why: str = "", *, refused: bool = False) -> None:
        """Note what came of a route.

        Args:
            why: it does not work; empty if it does, or the other side connects.
            refused: whether its host says that nobody listens there.
        """
        self._trying.discard(route)
        self._tried[route] = time.monotonic()
        self._refusing.discard(route)
        self.failures.pop(route, None)
        if why:
            self.failures[route] = why
        if refused:
            self._refusing.add(route)

    def tries(self, ends: Ends) -> bool:
        """Whether such a rail is being made."""
        return any(route.ends == ends for route in self._trying)

    def prove(self, ends: Ends) -> None:
        """Note that a rail has come up, so that the address at its other end is the process's."""
        self._proven.add(ends[1])

    def lose(self, ends: Ends) -> None:
        """Note that a rail is lost."""
        self._lost[self._of(ends)] = time.monotonic()

    def forget(self) -> None:
        """Begin anew, because all rails are lost: what was tried before says nothing any more."""
        self._tried.clear()
        self._refusing.clear()
        self.failures.clear()

    @property
    def proven(self) -> bool:
        """Whether there was a rail."""
        return bool(self._proven)

    def waited(self) -> bool:
        """Whether a process that does not answer for long may be given up: there was a rail, or all routes were tried."""
        return self.proven or all(route in self._tried for route in self._of_hosts)

    def ended(self) -> bool:
        """Whether the process has ended: all its addresses were tried, and nobody listens where it did, or nowhere."""
        every = {route.remote for route in self._of_hosts}
        refusing = {route.hosts[1] for route in self._refusing}
        tried = {route.remote for route in self._tried if not route.via} == every
        return tried and bool(refusing & self._proven or refusing == every) and bool(every)

    def blocked(self, rails: Collection[Ends]) -> dict[Route, str]:
        """The routes between interfaces that have been in no rail for a while, with their failures, if all have failed."""
        before = time.monotonic() - GRACE_SECONDS
        unused = free(
            self._of_hosts, [*map(self._of, rails), *(pair for pair, at in self._lost.items() if at > before)]
        )
        return {r: self.failures[r] for r in unused} if all(r in self.failures for r in unused) else {}
