"""RDMA between the hosts of a job: bits, rails, and speed beside plain WRITEs; alone as `xvcomm certify --rdma`."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

import xvcomm
from xvcomm.cli.certify import contract
from xvcomm.cli.certify.job import Job
from xvcomm.cli.facts import host_name
from xvcomm.config import Config
from xvcomm.engine.session import plugins
from xvcomm.errors import ResourceError
from xvcomm.types.route import Ends

if TYPE_CHECKING:
    from xvcomm.cli.certify.control import Control
    from xvcomm.comm.communicator import Communicator

_T = TypeVar("_T")
_REMEDY = "follow docs/rdma.md, from `xvcomm doctor` on; XVCOMM_RDMA=0 turns RDMA off until it is right"
_MEET_SECONDS = 10.0
"""How long rails of RDMA may take to come up."""
_MESSAGES, _NBYTES = 300, 1 << 20
"""Random messages that are compared in each direction; the size of the largest of them, and of those that are timed."""
_SETTLE_SECONDS = 0.5
"""No new rail in this time: all are up."""
_SECTION_SECONDS, _PATIENCE = 1.0, 300.0
"""That each speed is measured for in a section, and that the other ranks wait for it."""
_TRIED = 8
"""Messages by which it is found out how many take the time that was asked for."""


@dataclass
class Direction:
    """What was found from one host to another.

    Attributes:
        rails: of RDMA, by both ends' addresses and number.
        compared, wrong: messages that were compared, and how many of them had wrong bytes.
        speed, plain: bytes a second of messages, and of WRITEs of one queue pair; None if these could not be measured.
        by_rdma: part of the messages' bytes that went over RDMA.
        lost: rails of RDMA that were up at the beginning and not at the end.
        trouble: why something could not be measured.
    """

    source: str
    target: str
    rails: list[str] = field(default_factory=list)
    compared: int = 0
    wrong: int = 0
    speed: float = 0.0
    plain: float | None = None
    by_rdma: float = 0.0
    lost: int = 0
    trouble: str = ""

    @property
    def passed(self) -> bool:
        """Whether all messages were right, and most of their bytes went over RDMA."""
        return bool(self.rails) and self.compared > 0 and not self.wrong and self.by_rdma > 0.5

    @property
    def told(self) -> str:
        """What came of it, in words."""
        part, rails = f"{100 * self.by_rdma:.0f} % by RDMA", f", no rail of RDMA within {_MEET_SECONDS:.0f} s"
        told = f"{self.source} to {self.target}: {self.wrong} of {self.compared} messages wrong, {part}"
        return told if self.rails else told + rails


@dataclass
class Report:
    """All directions between two hosts."""

    date: str
    versions: dict[str, str]
    hosts: list[str]
    directions: list[Direction]

    @property
    def passed(self) -> bool:
        """Whether every direction has."""
        return bool(self.directions) and all(direction.passed for direction in self.directions)

    @property
    def code(self) -> int:
        """The exit code."""
        return contract.PROVEN if self.passed else contract.WRONG if self.directions else contract.NOT_ALL


def certify_rdma(out: Path | None, seconds: float) -> int:
    """Certify RDMA alone, with arrays in host memory; rank 0 prints the report.

    Returns:
        The exit code, on all ranks: WRONG if in some direction bytes were wrong, or did not go over RDMA.
    """
    with xvcomm.init(device="host") as comm:
        report = RdmaTrial(comm, seconds).run()
        code: int = comm.broadcast_object(None if report is None else report.code, 0)
    if report is not None:
        _write(report, out)
    return code


class RdmaTrial:
    """Tries all directions, one after the other."""

    def __init__(self, comm: Communicator, seconds: float) -> None:
        self._comm, self._seconds = comm, seconds

    def run(self) -> Report | None:
        """The report; None but on rank 0."""
        comm = self._comm
        places = comm.all_gather_object((comm.topology.hosts[comm.rank], host_name(Config.from_env(os.environ))))
        first: dict[str, int] = {}
        for rank, (host, _) in enumerate(places):
            first.setdefault(host, rank)
        found = []
        for source, target in itertools.permutations(first.values(), 2):
            direction = Direction(places[source][1], places[target][1])
            if comm.rank == source:
                self._try(direction, target, sends=True)
            elif comm.rank == target:
                self._try(direction, source, sends=False)
            found.append(comm.broadcast_object(direction, source))
        if comm.rank:
            return None
        names = [places[rank][1] for rank in first.values()]
        versions = {"xvcomm": xvcomm.__version__, "python": platform.python_version(), "kernel": platform.release()}
        return Report(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), versions, names, found)

    def _try(self, direction: Direction, other: int, *, sends: bool) -> None:
        """Measure one direction; what the sender notes counts."""
        rails = self._meet(other)
        direction.rails = [f"{local} to {remote}, number {number}" for local, remote, number in rails]
        _, direction.wrong = self._swap(other, self._compare(other, sends=sends))
        direction.compared = _MESSAGES
        before = self._sent(other)
        direction.speed = self._speed(other, sends=sends)
        sent = {scheme: nbytes - before[scheme] for scheme, nbytes in self._sent(other).items()}
        direction.by_rdma = sent["rdma"] / max(1, sum(sent.values()))
        direction.lost = len({*rails} - {*self._rails(other)})
        try:
            direction.plain = self._plain(other, rails, sends=sends)
        except ResourceError as error:
            direction.trouble = str(error)

    def _swap(self, other: int, mine: _T) -> tuple[_T, _T]:
        """This side's object and the other's; waits for it."""
        if self._comm.rank < other:
            self._comm.send_object(mine, other)
            return mine, self._comm.recv_object(other)
        theirs = self._comm.recv_object(other)
        self._comm.send_object(mine, other)
        return mine, theirs

    def _both(self, other: int, step: Callable[[], _T]) -> _T:
        """The result of a step that both sides take.

        Raises:
            ResourceError: on both sides, if one of them fails.
        """
        result, why = None, ""
        try:
            result = step()
        except ResourceError as error:
            why = str(error)
        _, theirs = self._swap(other, why)
        if why or theirs:
            raise ResourceError(why or f"at the other end: {theirs}")
        return cast(_T, result)

    def _rails(self, other: int) -> list[Ends]:
        """The rails of RDMA to a rank."""
        return [
            (rail.local, rail.remote, rail.number)
            for rail in self._comm.rails()
            if rail.rank == other and rail.scheme == "rdma"
        ]

    def _meet(self, other: int) -> list[Ends]:
        """Send until there are rails of RDMA, and no more come; gives them."""
        until, found = time.monotonic() + _MEET_SECONDS, self._rails(other)
        while True:
            time.sleep(_SETTLE_SECONDS)
            before, found = found, self._rails(other)
            waits = (not found or found != before) and time.monotonic() < until
            if not any(self._swap(other, waits)):
                return found

    def _sent(self, other: int) -> dict[str, int]:
        """Bytes that were sent to a rank, by the schemes of rails."""
        found = dict.fromkeys(("tcp", "rdma"), 0)
        for rail in self._comm.rails():
            if rail.rank == other:
                found[rail.scheme] += rail.sent
        return found

    def _compare(self, other: int, *, sends: bool) -> int:
        """Send random messages, or receive and compare them; how many were wrong."""
        chance, wrong = np.random.default_rng(other + self._comm.rank), 0
        for size in np.minimum(_NBYTES, chance.pareto(0.3, _MESSAGES) * 16).astype(np.int64).tolist():
            content = chance.integers(0, 256, size, np.uint8)
            if sends:
                self._comm.send(content, other)
            else:
                arrived = self._comm.recv(np.zeros_like(content), other)
                wrong += not np.array_equal(arrived, content)
        return wrong

    def _speed(self, other: int, *, sends: bool) -> float:
        """Bytes a second of messages one way, on the side that sends."""
        data = np.zeros(_NBYTES, np.uint8)

        def timed(count: int) -> float:
            begun = time.perf_counter()
            for _ in range(count):
                if sends:
                    self._comm.send(data, other)
                else:
                    self._comm.recv(data, other)
            self._swap(other, None)
            return time.perf_counter() - begun

        taken, theirs = self._swap(other, timed(_TRIED))
        count = max(_TRIED, int(_TRIED * self._seconds / max(taken, theirs)))
        return count * _NBYTES / timed(count)

    def _plain(self, other: int, rails: Sequence[Ends], *, sends: bool) -> float | None:
        """The same of WRITEs of one queue pair, between the addresses of the sender's first rail; None if it has no rail.

        Raises:
            ResourceError: a device of either side refuses; on both sides.
        """
        from xvcomm.backends.rdma.plain import PlainPair  # loads numba, which the command's help need not

        ours, theirs = self._swap(other, rails)
        path = ours if sends else theirs
        if not path:
            return None
        source, target, _ = path[0]
        address = source if sends else target
        with contextlib.ExitStack() as cleanup:

            def make() -> PlainPair:
                cards = plugins.cards(Config.from_env(os.environ), {address: _interface(address)})
                if cards is None:
                    raise ResourceError("the devices cannot be opened once more")
                cleanup.callback(cards.close)
                made = PlainPair(cards, address, _NBYTES)
                cleanup.callback(made.close)
                return made

            pair = self._both(other, make)
            _, description = self._swap(other, pair.description)
            self._both(other, lambda: pair.connect(description))

            def write() -> float:
                if not sends:
                    return 0.0
                count = max(_TRIED, int(_TRIED * self._seconds / pair.write(_TRIED)))
                return count * _NBYTES / pair.write(count)

            return self._both(other, write)


def _interface(address: str) -> str:
    """The network interface that has an address."""
    every = psutil.net_if_addrs().items()
    return next((name for name, found in every if any(a.address == address for a in found)), "")


def _write(report: Report, out: Path | None) -> None:
    """Print the report, and write it into a folder."""
    consoles = [Console()]
    with contextlib.ExitStack() as files:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / "certify-rdma.json").write_text(json.dumps(asdict(report) | {"passed": report.passed}, indent=1))
            text = files.enter_context((out / "certify-rdma.txt").open("w"))
            consoles.append(Console(file=text, width=160))
        for console in consoles:
            _show(report, console)


def _table(report: Report) -> contract.Table:
    columns = ["from", "to", "rails", "wrong messages", "GB/s", "plain WRITEs", "by RDMA", "result"]
    table = contract.Table(f"RDMA, {report.date}", columns)
    for found in report.directions:
        plain = "" if found.plain is None else f"{found.plain / 1e9:.3f}"
        wrong, by_rdma = f"{found.wrong} of {found.compared}", f"{100 * found.by_rdma:.0f} %"
        result = "passed" if found.passed else "FAILED"
        rails = f"{len(found.rails)}, {found.lost} lost"
        table.rows.append(
            [found.source, found.target, rails, wrong, f"{found.speed / 1e9:.3f}", plain, by_rdma, result]
        )
    return table


def _show(report: Report, console: Console) -> None:
    if not report.directions:
        console.print(
            "All ranks are on one host: there is nothing to certify. Start it as the ranks of a job on several hosts.",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        return
    made = _table(report)
    table = Table(*made.columns, title=made.title)
    for row in made.rows:
        table.add_row(*row)
    console.print(table)
    for found in report.directions:
        told = [] if found.passed else [found.told]
        told += [f"{found.source} to {found.target}: {found.trouble}"] if found.trouble else []
        for line in told:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print("Passed." if report.passed else f"FAILED. Remedy: {_REMEDY}", highlight=False, soft_wrap=True)


def _run(comm: Communicator, control: Control, job: Job, result: contract.Result) -> None:
    report = RdmaTrial(comm, _SECTION_SECONDS).run()
    control.meet(seconds=_PATIENCE)
    if report is None:
        return
    result.tables.append(_table(report))
    result.done = result.planned = len(report.directions)
    for found in report.directions:
        if not found.passed:
            result.findings.append(contract.Finding(found.told, _REMEDY))
        if found.trouble:
            what = f"{found.source} to {found.target}: {found.trouble}"
            result.findings.append(contract.Finding(what, _REMEDY, wrong=False))


def _needs(job: Job) -> str:
    if not job.spread:
        return "all ranks are on one host"
    if job.kinds != ["host"]:
        return "it sends arrays in host memory: run `xvcomm certify --rdma` as the ranks of a job"
    return "" if job.rdma else "not all machines have RDMA devices"


SECTION = contract.Section("rdma", "RDMA between hosts: bits, rails, speed beside plain WRITEs", 1.0, _needs, _run)
