"""InfiniBand over the fake provider: ports with LIDs and partitions on fabrics, below xvcomm's own devices and queue pairs.

`Library` takes libibverbs' place for what makes queue pairs. As in a subnet, packets find a port by its LID, and over routers
between fabrics by its FLID and the GID in their GRH; where an address vector leads to no port, or has no GRH where one is
required, nothing gets through.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address
from types import SimpleNamespace
from typing import Any

from fabric import ERROR, Fabric, FakeDevice

from xvcomm.backends.rdma import layout
from xvcomm.backends.rdma.devices import Device, Gid, Port
from xvcomm.errors import ResourceError

INIT, READY_TO_RECEIVE, READY_TO_SEND = 1, 2, 3
"""States of a queue pair."""


@dataclass(frozen=True)
class SubnetEnd:
    """A port of a fake device.

    Attributes:
        device: its name.
        gid: as an address.
        lid: 0: the subnet manager has not seen it.
        fabric: the cables: only ports with the same one reach each other.
        keys: of its partitions, by their places.
        link: `Ethernet` for a port of RoCE, which has no LID.
        grh: whether packets must have a GRH.
        routed: its second GID, by which routers find it; empty if there is none.
    """

    device: str
    gid: str
    lid: int
    fabric: str = "a"
    keys: tuple[int, ...] = (0xFFFF,)
    link: str = "InfiniBand"
    grh: bool = False
    routed: str = ""

    def port(self) -> Port:
        """As verbs tell of it: the only one of its device."""
        version = "InfiniBand" if self.link == "InfiniBand" else "RoCE v2"
        gids = [
            Gid(i, IPv6Address(gid).packed, version, "", gid) for i, gid in enumerate((self.gid, self.routed)) if gid
        ]
        return Port(1, "active", self.link, 4096, self.lid, tuple(gids), self.grh)

    def leads_to(self, there: SubnetEnd, address: Any) -> bool:
        """Whether packets with an address vector come to another port."""
        lid, has_grh, route = int(address["lid"]), bool(address["is_global"]), address["route"]
        to, source = IPv6Address(route["gid"].tobytes()), int(route["sgid_index"])
        if self.fabric == there.fabric:
            named = not has_grh or (to, source) == (IPv6Address(there.gid), 0)
            return lid == there.lid and named and (has_grh or not (self.grh or there.grh))
        if not (has_grh and self.routed and there.routed):
            return False
        return (to, source, lid) == (IPv6Address(there.routed), 1, int.from_bytes(to.packed[4:6]))


class Library:
    """The functions of libibverbs that make queue pairs. Thread-safe, as far as each queue pair has a device of its own.

    Attributes:
        ends: all ports, by their devices' names.
        routes: of the queue pairs that were joined, by number: LID, whether there is a GRH, and the partition's place.
        classes: of the same, their traffic class and service level.
        removed: names of devices that answer nothing any more.
    """

    def __init__(self, fabric: Fabric, ends: Sequence[SubnetEnd]) -> None:
        self.fabric, self.ends = fabric, {end.device: end for end in ends}
        self.routes: dict[int, tuple[int, bool, int]] = {}
        self.classes: dict[int, tuple[int, int]] = {}
        self.removed: set[str] = set()
        self._made: dict[int, tuple[FakeDevice, SubnetEnd]] = {}  # by the context
        self._queues: dict[int, int] = {}  # by the channel
        self._pairs: dict[int, tuple[FakeDevice, SubnetEnd]] = {}
        self._numbers: dict[int, SubnetEnd] = {}
        self._places: dict[int, int] = {}  # the partition's
        self._peers: dict[int, tuple[int, bool]] = {}  # and whether packets come there
        self._attached = threading.local()
        calls = fabric.calls
        self.ibv_get_cq_event, self.ibv_ack_cq_events = calls.fake_get_cq_event, calls.fake_ack_cq_events

    def attach(self, end: SubnetEnd) -> None:
        """Let the next queue pair of this thread be one of a port, with a device of the fake provider for itself."""
        device = self.fabric.device()
        self._made[device.address] = device, end
        self._attached.context = device.address

    @property
    def context(self) -> int:
        """Of the device that this thread has attached; 0 if none."""
        return getattr(self._attached, "context", 0)

    def ibv_create_comp_channel(self, context: int) -> int:
        """Made with its completion queue, as the provider has it."""
        queue = int(self.fabric.calls.fake_create_cq(context, 1024))
        channel = int(layout.at(queue, layout.COMPLETION_QUEUE)["channel"])
        self._queues[channel] = queue
        return channel

    def ibv_create_cq(self, context: int, entries: int, own: Any, channel: int, vector: int) -> int:
        """That of the channel."""
        assert entries <= 1024
        return self._queues[channel]

    def ibv_create_qp(self, domain: int, wanted: int) -> int:
        """A queue pair of the port that its thread has attached."""
        asked = layout.at(wanted, layout.PAIR_INIT)
        size = asked["capacity"]
        made = int(
            self.fabric.calls.fake_create_qp(
                self.context, int(asked["send_cq"]), int(size["send_wr"]), int(size["recv_wr"])
            )
        )
        found = layout.at(made, layout.QUEUE_PAIR)
        found["pd"] = domain
        self._pairs[made] = self._made[self.context]
        self._numbers[int(found["qp_num"])] = self._pairs[made][1]
        return made

    def ibv_modify_qp(self, pair: int, wanted: int, mask: int) -> int:
        """Join it if the address vector leads to the port of the peer."""
        asked, found = layout.at(wanted, layout.PAIR_ATTRIBUTES), layout.at(pair, layout.QUEUE_PAIR)
        state, number = int(asked["state"]), int(found["qp_num"])
        if state == ERROR:
            self.fabric.calls.fake_leave(pair, ERROR)
        elif state == INIT:
            found["state"], self._places[pair] = INIT, int(asked["pkey_index"])
        elif state == READY_TO_RECEIVE:
            address = asked["address"]
            self.classes[number] = int(address["route"]["traffic_class"]), int(address["sl"])
            self.routes[number] = int(address["lid"]), bool(address["is_global"]), self._places[pair]
            peer = int(asked["dest_qp_num"])
            self._peers[pair] = peer, self._pairs[pair][1].leads_to(self._numbers[peer], address)
        else:
            peer, leads = self._peers[pair]
            self.fabric.calls.fake_connect(pair, peer)
            if not leads:
                self.fabric.calls.fake_cut(pair)
        return 0

    def ibv_destroy_qp(self, pair: int) -> int:
        """Give it back."""
        return int(self.fabric.calls.fake_destroy_qp(pair))

    def ibv_destroy_cq(self, queue: int) -> int:
        """Give it back, with its channel."""
        return int(self.fabric.calls.fake_destroy_cq(queue))

    def ibv_destroy_comp_channel(self, channel: int) -> int:
        """Given back with its completion queue."""
        return 0


class SubnetDomain:
    """See `pairs.Domain`: an open device with one port."""

    domain = 0x1000
    descriptors: tuple[int, ...] = ()

    def __init__(self, library: Library, name: str) -> None:
        self._library, self.name = library, name
        self.events = library.fabric.device()

    @property
    def context(self) -> int:
        """Of the device that the queue pair has which is being made."""
        return self._library.context

    def ask(self) -> Device:
        """Its port as it is now."""
        if self.name in self._library.removed:
            raise ResourceError(f"{self.name} does not tell its ports: No such device")
        return Device(self.name, (self._library.ends[self.name].port(),))

    def register(
        self, address: int, nbytes: int, *, iova: int = 0, readable: bool = False, ordered: bool = True
    ) -> Any:  # fmt: skip
        """Memory that its port reads and writes. A rail begins with its buffers, and has a device of its own."""
        if self.name in self._library.removed:
            raise ResourceError(f"{self.name} does not register {nbytes} bytes: No such device")
        self._library.attach(self._library.ends[self.name])
        key = self._library.fabric.register(address, nbytes, iova=iova)
        return SimpleNamespace(lkey=key, rkey=key)

    def release(self, region: Any) -> bool:
        """Register it no more. Idempotent."""
        if region.lkey:
            self._library.fabric.deregister(region.lkey)
            region.lkey = 0
        return True

    def close(self) -> None:
        """Closed with the fabric."""
