"""Contract of a transport: what makes a ring span two ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from xvcomm.abc.cards import Cards, QueueEnd
from xvcomm.abc.device import Device
from xvcomm.abc.peer_memory import PeerMemory
from xvcomm.abc.store import Store
from xvcomm.config import Config
from xvcomm.errors import BackendUnavailable
from xvcomm.memory.array_view import ArrayView
from xvcomm.memory.ring import RingEnd, RingLayout
from xvcomm.trace.format import Answer, Question
from xvcomm.trace.snapshot import Grades
from xvcomm.types.deadline import Deadline
from xvcomm.types.route import Ends, Route


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one rank's transport offers. Both ends' capabilities decide what a pair uses.

    Attributes:
        scheme: `shm`, `tcp`, `rdma`; equal schemes can talk.
        reach: ranks with equal reach can use it together: a host's identity for `shm`, a fabric's name or manner otherwise.
        rank_order: the lower is taken where several would do.
        shared: whether both ends map the same memory. Only then may a ring's slots lie in a GPU's memory that both reach.
    """

    scheme: str
    reach: str
    rank_order: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Interface:
    """An address of this host that a transport may use.

    Attributes:
        name: of the network interface or device.
        address: with the length of the network's prefix, `10.0.0.7/24`; empty if it has none.
        used: whether it is used.
        reason: why, or why not.
    """

    name: str
    address: str
    used: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Rail:
    """A connection that carries rings to a rank of another host.

    Attributes:
        rank: at the other end.
        scheme: `tcp` or `rdma`.
        local, remote: the addresses of this host and of the other.
        number: of the connection among those between these addresses.
        sent, received: bytes that it has carried since it came up, with those of the headers.
    """

    rank: int
    scheme: str
    local: str
    remote: str
    number: int
    sent: int
    received: int


@dataclass(frozen=True, slots=True)
class Path:
    """A pair of addresses over which connections have carried rings to a rank of another host, one after another.

    Attributes:
        rank, scheme, local, remote, number: as of a `Rail`.
        up: whether there is a connection at the moment.
        sent, received: bytes of all of them.
        losses: how many were lost.
        retries: slots that they have sent again after another connection was lost.
    """

    rank: int
    scheme: str
    local: str
    remote: str
    number: int
    up: bool
    sent: int
    received: int
    losses: int
    retries: int = 0


@dataclass(frozen=True, slots=True)
class PairTrial:
    """What came of joining queue pairs of an RDMA device here and of one on another host.

    Attributes:
        route: whose addresses the devices serve.
        here, there: their ends; None if a device has not told it.
        refusal: why they were not joined; empty if they were, and bytes have gone both ways.
    """

    route: Route
    here: QueueEnd | None
    there: QueueEnd | None
    refusal: str


def choose(ours: Sequence[Capabilities], theirs: Sequence[Capabilities]) -> Capabilities:
    """The transport for one direction of a pair: a pure function of what both ends offer.

    Raises:
        BackendUnavailable: no scheme reaches from one to the other.
    """
    both = [c for c in ours if any((c.scheme, c.reach) == (t.scheme, t.reach) for t in theirs)]
    if not both:
        here, there = (", ".join(f"{c.scheme} ({c.reach})" for c in offers) for offers in (ours, theirs))
        raise BackendUnavailable(
            f"no transport joins the two ranks: here {here}; there {there}; ranks on one host must share /dev/shm "
            "(containers: --ipc=host), and XVCOMM_TLS must be the same on all ranks"
        )
    return min(both, key=lambda c: (c.rank_order, c.scheme))


def peer_refusal(ours: PeerMemory | None, theirs: PeerMemory | None) -> str:
    """Why rings between two ranks of one island lie in host memory, or "" if they lie in either one's GPU memory.

    A pure function of what both ends offer, and the same from either side.
    """
    if ours is None or theirs is None:
        return "not both ranks have GPUs"
    for end in (ours, theirs):
        if end.refused:
            return end.refused
    if ours.runtime != theirs.runtime:
        return "the GPUs are of different vendors"
    if ours.processes != theirs.processes:
        return "the processes share no namespaces of processes and IPC (containers: --ipc=host --pid=host)"
    if ours.device not in theirs.reaches or theirs.device not in ours.reaches:
        return (
            f"the GPUs {' and '.join(sorted((ours.device, theirs.device)))} do not reach each other's memory, or a process "
            f"does not see the other's GPU ({ours.visible})"
        )
    return ""


KEY_BYTES = 32
"""Length of `Membership.key`."""


@dataclass(frozen=True, slots=True)
class Membership:
    """What a transport is told of the job once all ranks have joined. Ranks are numbers of the whole job.

    Attributes:
        rank: of this process.
        size: of the job.
        neighbours: how many of its ranks are on this host, including this one.
        store: for what its ranks must tell each other.
        key: random bytes that all ranks of the job have, and others only if they read the job's store.
        lost: call it when a rank cannot be reached any more, with the reason.
        left: call it when a rank has left the job in good order.
        device: of this rank; None where no ring is opened.
        cards: opens the RDMA devices of network interfaces, which are given by address and name, for `device`:
            None if there are none to use. Who calls it closes them.
    """

    rank: int
    size: int
    neighbours: int
    store: Store
    key: bytes
    lost: Callable[[int, str], None]
    left: Callable[[int], None]
    device: Device | None
    cards: Callable[[Config, Mapping[str, str], Device | None], Cards | None]


class Transport(ABC):
    """One way between ranks, for one rank. Constructed with (config, host). Members are ranks' numbers in the whole job."""

    def __init__(self, config: Config, host: str) -> None:  # noqa: B027
        """Cheap; opens nothing."""

    @classmethod
    def refusal(cls) -> tuple[str, str] | None:
        """Why it cannot work here and what to do about it, or None if it can."""
        return None

    @classmethod
    def interfaces(cls, config: Config, env: Mapping[str, str]) -> Sequence[Interface]:
        """Every network interface of this host, and whether it is used. Never fails."""
        return ()

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this rank offers. Never blocks."""

    def join(self, membership: Membership) -> None:  # noqa: B027 - most transports need nothing
        """Begin to be reachable. Called once, before any ring is opened, if this rank uses the transport with any other.

        Raises:
            ResourceError, ConfigError: it cannot be.
        """

    @abstractmethod
    def open_ring(
        self, name: str, peer: int, member: int, layout: RingLayout, store: Store, deadline: Deadline, *, producer: bool,
        job: str, group: int,
    ) -> RingEnd:  # fmt: skip
        """This rank's end of the ring called `name`. The end that comes first makes it; neither waits for the other.

        Args:
            name: equal on both ranks, used once.
            peer, member: rank at the other end, in the communicator and in the whole job.
            layout: equal on both ranks; who makes the ring may take what its `smaller` gives if memory is short.
            store: where the two ends find each other.
            deadline: for what was begun on the other side to be finished.
            producer: which end.
            job: what the names of shared memory made for it begin with.
            group: number of the communicator, equal on all its ranks and used once.

        Raises:
            ResourceError: its memory cannot be had.
            StoreError, DeadlineExceeded: the other end cannot be found.
        """

    def register(self, array: ArrayView) -> Callable[[], None]:
        """Let RDMA devices, if it uses some, send from an array of host memory, and receive into it, without a copy.

        Returns:
            A function that deregisters the array after messages under way. Until then, or `close`, the array's memory is kept.
            Idempotent; a second call, from any thread, returns when the array is deregistered.

        Raises:
            ResourceError: a device or a limit refuses; says what to do.
        """
        return lambda: None

    def announce(self) -> None:  # noqa: B027 - ranks that share memory need nothing
        """Publish again how this rank is reached: another store has taken the place of `Membership.store`, and is empty.

        Raises:
            StoreError, DeadlineExceeded: the store cannot be reached.
        """

    def enter(self, group: int) -> None:  # noqa: B027 - as `leave`
        """This rank makes a communicator. No rank opens a ring of it before all its ranks have called this."""

    def leave(self, group: int, word: int) -> None:  # noqa: B027 - ranks that share memory see it there
        """This rank has closed a communicator: who opens a ring to it that it has not opened stops by this abort word."""

    def expose(self, recorder: int) -> None:  # noqa: B027 - ranks that share memory need nothing
        """Let ranks that `ask` read this rank's flight recorder, by its handle; 0: no longer, as it is closed then."""

    def ask(self, members: Sequence[int], question: Question, deadline: Deadline) -> Mapping[int, Answer]:
        """Ask ranks what they do; gives the answers that come in time. The ranks' Python takes no part."""
        return {}

    def answers(self, member: int) -> bool:
        """Whether a rank's host answers at the moment, also if the rank itself does not. Never blocks."""
        return False

    def part(self, member: int) -> None:  # noqa: B027 - ranks that share memory see it there
        """The job's store has told that a rank has left in good order, and that all it had sent has come. Never blocks.

        Calls `Membership.left`, unless a connection to the rank is open, which tells it behind what it carries.
        """

    def meet(self, members: Sequence[int]) -> None:  # noqa: B027 - ranks that share memory need nothing
        """Find out how ranks can be reached, while the job's store can be asked. May block; any thread."""

    def doubt(self, member: int, seconds: float) -> None:  # noqa: B027 - ranks that share memory see it there
        """The job's store has heard nothing of a rank's host for some seconds, or this rank nothing of the store's. Never blocks.

        Calls `Membership.lost` after XVCOMM_PEER_TIMEOUT, with those seconds, if the rank cannot be reached meanwhile.
        """

    def probe(self, members: Sequence[int]) -> Mapping[int, Mapping[Route, str]]:
        """Try every route to ranks of other hosts, without a ring: why each does not work, or nothing. Preferred ones first."""
        return {}

    def try_pairs(self, members: Sequence[int]) -> Mapping[int, Sequence[PairTrial]]:
        """Join every RDMA device in use with each of those of ranks of other hosts, without a ring, and part them again.

        Preferred ones come first. Each of these ranks must stay until all have called it.
        """
        return {}

    def grades(self) -> Sequence[Grades]:
        """How far RDMA devices came with the memory of this rank's GPU, once it has joined; none if none was tried."""
        return ()

    def refused(self) -> int:
        """How many connections it has closed that did not prove to belong to the job, or broke its protocol."""
        return 0

    def rails(self) -> list[Rail]:
        """The connections that carry its rings at the moment; ranks are numbers of the whole job."""
        return []

    def restrict(self, member: int, only: Collection[Ends]) -> None:  # noqa: B027 - ranks that share memory have no rails
        """Let only these rails carry what this rank sends to another one from now on; none: all of them again.

        If all of them are lost, the others carry. Control messages go over any, rings in GPU memory over RDMA only.
        """

    def paths(self) -> list[Path]:
        """Where it has connections that carry its rings, or has had some; never fewer. Ranks as in `rails`. Never blocks."""
        return []

    def connections(self, member: int) -> str:
        """The connections to another rank, lost ones too, with their bytes and states in words; empty if it needs none.

        Never blocks.
        """
        return ""

    @abstractmethod
    def close(self) -> None:
        """Free what it owns. Idempotent; rings are closed by who holds their ends."""
