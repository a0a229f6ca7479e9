"""`xvcomm doctor --reach`: which hosts of a job reach each other, by which network interfaces, and what is blocked."""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from xvcomm.abc.store import PrefixStore, Store
from xvcomm.abc.transport import KEY_BYTES, Membership, PairTrial, Transport
from xvcomm.cli import queue_pairs
from xvcomm.cli.queue_pairs import QueuePairs
from xvcomm.comm.init import rendezvous
from xvcomm.config import Config
from xvcomm.engine.session import plugins
from xvcomm.engine.session.joining import host_identity
from xvcomm.rendezvous.environment import discover
from xvcomm.types.deadline import Deadline
from xvcomm.types.route import Route
from xvcomm.wire.reachability import REMEDY, disjoint, free

_NAMED = 6
"""Number of hosts up to which the table names the interfaces."""
_LISTED = 64
"""Most blocked routes that are listed."""


class _Place(msgspec.Struct, frozen=True):
    """Where a rank is: what identifies its host, and the host's name; and a key, of which rank 0's is for all."""

    host: str
    name: str
    key: bytes


class _Found(msgspec.Struct, frozen=True):
    """What a rank has found: the routes to a rank of each other host, the RDMA devices tried with it, those of its host."""

    ways: list[tuple[int, list[tuple[Route, str]]]]
    pairs: list[tuple[int, list[PairTrial]]]
    devices: queue_pairs.Devices


@dataclass(frozen=True)
class Reach:
    """Who reaches whom.

    Attributes:
        hosts: their names.
        routes: from a host to another one, by their indices: why each route does not work, or nothing. Preferred ones come first.
        pairs: which of their RDMA devices form queue pairs.
    """

    hosts: list[str]
    routes: dict[tuple[int, int], dict[Route, str]]
    pairs: QueuePairs = field(default_factory=QueuePairs)

    def rails(self, here: int, there: int) -> list[Route]:
        """The connections that one host can make to another, each over interfaces of its own."""
        return disjoint(route for route, why in self.routes[here, there].items() if not why)

    def blocked(self, here: int, there: int) -> dict[Route, str]:
        """What would add to these connections if it worked."""
        routes = self.routes[here, there]
        return {route: routes[route] for route in free(routes, [r.interfaces for r in self.rails(here, there)])}

    def apart(self) -> list[tuple[int, int]]:
        """The pairs of hosts of which neither reaches the other."""
        pairs = itertools.combinations(range(len(self.hosts)), 2)
        return [(a, b) for a, b in pairs if not self.rails(a, b) and not self.rails(b, a)]


def reach(env: Mapping[str, str], as_json: bool) -> bool:
    """Try all routes between the hosts of the job that a launcher has started this process in; rank 0 prints what works.

    Returns:
        Whether all hosts reach each other, as far as this rank knows: rank 0 does.
    """
    config = Config.from_env(env)
    launcher = discover(env, config)
    deadline = Deadline.after(config.timeout)
    base = rendezvous(launcher, config, env, deadline)
    try:
        found = find(PrefixStore("reach", base), launcher.rank, launcher.size, config, env, deadline)
    finally:
        base.close()
    if found is None:
        return True
    if as_json:
        typer.echo(json.dumps(_plain(found), indent=2))
    else:
        _show(found, Console())
    return not found.apart()


def find(
    store: Store, rank: int, size: int, config: Config, env: Mapping[str, str], deadline: Deadline
) -> Reach | None:  # fmt: skip
    """Try the routes together with the other ranks; rank 0 gets the result."""
    name = config.host or socket.gethostname()
    place = _Place(host_identity(config.shm_dir, config.host), name, secrets.token_bytes(KEY_BYTES))
    store.set(f"place/{rank}", msgspec.msgpack.encode(place), deadline)
    places = [msgspec.msgpack.decode(store.get(f"place/{r}", deadline), type=_Place) for r in range(size)]
    neighbours = sum(other.host == place.host for other in places)
    membership = Membership(
        rank, size, neighbours, store, places[0].key, lambda rank, why: None, lambda rank: None, None, plugins.cards
    )
    with contextlib.ExitStack() as cleanup:
        ways, pairs = [], []
        partners = _partners(places, rank)
        for usable in filter(lambda found: found.usable, plugins.transports()):
            transport: Transport = usable.load()(config, place.host)
            cleanup.callback(transport.close)
            transport.join(membership)
            ways += [(member, list(routes.items())) for member, routes in transport.probe(partners).items()]
            pairs += [(member, list(trials)) for member, trials in transport.try_pairs(partners).items()]
        mine = _Found(ways, pairs, queue_pairs.devices(config, env))
        store.set(f"ways/{rank}", msgspec.msgpack.encode(mine), deadline)
        if rank == 0:
            found = [msgspec.msgpack.decode(store.get(f"ways/{r}", deadline), type=_Found) for r in range(size)]
            store.set("over", b"", deadline)
            return _merge(places, found)
        store.get("over", deadline)  # until then the others try to reach this one
        return None


def _partners(places: list[_Place], rank: int) -> list[int]:
    """One rank of each other host, a different one for each rank of this host as far as there are."""
    hosts: dict[str, list[int]] = {}
    for number, place in enumerate(places):
        hosts.setdefault(place.host, []).append(number)
    mine = hosts.pop(places[rank].host)
    return [ranks[mine.index(rank) % len(ranks)] for ranks in hosts.values()]


def _merge(places: list[_Place], found: list[_Found]) -> Reach:
    """What the ranks have found, by hosts: a route works if it works for all of them."""
    hosts = list(dict.fromkeys(place.host for place in places))
    names = {place.host: place.name for place in places}
    worst: dict[tuple[int, int], dict[tuple[str, str], tuple[Route, str]]] = {
        pair: {} for pair in itertools.permutations(range(len(hosts)), 2)
    }
    for rank, told in enumerate(found):
        for member, routes in told.ways:
            pair = hosts.index(places[rank].host), hosts.index(places[member].host)
            for route, why in routes:
                _, known = worst[pair].setdefault((route.local, route.remote), (route, why))
                if why and not known:
                    worst[pair][route.local, route.remote] = route, why
    hostnames = [names[host] for host in hosts]
    pairs = queue_pairs.merge(
        hostnames, [hosts.index(place.host) for place in places], [rank.pairs for rank in found],
        [rank.devices for rank in found],
    )  # fmt: skip
    return Reach(hostnames, {pair: dict(routes.values()) for pair, routes in worst.items()}, pairs)


def _plain(found: Reach) -> dict[str, object]:
    def told(here: int, there: int, route: Route, why: str) -> dict[str, object]:
        return {"from": found.hosts[here], "to": found.hosts[there], **route._asdict(), "refusal": why}

    return {
        "hosts": found.hosts,
        "rails": [told(*pair, route, "") for pair in found.routes for route in found.rails(*pair)],
        "blocked": [told(*pair, route, why) for pair in found.routes for route, why in found.blocked(*pair).items()],
        "rdma": found.pairs.plain(),
    }


def _show(found: Reach, console: Console) -> None:
    if len(found.hosts) == 1:
        console.print("All ranks are on one host, which needs no network.", highlight=False)
        return
    for here, there in found.apart():
        console.print(f"[red]{escape(found.hosts[here])} and {escape(found.hosts[there])} do not reach each other.[/]")
    if not found.apart():
        console.print("[green]All hosts reach each other.[/]")
    table = Table("from / to", *found.hosts, title="Connections between hosts", title_justify="left")
    for here, name in enumerate(found.hosts):
        table.add_row(name, *(Text(_cell(found, here, there)) for there in range(len(found.hosts))))
    console.print(table)
    blocked = [
        f"{found.hosts[here]} to {found.hosts[there]}: {route}: {why}"
        for here, there in found.routes
        for route, why in found.blocked(here, there).items()
    ]
    if blocked:
        lines = ["Blocked, one connection more each if it worked:", *blocked[:_LISTED]]
        if len(blocked) > _LISTED:
            lines.append(f"and {len(blocked) - _LISTED} others; --json lists all")
        console.print(escape("\n".join([*lines, f"Remedy: {REMEDY}"])), highlight=False, soft_wrap=True)
    for line in found.pairs.lines():
        console.print(escape(line), highlight=False, soft_wrap=True)


def _cell(found: Reach, here: int, there: int) -> str:
    if here == there:
        return "-"
    if not found.routes[here, there]:
        return "0: no addresses that go together"
    rails = found.rails(here, there)
    names = ", ".join(" to ".join(route.interfaces) for route in rails) if len(found.hosts) <= _NAMED else ""
    return f"{len(rails)}: {names}" if names else str(len(rails))
