"""`xvcomm doctor --cluster`: what differs between the ranks of a job, and what is blocked between their hosts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xvcomm.abc.store import PrefixStore, Store
from xvcomm.cli import queue_pairs, reach
from xvcomm.cli.facts import Fact, facts, host_name
from xvcomm.comm.init import rendezvous
from xvcomm.config import Config
from xvcomm.engine.session.joining import host_identity
from xvcomm.rendezvous.environment import discover
from xvcomm.types.deadline import Deadline
from xvcomm.wire.reachability import REMEDY

_SECONDS = 0.1
"""Clocks may differ by so much."""
_NAMED = 6
"""Number of hosts, or of ranks, up to which they are named."""


class RankReport(msgspec.Struct, frozen=True):
    """What a rank tells.

    Attributes:
        host: identifies its host.
        name: of its host.
        ahead: seconds by which the host's clock is ahead of that of rank 0, at least; behind if negative.
    """

    host: str
    name: str
    facts: list[Fact]
    ahead: float = 0.0


_DECODER = msgspec.msgpack.Decoder(RankReport)


@dataclass(frozen=True)
class Difference:
    """Something in which ranks differ, or that does not work between their hosts.

    Attributes:
        what: for users.
        values: each with the ranks, or the pair of hosts, that have it.
        remedy: what to do.
    """

    what: str
    values: list[tuple[str, str]]
    remedy: str


def cluster(env: Mapping[str, str], as_json: bool) -> bool:
    """Compare the ranks of the job that a launcher has started this process in; rank 0 prints the differences.

    Returns:
        Whether there are none, as far as this rank knows: rank 0 does.
    """
    config = Config.from_env(env)
    launcher = discover(env, config)
    rank, size, deadline = launcher.rank, launcher.size, Deadline.after(config.timeout)
    base = rendezvous(launcher, config, env, deadline)
    try:
        store = PrefixStore("cluster", base)
        reports = _exchange(store, rank, size, config, env, deadline)
        found = reach.find(PrefixStore("reach", base), rank, size, config, env, deadline)
    finally:
        base.close()
    if found is None:
        return True
    told = [*differences(reports), *blocked(found)]
    if as_json:
        hosts = list({report.host: report.name for report in reports}.values())
        plain = {"ranks": size, "hosts": hosts, "differences": [asdict(one) for one in told]}
        typer.echo(json.dumps(plain, indent=2))
    else:
        _show(told, reports, Console())
    return not told


def _exchange(
    store: Store, rank: int, size: int, config: Config, env: Mapping[str, str], deadline: Deadline
) -> list[RankReport]:
    """What all ranks tell."""
    host = host_identity(config.shm_dir, config.host)
    ahead = _clock(store, rank, size, deadline)
    mine = RankReport(host, host_name(config), facts(config, env, host), ahead)
    store.set(f"report/{rank}", msgspec.msgpack.encode(mine), deadline)
    return [_DECODER.decode(store.get(f"report/{r}", deadline)) for r in range(size)]


def _clock(store: Store, rank: int, size: int, deadline: Deadline) -> float:
    """Seconds by which this clock is ahead of rank 0's, less what the question took. Ranks ask one after the other."""
    if rank:
        store.get(f"turn/{rank}", deadline)
        begin = time.time()
        store.set(f"ask/{rank}", b"", deadline)
        theirs = float(store.get(f"answer/{rank}", deadline))
        end = time.time()
        return apart(begin, theirs, end)
    for other in range(1, size):
        store.set(f"turn/{other}", b"", deadline)
        store.get(f"ask/{other}", deadline)
        store.set(f"answer/{other}", repr(time.time()).encode(), deadline)
    return 0.0


def apart(begin: float, theirs: float, end: float) -> float:
    """By how much a clock is at least ahead of another one that was read between `begin` and `end`; behind if negative."""
    return min(0.0, end - theirs) or max(0.0, begin - theirs)


def differences(reports: Sequence[RankReport]) -> list[Difference]:
    """In what the ranks differ."""
    found: dict[tuple[str, str], dict[str, list[int]]] = {}
    remedies: dict[tuple[str, str], str] = {}
    for rank, report in enumerate(reports):
        for fact in report.facts:
            key = fact.what, fact.among
            found.setdefault(key, {}).setdefault(fact.value, []).append(rank)
            remedies[key] = fact.remedy
    told = [
        Difference(
            what, [(value, ranks_text(ranks, reports)) for value, ranks in values.items()], remedies[what, among]
        )
        for (what, among), values in found.items()
        if len(values) > 1
    ]
    late: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        if abs(report.ahead) > _SECONDS:
            late.setdefault(f"{report.ahead:+.1f} s", []).append(rank)
    if late:
        values = [(value, ranks_text(ranks, reports)) for value, ranks in late.items()]
        remedy = "synchronize the clocks of all hosts: chrony, or timedatectl set-ntp true"
        told.append(Difference("clock, beside that of rank 0", values, remedy))
    return told


def blocked(found: reach.Reach) -> Iterator[Difference]:
    """What does not work between hosts."""
    names = found.hosts
    lines = [
        (f"{route}: {why}", f"{names[here]} to {names[there]}")
        for here, there in found.routes
        for route, why in found.blocked(here, there).items()
    ]
    if lines:
        yield Difference("blocked connections", lines, REMEDY)
    if refused := list(found.pairs.refusals()):
        values = [(what, where) for where, what in refused]
        yield Difference("RDMA devices that form no queue pairs", values, queue_pairs.REMEDY)
    if found.apart():
        pairs = [("do not reach each other", f"{names[here]} and {names[there]}") for here, there in found.apart()]
        yield Difference("hosts", pairs, REMEDY)


def ranks_text(ranks: Sequence[int], reports: Sequence[RankReport]) -> str:
    """Ranks for users: by their hosts, where all ranks of these are among them."""
    mine = set(ranks)
    hosts = dict.fromkeys(reports[rank].host for rank in ranks)
    whole = all(r in mine for r, report in enumerate(reports) if report.host in hosts)
    if whole:
        return _few([reports[next(r for r in ranks if reports[r].host == host)].name for host in hosts], "hosts")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_few([str(rank) for rank in ranks], 'ranks')}"


def _few(names: Sequence[str], kind: str) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} other {kind}" if more > 0 else "")


def _show(told: Sequence[Difference], reports: Sequence[RankReport], console: Console) -> None:
    hosts = len({report.host for report in reports})
    title = f"{len(reports)} rank{'s' if len(reports) > 1 else ''} on {hosts} host{'s' if hosts > 1 else ''}"
    if not told:
        console.print(f"[green]{title}: no differences.[/]", highlight=False)
        return
    table = Table(
        "what", "value", "where", "remedy", title=f"Differences between {title}", title_justify="left", show_lines=True
    )
    for one in told:
        values, places = ("\n".join(column) for column in zip(*one.values, strict=True))
        table.add_row(*map(Text, (one.what, values, places, one.remedy)))
    console.print(table)
