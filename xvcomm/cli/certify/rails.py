"""Connections between hosts: whether what they carry is right, how fast they are, and what happens when one is lost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from xvcomm.cli.certify.contract import SKIPPED, Result, Section, Table
from xvcomm.cli.certify.control import Case, Control, Trials
from xvcomm.cli.certify.job import Job
from xvcomm.cli.connections import Connections, ends_of, name_of
from xvcomm.comm.communicator import Communicator
from xvcomm.testing.arrays import arrays
from xvcomm.testing.inside import context, network
from xvcomm.types.route import Ends

_ONE_SLOT = 48 << 10
"""Bytes of messages that one rail carries whole, so that a wrong one names its rail."""

_LARGE = 1 << 20
_COUNTED = 4096
"""A rail that has sent fewer bytes meanwhile did not carry the message: it has told that it is alive."""

Trial = Callable[[Communicator, int, bool, dict[str, str]], None]
"""Of a direction, on both of its ranks: the other rank, whether this one sends, and the row that a sender fills in."""

_SETTLE_SECONDS = 0.5
_REPLACED_SECONDS = 10.0
_REMEDY = (
    "take the interfaces of this connection out by XVCOMM_NICS, check their cable, driver and offloads (ethtool -K ... rx off tx "
    "off), and certify again"
)


def _rails(comm: Communicator, control: Control, job: Job, result: Result) -> None:
    columns = ["connections", "wrong messages", "GB/s", "carried by"]
    _each_direction(comm, control, job, result, {"messages": _compare, "speed": _speed}, columns)


def _failover(comm: Communicator, control: Control, job: Job, result: Result) -> None:
    rows = _each_direction(comm, control, job, result, {"a lost connection": _lose}, ["connections", "one lost"])
    if rows and not any(row["connections"] > "1" for row in rows):
        result.state, result.reason = SKIPPED, "each pair of hosts has one connection, which no other can replace"


def _each_direction(
    comm: Communicator, control: Control, job: Job, result: Result, trials: dict[str, Trial], columns: list[str]
) -> list[dict[str, str]]:
    """Run trials of each direction between hosts; on rank 0 make a table of what their senders found, and give its rows."""
    members = job.hosts if comm.rank in job.hosts else ()
    rows: dict[tuple[int, int], dict[str, str]] = {}
    cases = []
    for source, target in itertools.permutations(range(len(job.hosts)), 2):
        row = rows.setdefault((source, target), {})
        for name, trial in trials.items():
            what = f"{name}, rank {job.hosts[source]} to rank {job.hosts[target]}"
            cases.append(Case(what, partial(_direction, trial, source, target, row)))
    Trials(control, members, _REMEDY).run(cases, result)
    told = control.collect([[*way, row] for way, row in rows.items() if row])
    found = sorted((entry for _, entries in told for entry in entries), key=lambda entry: entry[:2])
    table = Table("Directions between hosts", ["from rank", "to rank", *columns])
    for source, target, row in found:
        ends = [f"{job.hosts[source]}", f"{job.hosts[target]}"]
        table.rows.append([*ends, *(row.get(name, "") for name in columns)])
    result.tables.append(table)
    return [row for _, _, row in found]


def _direction(trial: Trial, source: int, target: int, row: dict[str, str], comm: Communicator) -> None:
    """Run a trial of one direction on its two ranks; the sender fills in the row."""
    if comm.rank in (source, target):
        trial(comm, target if comm.rank == source else source, comm.rank == source, row)


def _compare(comm: Communicator, other: int, sends: bool, row: dict[str, str]) -> None:
    """Messages of one slot, and of many, each of which the receiver answers for."""
    a, chance, connections = arrays(comm), np.random.default_rng(other + comm.rank), Connections(comm, other)
    sizes = [*chance.integers(1, _ONE_SLOT, 24).tolist(), *[_ONE_SLOT] * 40, *[_LARGE] * 8]
    if sends:
        _settle(connections)
    by_rail: dict[Ends, int] = {}
    wrong = 0
    for size in sizes:
        content, answer = chance.integers(0, 256, size, np.uint8), np.zeros(1, np.uint8)
        if not sends:
            arrived = a.get(comm.recv(a.put(np.zeros_like(content)), other))
            answer[0] = np.array_equal(arrived, content)
            comm.send(a.put(answer), other)
            continue
        before = connections.sent()
        comm.send(a.put(content), other)
        if not a.get(comm.recv(a.put(answer), other))[0]:
            wrong += 1
            for ends, nbytes in connections.sent().items():
                if nbytes - before.get(ends, 0) > _COUNTED:
                    by_rail[ends] = by_rail.get(ends, 0) + 1
    if not sends:
        return
    row["connections"], row["wrong messages"] = f"{len(connections.up())}", f"{wrong} of {len(sizes)}"
    told = "; ".join(
        f"{name_of(ends)}: {number}" for ends, number in sorted(by_rail.items(), key=lambda item: -item[1])
    )
    assert not wrong, (
        f"{wrong} of {len(sizes)} messages came with wrong bytes; wrong ones by the connections that carried them: {told}"
    )


def _speed(comm: Communicator, other: int, sends: bool, row: dict[str, str]) -> None:
    """Bytes a second of large messages, and what carried them."""
    a, count, connections = arrays(comm), 64, Connections(comm, other)
    data, done = a.put(np.zeros(_LARGE, np.uint8)), a.put(np.zeros(1, np.uint8))
    before, begun = connections.by_scheme(), time.perf_counter()
    for _ in range(count):
        if sends:
            comm.send(data, other)
        else:
            comm.recv(data, other)
    if not sends:
        a.get(data)
        comm.send(done, other)
        return
    a.get(comm.recv(done, other))
    row["GB/s"] = f"{count * _LARGE / (time.perf_counter() - begun) / 1e9:.3f}"
    sent = {scheme: nbytes - before.get(scheme, 0) for scheme, nbytes in connections.by_scheme().items()}
    whole = max(1, sum(sent.values()))
    row["carried by"] = ", ".join(f"{scheme} {100 * nbytes / whole:.0f} %" for scheme, nbytes in sent.items() if nbytes)


def _lose(comm: Communicator, other: int, sends: bool, row: dict[str, str]) -> None:
    """Lose one of several connections in the middle of messages; all of them are right, and it is replaced.

    What replaces it may have other addresses of the same network interfaces.
    """
    a, chance, connections = arrays(comm), np.random.default_rng(7), Connections(comm, other)
    rails = [ends_of(path) for path in connections.up()] if sends else []
    if sends:
        row["connections"], row["one lost"] = f"{len(rails)}", "not tried"
    count = np.array([48 if len(rails) > 1 else 0])
    if sends:
        comm.send(a.put(count), other)
    else:
        count = a.get(comm.recv(a.put(count), other))
    if not count[0]:
        return
    wrong, longest, losses = 0, 0.0, 0
    for number in range(int(count[0])):
        content = chance.integers(0, 256, 256 << 10, np.uint8)
        begun = time.monotonic()
        if not sends:
            wrong += not np.array_equal(a.get(comm.recv(a.put(np.zeros_like(content)), other)), content)
            continue
        if number == 16:
            losses = sum(connections.losses().values())
            network(comm).lose(context(comm).ranks[other], rails[0])
        comm.send(a.put(content), other)
        longest = max(longest, time.monotonic() - begun)
    if not sends:
        comm.send(a.put(np.array([wrong])), other)
        return
    wrong = int(a.get(comm.recv(a.put(np.zeros(1, int)), other))[0])
    begun, replaced = time.monotonic(), False
    while not replaced and time.monotonic() - begun < _REPLACED_SECONDS:
        time.sleep(0.01)
        replaced = sum(connections.losses().values()) > losses and len(connections.up()) >= len(rails)
    how = f"replaced after {time.monotonic() - begun:.1f} s" if replaced else "NOT REPLACED"
    row["one lost"] = f"longest wait {longest:.2f} s, {how}"
    assert not wrong, f"{wrong} of {int(count[0])} messages were wrong when {name_of(rails[0])} was lost"
    assert replaced, f"{name_of(rails[0])} was lost, and was not replaced within {_REPLACED_SECONDS:.0f} s"


def _settle(connections: Connections) -> None:
    """Wait until there are connections, and no more come."""
    found: list[Ends] = []
    until = time.monotonic() + _REPLACED_SECONDS
    while time.monotonic() < until:
        before, found = found, [ends_of(path) for path in connections.up()]
        if found and found == before:
            return
        time.sleep(_SETTLE_SECONDS)


def _needs(job: Job) -> str:
    return "" if job.spread else "all ranks are on one host, where rings need no connection"


RAILS = Section("rails", "Rails: what connections between hosts carry, bit by bit, and how fast", 1.0, _needs, _rails)
FAILOVER = Section(
    "failover", "Failover: one of several connections is lost in the middle of messages", 0.5, _needs, _failover
)
