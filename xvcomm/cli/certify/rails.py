"""Connections between hosts: whether what they carry is right, how fast they are, and what happens when one is lost."""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import Any

import numpy as np

from xvcomm.cli.certify.contract import Result, Section, Table
from xvcomm.cli.certify.control import Case, Control, Trials
from xvcomm.cli.certify.job import Job
from xvcomm.comm.communicator import Communicator
from xvcomm.testing.arrays import arrays
from xvcomm.testing.inside import context, network
from xvcomm.types.route import Ends

_ONE_SLOT = 48 << 10
"""Bytes of messages that one rail carries whole, so that a wrong one names its rail."""

_LARGE = 1 << 20
_COUNTED = 4096
"""A rail that has sent fewer bytes meanwhile did not carry the message: it has told that it is alive."""

_SETTLE_SECONDS = 0.5
_BACK_SECONDS = 10.0
_REMEDY = (
    "take the interfaces of this connection out by XVCOMM_NICS, check their cable, driver and offloads (ethtool -K ... rx off tx "
    "off), and certify again"
)


def _run(comm: Communicator, control: Control, job: Job, result: Result) -> None:
    members = job.hosts if comm.rank in job.hosts else ()
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    cases = []
    for source, target in itertools.permutations(range(len(job.hosts)), 2):
        way = f"rank {job.hosts[source]} to rank {job.hosts[target]}"
        for name, trial in (("messages", _compare), ("speed", _speed), ("a lost connection", _lose)):
            call = partial(_direction, trial, source, target, rows.setdefault((source, target), {}))
            cases.append(Case(f"{name}, {way}", call))
    Trials(control, members, _REMEDY).run(cases, result)
    told = control.collect([[*way, row] for way, row in rows.items() if row])
    columns = ["from rank", "to rank", "connections", "wrong messages", "GB/s", "carried by", "one lost"]
    table = Table("Directions between hosts", columns)
    for source, target, row in sorted((entry for _, entries in told for entry in entries), key=lambda entry: entry[:2]):
        table.rows.append(
            [f"{job.hosts[source]}", f"{job.hosts[target]}", *(row.get(name, "") for name in columns[2:])]
        )
    if len(job.hosts) < 2:
        return
    result.tables.append(table)


def _direction(trial: Any, source: int, target: int, row: dict[str, Any], comm: Communicator) -> None:
    """Run a trial of one direction on its two ranks; the sender fills in the row."""
    if comm.rank in (source, target):
        trial(comm, target if comm.rank == source else source, comm.rank == source, row)


def _compare(comm: Communicator, other: int, sends: bool, row: dict[str, Any]) -> None:
    """Messages of one slot, and of many, each of which the receiver answers for."""
    a, chance = arrays(comm), np.random.default_rng(other + comm.rank)
    sizes = [*chance.integers(1, _ONE_SLOT, 24).tolist(), *[_ONE_SLOT] * 40, *[_LARGE] * 8]
    if sends:
        _settle(comm, other)
    by_rail: dict[Ends, int] = {}
    wrong = 0
    for size in sizes:
        content, answer = chance.integers(0, 256, size, np.uint8), np.zeros(1, np.uint8)
        if not sends:
            arrived = a.get(comm.recv(a.put(np.zeros_like(content)), other))
            answer[0] = np.array_equal(arrived, content)
            comm.send(a.put(answer), other)
            continue
        before = _sent(comm, other)
        comm.send(a.put(content), other)
        if not a.get(comm.recv(a.put(answer), other))[0]:
            wrong += 1
            for ends, nbytes in _sent(comm, other).items():
                if nbytes - before.get(ends, 0) > _COUNTED:
                    by_rail[ends] = by_rail.get(ends, 0) + 1
    if not sends:
        return
    row["connections"], row["wrong messages"] = f"{len(_sent(comm, other))}", f"{wrong} of {len(sizes)}"
    told = "; ".join(f"{_name(ends)}: {number}" for ends, number in sorted(by_rail.items(), key=lambda item: -item[1]))
    assert not wrong, (
        f"{wrong} of {len(sizes)} messages came with wrong bytes; wrong ones by the connections that carried them: {told}"
    )


def _speed(comm: Communicator, other: int, sends: bool, row: dict[str, Any]) -> None:
    """Bytes a second of large messages, and what carried them."""
    a, count = arrays(comm), 64
    data, done = a.put(np.zeros(_LARGE, np.uint8)), a.put(np.zeros(1, np.uint8))
    before, begun = _by_scheme(comm, other), time.perf_counter()
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
    sent = {scheme: nbytes - before.get(scheme, 0) for scheme, nbytes in _by_scheme(comm, other).items()}
    whole = max(1, sum(sent.values()))
    row["carried by"] = ", ".join(f"{scheme} {100 * nbytes / whole:.0f} %" for scheme, nbytes in sent.items() if nbytes)


def _lose(comm: Communicator, other: int, sends: bool, row: dict[str, Any]) -> None:
    """Lose one of several connections in the middle of messages; all of them are right, and it comes back."""
    a, chance = arrays(comm), np.random.default_rng(7)
    rails = list(_sent(comm, other)) if sends else []
    count = np.array([48 if len(rails) > 1 else 0])
    if sends:
        comm.send(a.put(count), other)
    else:
        count = a.get(comm.recv(a.put(count), other))
    if not count[0]:
        row.update({"one lost": "there is one alone"} if sends else {})
        return
    wrong, longest = 0, 0.0
    for number in range(int(count[0])):
        content = chance.integers(0, 256, 256 << 10, np.uint8)
        begun = time.monotonic()
        if not sends:
            wrong += not np.array_equal(a.get(comm.recv(a.put(np.zeros_like(content)), other)), content)
            continue
        if number == 16:
            network(comm).lose(context(comm).ranks[other], rails[0])
        comm.send(a.put(content), other)
        longest = max(longest, time.monotonic() - begun)
    if not sends:
        comm.send(a.put(np.array([wrong])), other)
        return
    wrong = int(a.get(comm.recv(a.put(np.zeros(1, int)), other))[0])
    begun, until = time.monotonic(), time.monotonic() + _BACK_SECONDS
    while len(_sent(comm, other)) < len(rails) and time.monotonic() < until:
        time.sleep(0.01)
    back = f"back after {time.monotonic() - begun:.1f} s" if time.monotonic() < until else "NOT BACK"
    row["one lost"] = f"longest wait {longest:.2f} s, {back}"
    assert not wrong, f"{wrong} of {int(count[0])} messages were wrong when {_name(rails[0])} was lost"
    assert time.monotonic() < until, f"{_name(rails[0])} was lost, and did not come back within {_BACK_SECONDS:.0f} s"


def _settle(comm: Communicator, other: int) -> None:
    """Wait until there are connections, and no more come."""
    found: dict[Ends, int] = {}
    until = time.monotonic() + _BACK_SECONDS
    while time.monotonic() < until:
        before, found = found, _sent(comm, other)
        if found and found.keys() == before.keys():
            return
        time.sleep(_SETTLE_SECONDS)


def _sent(comm: Communicator, other: int) -> dict[Ends, int]:
    """Bytes that each connection to a rank has sent."""
    return {(rail.local, rail.remote, rail.number): rail.sent for rail in comm.rails() if rail.rank == other}


def _by_scheme(comm: Communicator, other: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for rail in comm.rails():
        if rail.rank == other:
            found[rail.scheme] = found.get(rail.scheme, 0) + rail.sent
    return found


def _name(ends: Ends) -> str:
    local, remote, number = ends
    return f"{local} to {remote}, number {number}"


def _needs(job: Job) -> str:
    return "" if job.spread else "all ranks are on one host, where rings need no connection"


SECTION = Section("rails", "Rails: what connections between hosts carry, and one that is lost", 1.5, _needs, _run)
