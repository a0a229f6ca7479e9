"""Tries RDMA between hosts: messages that are compared, over all rails and over each pair of devices, beside plain WRITEs."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple, TypeVar, cast

import msgspec
import numpy as np

import xvcomm
from xvcomm.abc.cards import Cards
from xvcomm.abc.nic_memory import SupportsNicMemory
from xvcomm.backends.rdma.direct import addresses
from xvcomm.backends.rdma.plain import PlainPair
from xvcomm.cli.certify import direct
from xvcomm.cli.certify.control import Control
from xvcomm.cli.certify.rdma_report import HOST, NIC, DevicePair, Direction, Report, Side
from xvcomm.cli.connections import Connections, ends_of, name_of
from xvcomm.cli.facts import host_name
from xvcomm.comm.communicator import Communicator
from xvcomm.config import Config
from xvcomm.engine.session import plugins
from xvcomm.engine.session.rings import Use
from xvcomm.errors import ResourceError
from xvcomm.testing.arrays import arrays
from xvcomm.testing.inside import context
from xvcomm.types.deadline import Deadline
from xvcomm.types.route import Ends

_T = TypeVar("_T")
_MEET_SECONDS = 10.0
"""How long rails of RDMA may take to come up."""
_MESSAGES, _OF_A_PAIR, _NBYTES = 300, 60, 1 << 20
"""Random messages that are compared in each direction, and over each pair of devices; the size of the largest of them, and of
those that are timed."""
_SETTLE_SECONDS = 0.5
"""No new rail in this time: all are up."""
_PATIENCE, _PHASES = 300.0, 100
"""Seconds that ranks wait for a direction beside those that speeds are measured for, and how many these are at most."""
_TRIED = 8
"""Messages by which it is found out how many take the time that was asked for."""


class Place(NamedTuple):
    """Where a rank is.

    Attributes:
        host: its label as xvcomm has it.
        name: of the host, for users.
        device: type of its device.
        uses: its GPU and the RDMA devices that it uses, as text.
    """

    host: str
    name: str
    device: str
    uses: str

    @classmethod
    def of(cls, comm: Communicator, cards: Cards | None) -> Place:
        """This rank's."""
        device, config = context(comm).device, Config.from_env(os.environ)
        uses = [device.bus()] if isinstance(device, SupportsNicMemory) else []
        if cards is not None:
            uses += [address for address in _addresses(config) if cards.reaches(address)]
            uses += [port.name for port in cards.ports()]
        return cls(comm.topology.hosts[comm.rank], host_name(config), comm.device, " ".join(uses))


def try_rdma(control: Control, seconds: float, members: Collection[int], warnings: Sequence[str]) -> Report | None:
    """Try all directions between hosts, one after the other; every rank calls it.

    Args:
        seconds: that each speed is measured for.
        members: ranks that may take part: of each host one for each GPU, or for each choice of RDMA devices, does.
        warnings: of this rank; grows meanwhile.

    Returns:
        The report on rank 0, else None.
    """
    comm = control.comm
    found: list[Direction] = []
    with contextlib.ExitStack() as cleanup:
        cards = _open(comm) if comm.rank in members else None
        if cards is not None:
            cleanup.callback(cards.close)
        told = control.collect(Place.of(comm, cards) if comm.rank in members else None)
        places = {rank: Place(*place) for rank, place in told}
        order = control.say(ways(places))
        for source, target in order:
            note = None
            if comm.rank in (source, target):
                sends = comm.rank == source
                direction = _Way(comm, target if sends else source, cards, seconds, sends=sends).tried()
                note = asdict(direction) if sends else None
            count = control.meet(note, _PATIENCE + _PHASES * seconds)
            found += [msgspec.convert(each, Direction) for _, each in control.notes(count)]
    takes_part = any(comm.rank in way for way in order)
    grades = direct.trials(comm) if takes_part and comm.device != "host" else []
    ends = control.collect([grades, list(dict.fromkeys(warnings))] if grades or warnings else None)
    return _report(places, found, ends) if comm.rank == 0 else None


def _report(
    places: Mapping[int, Place], found: list[Direction],
    ends: Sequence[tuple[int, tuple[list[dict[str, str]], list[str]]]],
) -> Report:  # fmt: skip
    for direction in found:
        for side in (direction.source, direction.target):
            side.host, side.device = places[side.rank].name, places[side.rank].device
    sides = {rank: Side(place.name, rank, place.device) for rank, place in places.items()}
    versions = {"xvcomm": xvcomm.__version__, "python": platform.python_version(), "kernel": platform.release()}
    return Report(
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        versions,
        list(dict.fromkeys(place.name for place in places.values())),
        found,
        [{"side": str(sides[rank]), **grade} for rank, (grades, _) in ends for grade in grades],
        [f"{sides.get(rank, f'rank {rank}')}: {text}" for rank, (_, texts) in ends for text in texts],
    )


def ways(places: Mapping[int, Place]) -> list[tuple[int, int]]:
    """Pairs of ranks, the sender first: of those that use different devices, the first of both hosts, the second, and so on."""
    hosts: dict[str, dict[str, int]] = {}
    for rank, place in places.items():
        hosts.setdefault(place.host, {}).setdefault(place.uses, rank)
    found = []
    for sources, targets in itertools.permutations([list(ranks.values()) for ranks in hosts.values()], 2):
        for turn in range(max(len(sources), len(targets))):
            found.append((sources[turn % len(sources)], targets[turn % len(targets)]))
    return found


def _addresses(config: Config) -> dict[str, str]:
    """Names of the network interfaces that are used between hosts, by their addresses."""
    usable = (found for found in plugins.transports() if found.usable)
    return addresses([each for found in usable for each in found.load().interfaces(config, os.environ)])


def _open(comm: Communicator) -> Cards | None:
    """This rank's RDMA devices, once more beside the job's."""
    config = Config.from_env(os.environ)
    return plugins.cards(config, _addresses(config), context(comm).device)


class _Way:
    """This rank's side of one direction; both sides call the same methods in the same order."""

    def __init__(self, comm: Communicator, other: int, cards: Cards | None, seconds: float, *, sends: bool) -> None:
        self._comm, self._other, self._cards, self._seconds, self._sends = comm, other, cards, seconds, sends
        self._arrays, self._connections = arrays(comm), Connections(comm, other)

    def tried(self) -> Direction:
        """What was found; what the sender notes counts."""
        mine, theirs = Side("", self._comm.rank, ""), Side("", self._other, "")
        found = Direction(mine, theirs) if self._sends else Direction(theirs, mine)
        rails = self._meet()
        found.rails = [name_of(ends) for ends in rails]
        sent, losses = self._connections.by_scheme(), self._connections.losses()
        found.compared, found.wrong = _MESSAGES, self._compare(_MESSAGES)
        found.speed = self._speed()
        (mine.slots, mine.rdma), (theirs.slots, theirs.rdma) = self._swap((self._slots(), self._cards is not None))
        found.pairs = [self._pair(*group) for group in self._groups(rails)]
        went = {scheme: nbytes - sent.get(scheme, 0) for scheme, nbytes in self._connections.by_scheme().items()}
        found.by_rdma = went.get("rdma", 0) / max(1, sum(went.values()))
        for ends, times in self._connections.losses().items():
            if times > losses.get(ends, 0):
                found.lost[name_of(ends)] = times - losses.get(ends, 0)
        return found

    def _swap(self, mine: _T) -> tuple[_T, _T]:
        """This side's object and the other's; waits for it."""
        if self._comm.rank < self._other:
            self._comm.send_object(mine, self._other)
            return mine, self._comm.recv_object(self._other)
        theirs = self._comm.recv_object(self._other)
        self._comm.send_object(mine, self._other)
        return mine, theirs

    def _groups(self, rails: Sequence[Ends]) -> list[tuple[str, str, list[Ends]]]:
        """The devices that the sender's rails join, its own first, and these rails with this side's ends first."""
        here, there = self._swap({local: self._device(local) for local, _, _ in rails})
        groups: dict[tuple[str, str], list[Ends]] = {}
        for local, remote, number in sorted(rails):
            groups.setdefault((here[local], there.get(remote, remote)), []).append((local, remote, number))
        mine, theirs = self._swap(groups)
        if self._sends:
            return [(*devices, ends) for devices, ends in mine.items()]
        return [
            (*devices, [(local, remote, number) for remote, local, number in ends]) for devices, ends in theirs.items()
        ]

    def _both(self, step: Callable[[], _T]) -> _T:
        """The result of a step that both sides take.

        Raises:
            ResourceError: on both sides, if one of them fails.
        """
        result, why = None, ""
        try:
            result = step()
        except ResourceError as error:
            why = str(error)
        _, theirs = self._swap(why)
        if why or theirs:
            raise ResourceError(why or f"at the other end: {theirs}")
        return cast(_T, result)

    def _meet(self) -> list[Ends]:
        """Send until there are rails of RDMA, and no more come; gives them."""
        until, found = time.monotonic() + _MEET_SECONDS, self._rails()
        while True:
            time.sleep(_SETTLE_SECONDS)
            before, found = found, self._rails()
            waits = (not found or found != before) and time.monotonic() < until
            if not any(self._swap(waits)):
                return found

    def _rails(self) -> list[Ends]:
        return [ends_of(path) for path in self._connections.up() if path.scheme == "rdma"]

    def _slots(self) -> str:
        """Where this side's half of the ring lies."""
        end = context(self._comm).rings.end(
            self._other, Use.POINT_TO_POINT, Deadline.after(self._comm.timeout), producer=self._sends
        )
        return NIC if end.layout.apart else HOST

    def _compare(self, count: int) -> int:
        """Send random messages, or receive and compare them; how many were wrong."""
        a, wrong = self._arrays, 0
        chance = np.random.default_rng(self._other + self._comm.rank)
        for size in np.minimum(_NBYTES, chance.pareto(0.3, count) * 16).astype(np.int64).tolist():
            content = chance.integers(0, 256, size, np.uint8)
            if self._sends:
                self._comm.send(a.put(content), self._other)
            else:
                arrived = a.get(self._comm.recv(a.put(np.zeros_like(content)), self._other))
                wrong += not np.array_equal(arrived, content)
        return sum(self._swap(wrong))

    def _speed(self) -> float:
        """Bytes a second of messages one way."""
        data = self._arrays.put(np.zeros(_NBYTES, np.uint8))

        def timed(count: int) -> float:
            begun = time.perf_counter()
            for _ in range(count):
                if self._sends:
                    self._comm.send(data, self._other)
                else:
                    self._comm.recv(data, self._other)
            self._arrays.synchronize()
            self._swap(None)
            return time.perf_counter() - begun

        count = max(_TRIED, int(_TRIED * self._seconds / max(self._swap(timed(_TRIED)))))
        return count * _NBYTES / timed(count)

    def _pair(self, source: str, target: str, rails: Sequence[Ends]) -> DevicePair:
        """What the rails of a pair of devices carry alone."""
        local, remote, _ = rails[0]
        found = DevicePair(source, target, local, remote, len(rails), compared=_OF_A_PAIR)
        self._connections.restrict(rails)
        sent = self._connections.sent()
        found.wrong, found.speed = self._compare(_OF_A_PAIR), self._speed()
        went = {ends: nbytes - sent.get(ends, 0) for ends, nbytes in self._connections.sent().items()}
        self._connections.restrict(())
        found.carried = sum(went.get(ends, 0) for ends in rails) / max(1, sum(went.values()))
        try:
            found.plain = self._plain(local)
        except ResourceError as error:
            found.trouble = str(error)
        return found

    def _device(self, address: str) -> str:
        """The port that serves an address, for users."""
        with contextlib.suppress(ResourceError):
            if self._cards is not None:
                end = self._cards.end(address)
                return f"{end.device} port {end.port}"
        return address

    def _plain(self, address: str) -> float:
        """The same of WRITEs of one queue pair.

        Raises:
            ResourceError: a device of either side refuses; on both sides.
        """
        with contextlib.ExitStack() as cleanup:

            def make() -> PlainPair:
                if self._cards is None:
                    raise ResourceError("the devices cannot be opened once more")
                made = PlainPair(self._cards, address, _NBYTES, sends=self._sends)
                cleanup.callback(made.close)
                return made

            pair = self._both(make)
            _, description = self._swap(pair.description)
            self._both(lambda: pair.connect(description))

            def write() -> float:
                if not self._sends:
                    return 0.0
                count = max(_TRIED, int(_TRIED * self._seconds / pair.write(_TRIED)))
                return count * _NBYTES / pair.write(count)

            return self._both(write)
