"""The RDMA devices that this process uses between hosts, as `abc.cards` wants them."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xvcomm.abc.cards import Keys, QueueEnd
from xvcomm.abc.device import Device
from xvcomm.abc.nic_memory import SupportsNicMemory
from xvcomm.backends.rdma import settings, sysfs
from xvcomm.backends.rdma.affinity import assigned, nearest
from xvcomm.backends.rdma.choice import PortChoice
from xvcomm.backends.rdma.devices import Gid, Port
from xvcomm.backends.rdma.events import GID_CHANGE, Event, Events
from xvcomm.backends.rdma.gids import gid_of, partition, subnet_gid
from xvcomm.backends.rdma.regions import register_all
from xvcomm.backends.rdma.report import locked
from xvcomm.config import Config
from xvcomm.errors import ResourceError, XvcommError
from xvcomm.system import forking
from xvcomm.system.notice import notice
from xvcomm.trace.snapshot import Grades
from xvcomm.types.subnets import SubnetPort
from xvcomm.wire.frames import MAX_DEVICES

if TYPE_CHECKING:
    from xvcomm.backends.rdma.direct import DirectMemory
    from xvcomm.backends.rdma.pairs import Domain
    from xvcomm.backends.rdma.rails import RailPair
    from xvcomm.backends.rdma.slots import DirectSlots
    from xvcomm.backends.rdma.trials import Trial


def open_cards(
    config: Config, interfaces: Mapping[str, str], device: Device | None = None, env: Mapping[str, str] = os.environ
) -> RdmaCards | None:
    """Open the devices of network interfaces; None if there is none that can be used. Says what cannot be opened.

    Args:
        interfaces: names of those that are used between hosts, by their addresses. Ports of InfiniBand need none.
        device: of this process. If it is a GPU, the devices alone are used that XVCOMM_AFFINITY gives to it, or else those that
            are nearest to it, if they reach its memory.

    Raises:
        ConfigError: XVCOMM_AFFINITY makes no sense.
    """
    if settings.refusal(config, env):
        return None
    refused: dict[str, list[str]] = {}
    domains: list[Domain] = []

    def open_all(names: Iterable[str]) -> None:
        for name in names:
            try:
                domains.append(_open(name, len(domains), relaxed=settings.relaxed(config, env)))
            except XvcommError as error:
                refused.setdefault(str(error), []).append(name)

    used = _Used(interfaces, PortChoice.of(config, env, interfaces))
    names = []
    for name in sysfs.names():
        try:
            if used.serves(name, config.rdma_partition_key):
                names.append(name)
        except XvcommError as error:
            refused.setdefault(str(error), []).append(name)
    gpu, far, chosen = None, dict[str, str](), False
    if isinstance(device, SupportsNicMemory):
        which = device.bus(), config.host or socket.gethostname()
        chosen = assigned(config.affinity, *which) is not None
        names, far = nearest(which[0], names, config.affinity, which[1])
    open_all(names)
    if domains and config.device_direct and isinstance(device, SupportsNicMemory):
        gpu = _try_direct(device, domains, used, settings.options(config, env))
    if not chosen and (gpu is None or not gpu.works):
        open_all(far)
        far = {}
    for why, names in refused.items():
        notice(f"no RDMA over {', '.join(names)}, but TCP: {why}; XVCOMM_RDMA=0 wants no more")
    return RdmaCards(domains, used.choice, config, env, gpu, far) if domains else None


def _try_direct(
    device: Device, domains: Sequence[Domain], used: _Used, options: Mapping[str, Any]
) -> DirectMemory:  # fmt: skip
    """Find out which of the devices reach a GPU's memory."""
    from xvcomm.backends.rdma.direct import DirectMemory

    ways: list[tuple[Port, Gid] | None] = []
    for domain in domains:
        try:
            ways.append(next(used.ways(domain.name, domain.ask().ports), None))
        except ResourceError:  # it does not answer
            ways.append(None)
    return DirectMemory(device, list(domains), ways, options)


def _open(name: str, before: int, *, relaxed: bool) -> Domain:
    """Open a device, after so many others; `relaxed`: whether memory may be written to in any order."""
    if before == MAX_DEVICES:
        raise ResourceError(f"a process uses at most {MAX_DEVICES} devices; XVCOMM_NICS chooses")
    if limits := locked():
        raise ResourceError("; ".join(f"{limit.reason}; {limit.remedy}" for limit in limits))
    from xvcomm.backends.rdma.pairs import Domain  # loads numba, which a host without devices need not

    domain = Domain(name)
    if not relaxed:
        domain.relaxed = 0
    return domain


@dataclass(frozen=True)
class _Used:
    """The ports in use: of Ethernet those that serve one of the addresses, of InfiniBand those that are chosen."""

    addresses: Iterable[str]
    choice: PortChoice

    def serves(self, name: str, key: int | None) -> bool:
        """Whether a device has such a port, which is active.

        Raises:
            ResourceError: one of them is not in the partition of this key.
        """
        found = [port for port, _ in self.ways(name, sysfs.ports(name))]
        for port in found:
            partition(name, port.number, key)
        return bool(found)

    def ways(self, name: str, ports: Sequence[Port]) -> Iterator[tuple[Port, Gid]]:
        """The active ones of a device, each with a GID."""
        for port in ports:
            if port.state == "active" and (gid := self._gid(name, port)) is not None:
                yield port, gid

    def _gid(self, name: str, port: Port) -> Gid | None:
        if port.link == "InfiniBand":
            return subnet_gid(port) if self.choice.judge(name, port.number)[0] else None
        return next(filter(None, (gid_of(port, address) for address in self.addresses)), None)


class Registration:
    """See `abc.cards.Registered`."""

    scratch = 0

    def __init__(self, domains: Sequence[Domain], address: int, nbytes: int, iova: int) -> None:
        """Register memory with all devices that answer, or with none.

        Raises:
            ResourceError: see `register_all`.
        """
        self.address = iova or address
        with contextlib.ExitStack() as undo:

            def register(domain: Domain) -> Any:
                region = domain.register(address, nbytes, iova=iova, ordered=False)  # a frame tells of what was written
                undo.callback(domain.release, region)
                return region

            self.keys: Sequence[Keys] = register_all(domains, register)
            self._undo = undo.pop_all()

    def close(self, *, in_use: bool = False) -> None:
        """See `abc.cards.Registered.close`. Idempotent."""
        self._undo.close()


class RdmaCards:
    """See `abc.cards.Cards`. Thread-safe."""

    def __init__(
        self, domains: Sequence[Domain], choice: PortChoice, config: Config, env: Mapping[str, str],
        gpu: DirectMemory | None = None, far: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Use devices that are open, at most MAX_DEVICES, and close them at the end.

        Args:
            choice: of ports of InfiniBand.
            gpu: whose memory they were tried with.
            far: why other RDMA devices are not used beside them, by name.
        """
        self._domains, self._used = domains, _Used((), choice)
        self._options, self._key = settings.options(config, env), config.rdma_partition_key
        self._pairs: set[RailPair] = set()
        self._lock = threading.RLock()  # reentrant, because a signal handler may close at any point
        self._gpu, self._far = gpu, far or {}
        self._events: dict[int, Events] = {}
        self._poll = select.epoll()
        forking.register(self)

    @property
    def has_direct(self) -> bool:
        """See `abc.cards.Cards`."""
        return self._gpu is not None and self._gpu.works

    @property
    def trials(self) -> Sequence[Trial]:
        """How far each device came with the memory of this process's GPU; also those that are too far away to be used."""
        from xvcomm.backends.rdma.trials import Trial

        far = [Trial(name, "", "", why) for name, why in self._far.items()]
        return [*self._gpu.trials, *far] if self._gpu is not None else far

    @property
    def grades(self) -> Sequence[Grades]:
        """See `abc.cards.Cards`."""
        return self._gpu.grades if self._gpu is not None else ()

    def direct(self, nbytes: int, *, producer: bool) -> DirectSlots | None:
        """See `abc.cards.Cards.direct`."""
        return self._gpu.slots(nbytes, producer=producer) if self._gpu is not None else None

    def reaches(self, address: str) -> bool:
        """See `abc.cards.Cards.reaches`."""
        try:
            self._find(address)
        except ResourceError:
            return False
        return True

    def ports(self) -> list[SubnetPort]:
        """See `abc.cards.Cards.ports`."""
        found = []
        for domain in self._domains:
            with contextlib.suppress(ResourceError):  # it does not answer
                ways = self._used.ways(domain.name, domain.ask().ports)
                found += [SubnetPort(f"{domain.name}:{port.number}", gid.address) for port, gid in ways]
        return found

    def end(self, address: str) -> QueueEnd:
        """See `abc.cards.Cards.end`."""
        index, port, gid = self._find(address)
        return QueueEnd(self._domains[index].name, port.number, gid.address, port.lid)

    def _find(self, address: str) -> tuple[int, Port, Gid]:
        """Index of the device that serves an address, its port and GID: as they are now, because GIDs come and go."""
        silent = []
        for index, domain in enumerate(self._domains):
            try:
                ports = domain.ask().ports
            except ResourceError as error:  # most often it was removed, and the others serve on
                silent.append(str(error))
                continue
            for port in ports:
                if port.state == "active" and (gid := gid_of(port, address)) is not None:
                    return index, port, gid
        names = ", ".join(domain.name for domain in self._domains)
        raise ResourceError("; ".join([f"no active port of {names} has a GID of the address {address}", *silent]))

    def register(self, address: int, nbytes: int, iova: int = 0) -> Registration:
        """See `abc.cards.Cards.register`."""
        return Registration(self._domains, address, nbytes, iova)

    def pair(self, address: str) -> RailPair:
        """See `abc.cards.Cards.pair`."""
        from xvcomm.backends.rdma.rails import RailPair

        index, port, gid = self._find(address)
        domain = self._domains[index]
        options = self._options | {"partition": partition(domain.name, port.number, self._key)}
        made = RailPair(
            domain, index, port, gid, options, self._forget, direct=self._gpu is not None and self._gpu.writes
        )
        with self._lock:
            self._pairs.add(made)
        return made

    def _forget(self, pair: RailPair) -> None:
        with self._lock:
            self._pairs.discard(pair)

    def watch(
        self, add: Callable[[int, Callable[[], None]], None], lost: Callable[[str, Sequence[RailPair]], None]
    ) -> None:
        """See `abc.cards.Cards.watch`."""
        for index, domain in enumerate(self._domains):
            events = Events(domain.name, domain.context)
            self._events[index] = events
            self._poll.register(events.fd, select.EPOLLIN)
        add(self._poll.fileno(), lambda: self._hear(lost))

    def _hear(self, lost: Callable[[str, Sequence[RailPair]], None]) -> None:
        """Tell of the events that have come. A device that was removed is not asked any more."""
        for index, events in list(self._events.items()):
            try:
                for event in events.take():
                    if pairs := self._concerned(index, event):
                        lost(str(event), pairs)
            except ResourceError as error:
                self._poll.unregister(events.fd)
                del self._events[index]
                lost(str(error), self._of_device(index))

    def _of_device(self, device: int) -> list[RailPair]:
        with self._lock:
            return [pair for pair in self._pairs if pair.device == device]

    def _concerned(self, device: int, event: Event) -> list[RailPair]:
        """The queue pairs that cannot be used any more after an event."""
        found = [
            pair
            for pair in self._of_device(device)
            if event.port in (0, pair.port.number)
            and event.queue_pair in (0, *pair.numbers)
            and event.completion_queue in (0, *pair.completion_queues)
        ]
        if event.name != GID_CHANGE:
            return found if event.loss else []
        try:
            ports = self._domains[device].ask().ports
        except ResourceError:
            return found
        served = {(port.number, gid.index, gid.value) for port in ports for gid in port.gids}
        return [pair for pair in found if (pair.port.number, pair.source.index, pair.source.value) not in served]

    def after_fork(self) -> None:
        """Leave the devices to the parent: the child's copies would keep them open after its death."""
        descriptors = [descriptor for pair in self._pairs for descriptor in pair.descriptors]
        for domain in self._domains:
            descriptors += domain.descriptors
        for descriptor in descriptors:
            forking.leave_to_parent(descriptor)

    def close(self) -> None:
        """See `abc.cards.Cards.close`. Idempotent. Queue pairs whose requests have not ended are given back, too."""
        for pair in list(self._pairs):
            pair.fail()
            pair.close()
        self._events.clear()
        self._poll.close()
        for domain in self._domains:
            domain.close()
        self._domains = []
