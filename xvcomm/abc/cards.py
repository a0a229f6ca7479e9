"""The contract of RDMA devices: registered memory, and queue pairs for rails. `backends.rdma` gives them, the wire uses them.

A rail of RDMA sends frames with SEND into buffers that the other side has posted. A slot's payload goes before its frame, by a
WRITE into the other side's ring, on the same queue pair: so it is there when the frame is received. Short payloads go with the
frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from xvcomm.trace.snapshot import Grades
from xvcomm.types.subnets import SubnetPort


class Keys(NamedTuple):
    """Keys of registered memory on one device: lkey, and rkey for the other side."""

    local: int
    remote: int


class QueueEnd(NamedTuple):
    """Where a queue pair of an RDMA device ends.

    Attributes:
        device: its name.
        port: number of the device's port.
        gid: of the port, as an address.
        lid: of the port, in an InfiniBand subnet; 0 on Ethernet.
    """

    device: str
    port: int
    gid: str
    lid: int = 0

    def __str__(self) -> str:
        lid = f"LID {self.lid}, " if self.lid else ""
        return f"{self.device} port {self.port}, {lid}GID {self.gid}"


class Registered(Protocol):
    """Memory that the devices may read and write.

    Attributes:
        address: by which devices find its first byte.
        keys: on each device.
        scratch: address of a word in it that means nothing, where the GPU sees what devices write only after a WRITE there, see
            `visibility`; else 0.
    """

    address: int
    keys: Sequence[Keys]
    scratch: int

    def close(self, *, in_use: bool = False) -> None:
        """Register it no more. Requests under way that use it fail; they do not touch it once this returns.

        Args:
            in_use: whether a GPU's kernel that does not end may still use it, so that it must not be used for anything else.
        """


class Loopback(NamedTuple):
    """A queue pair that is joined with itself, for `visibility`; all 0 where no ring lies in a GPU's memory.

    Attributes:
        loopback, loopback_completions: addresses of its records, see `wire.verbs`.
        word, word_key: address and lkey of 8 bytes.
    """

    loopback: int = 0
    loopback_completions: int = 0
    word: int = 0
    word_key: int = 0


class Pair(Protocol):
    """A queue pair of a device, with `wire.frames.BUFFERS` buffers to receive into, which are posted, and as many to send from.

    Attributes:
        device: index of its device here.
        there: index of the other side's device, once it is connected.
        number: its qp_num.
        peer: qp_num of the one at the other end, once it is connected.
        queue, completions: addresses of its records, see `wire.verbs`. No other queue pair has these completions.
        fd: the completion channel's descriptor.
        inbox, outbox: addresses of the buffers to receive into and to send from.
        outbox_key: lkey of the latter.
        inline: most bytes that a request takes along.
        loopback: of its device, used by this rail alone.
        description: what the other side must know to connect.
    """

    device: int
    there: int
    number: int
    peer: int
    queue: int
    completions: int
    fd: int
    inbox: int
    outbox: int
    outbox_key: int
    inline: int
    loopback: Loopback
    description: bytes

    @property
    def where(self) -> str:
        """The device, the port and both GIDs, once it is connected; for messages."""

    def connect(self, theirs: bytes) -> None:
        """Join it with the other side's, by its description.

        Raises:
            ResourceError: the device refuses, most often because no path leads there; or the description makes no sense.
        """

    def fail(self) -> None:
        """Let all that is posted end, and nothing arrive any more. It cannot be connected again."""

    def failure(self) -> str:
        """What went wrong first, with its likely cause, the device, the port and both GIDs; empty if nothing did."""

    def close(self) -> None:
        """Give it back."""


class Cards(Protocol):
    """The RDMA devices that this process uses.

    A port of Ethernet is found by an address of its network interface, one of InfiniBand by its GID.
    """

    @property
    def has_direct(self) -> bool:
        """Whether all of them can read the memory of this process's GPU, or write to it."""

    @property
    def grades(self) -> Sequence[Grades]:
        """How far each device came with the memory of this process's GPU, if it was tried."""

    def reaches(self, address: str) -> bool:
        """Whether a device belongs to the network interface that has this address, and can be used."""

    def ports(self) -> Sequence[SubnetPort]:
        """The ports of InfiniBand that can be used, as they are now."""

    def end(self, address: str) -> QueueEnd:
        """Where a queue pair of the port that has this address would end, if it were made now.

        Raises:
            ResourceError: no port has it at the moment.
        """

    def register(self, address: int, nbytes: int, iova: int = 0) -> Registered:
        """Let all devices read and write memory, and the other sides' devices write to it.

        Args:
            iova: by which devices find its first byte, at the same place within a page; 0: by `address`.

        Raises:
            ResourceError: a device or a limit refuses.
        """

    def direct(self, nbytes: int, *, producer: bool) -> Registered | None:
        """Slots of a ring in the memory of this process's GPU, which all devices can read if it fills them, else write.

        None where it has no GPU, the devices do not reach its memory, or there is none left: then host memory serves.
        """

    def pair(self, address: str) -> Pair:
        """A queue pair of the port that has this address.

        Raises:
            ResourceError: there is none, or the device refuses.
        """

    def watch(
        self, add: Callable[[int, Callable[[], None]], None], lost: Callable[[str, Sequence[Pair]], None]
    ) -> None:
        """Tell when a port or a queue pair cannot be used any more.

        Args:
            add: calls a function in the event loop whenever a descriptor is ready to read.
            lost: called there with the reason and the queue pairs that are concerned.
        """

    def close(self) -> None:
        """Close the devices; queue pairs and registered memory must be closed before."""
