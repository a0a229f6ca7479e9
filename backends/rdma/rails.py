"""The queue pair of a rail: its buffers, what the other side must know of it, and what it says when it fails."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from ipaddress import IPv6Address
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from xvcomm.abc.cards import Loopback
from xvcomm.backends.rdma.devices import Gid, Port
from xvcomm.backends.rdma.gids import apart, flid, partition_key, routed_gid
from xvcomm.backends.rdma.pairs import Domain, Path, PolledQueue, ReliableQueue, Remote
from xvcomm.backends.rdma.selfpair import SelfPair
from xvcomm.errors import ResourceError
from xvcomm.jit.compile import compiling, kernel
from xvcomm.memory.segment import Segment
from xvcomm.system.notice import notice
from xvcomm.types.subnets import prefix
from xvcomm.wire.frames import BUFFER_BYTES, BUFFERS, HEADER, MAX_DEVICES
from xvcomm.wire.verbs import offer, queue_at

_DEPTH = 2 * BUFFERS
"""A frame takes two requests: the WRITE of its slot, and its SEND."""
_INLINE = 8 + HEADER + 64
"""A frame with a short payload, and what goes in front of it."""


class Description(msgspec.Struct, frozen=True, array_like=True):
    """What the other side must know of a queue pair.

    Attributes:
        number: its qp_num.
        gid, lid: of its port; the LID is 0 on Ethernet.
        mtu: of its port.
        device: index of its device there.
        key: of its partition; 0 if it is not known.
        grh: whether packets must have a GRH in its subnet, too.
        routed: GID by which routers of InfiniBand find its port, if there is one.
    """

    number: Annotated[int, Meta(ge=1, lt=1 << 24)]
    gid: Annotated[bytes, Meta(min_length=16, max_length=16)]
    lid: Annotated[int, Meta(ge=0, lt=1 << 16)]
    mtu: Annotated[int, Meta(ge=256, le=4096)]
    device: Annotated[int, Meta(ge=0, lt=MAX_DEVICES)]
    key: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    grh: bool = False
    routed: Annotated[bytes, Meta(min_length=16, max_length=16)] | None = None

    @classmethod
    def decode(cls, data: bytes) -> Description:
        """What the other side has sent.

        Raises:
            ResourceError: it makes no sense.
        """
        try:
            return _decode(data)
        except msgspec.MsgspecError as error:
            raise ResourceError(f"the other side's description of its queue pair makes no sense: {error}") from error

    @property
    def address(self) -> str:
        """The GID, as an address."""
        found = IPv6Address(self.gid)
        return str(found.ipv4_mapped or found)

    def crosses(self, theirs: Description) -> bool:
        """Whether routers of InfiniBand lie between this queue pair and another one."""
        return bool(self.lid) and self.gid[:8] != theirs.gid[:8]

    def objection(self, theirs: Description) -> str:
        """Why this queue pair and another one cannot be joined, or nothing."""
        if bool(self.lid) != bool(theirs.lid):
            return "one of the two is InfiniBand, the other is Ethernet"
        if self.crosses(theirs) and not (self.routed and theirs.routed and flid(theirs.routed)):
            here, there = prefix(self.address), prefix(theirs.address)
            return (
                f"the ports are in two subnets, {here} here and {there} there, and have no GIDs with a FLID by which "
                "routers of InfiniBand find both"
            )
        if apart(self.key, theirs.key):
            both = f"{self.key:#06x} here, {theirs.key:#06x} there"
            return f"the partitions do not go together, {both}: XVCOMM_RDMA_PARTITION_KEY chooses"
        return ""


_decode = msgspec.msgpack.Decoder(Description).decode


class RailPair:
    """See `abc.cards.Pair`. Made with its receive requests posted.

    Attributes:
        port, gid: of the device, that it uses.
        source: GID that its packets have: the same, or another one where they cross subnets.
        numbers, completion_queues: qp_num of the rail's queue pair and of the loopback's, and addresses of both's struct ibv_cq.
    """

    def __init__(
        self, domain: Domain, device: int, port: Port, gid: Gid, options: Mapping[str, Any], closed: Callable[[RailPair], None],
        *, direct: bool = False,
    ) -> None:  # fmt: skip
        """Make one.

        Args:
            domain: of the device.
            device: its index here.
            port, gid: that it sends from.
            options: the rest of its `pairs.Path`.
            closed: called once the device does not use its buffers any more.
            direct: whether it may have to make visible what it writes to a GPU's memory.

        Raises:
            ResourceError: the device refuses.
        """
        self._domain, self.port, self.gid, self._options, self._closed = domain, port, gid, options, closed
        self.source = gid
        self._lock = threading.RLock()  # reentrant, because a signal handler may close at any point
        self._open = True
        self._theirs: Description | None = None
        self.device, self.there, self.peer = device, 0, 0
        self._mirror: SelfPair | None = None
        with contextlib.ExitStack() as undo:
            if direct:
                self._mirror = SelfPair(domain, port, gid, options)
                undo.callback(self._mirror.close)
            memory = Segment.anonymous(2 * BUFFERS * BUFFER_BYTES)
            undo.callback(memory.close)
            region = domain.register(memory.address, 2 * BUFFERS * BUFFER_BYTES)
            undo.callback(domain.release, region)
            completions = PolledQueue(domain, _DEPTH + 1 + BUFFERS)
            undo.callback(completions.close)
            self._queue, self.inline = _make(domain, completions)
            undo.callback(self._queue.close)
            self._queue.prepare(port.number, options["partition"])
            self._queue.receive_into(memory.address, region.lkey, BUFFER_BYTES, BUFFERS)
            if _offer_all(self._queue.address):
                raise ResourceError(f"{domain.name}: {self._queue.failure()}")
            undo.pop_all()
        self.inbox, self.outbox = memory.address, memory.address + BUFFERS * BUFFER_BYTES
        self.outbox_key = region.lkey
        self._memory, self._region, self._completions = memory, region, completions
        self.number, self.queue = self._queue.number, self._queue.address
        self.completions, self.fd = completions.address, completions.fd
        self.loopback = self._mirror.records if self._mirror else Loopback()
        self.numbers = [self.number, *([self._mirror.number] if self._mirror else [])]
        self.completion_queues = [completions.record.queue, *([self._mirror.completion_queue] if self._mirror else [])]
        lid = port.lid if port.link == "InfiniBand" else 0
        key = partition_key(domain.name, port.number, options["partition"])
        self._routed = routed_gid(port) if lid else None
        self._ours = Description(
            self.number, gid.value, lid, port.mtu, device, key, grh=options["grh"] or port.grh,
            routed=self._routed.value if self._routed else None,
        )  # fmt: skip
        self.description = msgspec.msgpack.encode(self._ours)

    def connect(self, theirs: bytes) -> None:
        """See `abc.cards.Pair.connect`. May take seconds; `fail` and `close` wait for it."""
        found = self._theirs = Description.decode(theirs)
        if why := self._ours.objection(found):
            raise ResourceError(f"{self.where}: {why}")
        path, remote = self._way(found)
        with self._lock:
            if not self._open:
                raise ResourceError(f"{self.where}: the queue pair was given back")
            try:
                self._queue.connect(path, remote)
            except ResourceError as error:
                raise ResourceError(f"{self.where}: {error}; does a path lead there?") from error
        self.peer, self.there = found.number, found.device

    def _way(self, theirs: Description) -> tuple[Path, Remote]:
        """How packets go to the other end, in one subnet or over routers."""
        options = {**self._options, "grh": self._ours.grh or theirs.grh or self._ours.crosses(theirs)}
        remote = Remote(theirs.number, theirs.gid, theirs.lid)
        if self._routed and theirs.routed and self._ours.crosses(theirs):
            self.source, remote = self._routed, Remote(theirs.number, theirs.routed, flid(theirs.routed))
        return Path(self.port.number, self.source.index, min(self.port.mtu, theirs.mtu), **options), remote

    @property
    def descriptors(self) -> list[int]:
        """Those that keep the device open."""
        return [self.fd, *([self._mirror.fd] if self._mirror else [])]

    def fail(self) -> None:
        """See `abc.cards.Pair.fail`. A device that was removed does not answer; nothing arrives from it either."""
        with self._lock, contextlib.suppress(ResourceError):
            if self._open:
                self._queue.fail()

    def failure(self) -> str:
        """See `abc.cards.Pair.failure`."""
        own = self._mirror and self._mirror.failure()
        what = self._queue.failure() or (own and f"the GPU does not see what the device writes: {own}")
        return f"{self.where}: {what}" if what else ""

    @property
    def where(self) -> str:
        """See `abc.cards.Pair`."""
        there = f" to {self._theirs.address}" if self._theirs else ""
        return f"{self._domain.name} port {self.port.number}, GID {self.gid.address}{there}"

    def close(self) -> None:
        """See `abc.cards.Pair.close`. Its buffers stay if the device does not give it back, and may write to them."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            try:
                if self._mirror is not None:
                    self._mirror.close()
                self._queue.close()
                self._completions.close()
                self._domain.release(self._region)
                self._memory.close()
            except ResourceError as error:
                notice(f"a queue pair cannot be given back: {error}")
            else:
                self._closed(self)


def _offer(queue: int) -> int:
    """Post all receives."""
    record = queue_at(queue)
    return offer(record, record.receive_depth)


with compiling():
    _offer_all = kernel("int64(int64)")(_offer)


def _make(domain: Domain, completions: PolledQueue) -> tuple[ReliableQueue, int]:
    """A queue pair with room for short frames in its requests, or without if the device does not give it; and how much room."""
    try:
        return ReliableQueue(domain, completions, _DEPTH, _INLINE, receives=BUFFERS), _INLINE
    except ResourceError:
        return ReliableQueue(domain, completions, _DEPTH, 0, receives=BUFFERS), 0
