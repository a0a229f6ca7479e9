"""The public interface: a communicator for arrays of any framework, with blocking and asynchronous operations.

Common to all operations. Arrays: numpy, torch, JAX, CuPy, anything with DLPack or the array interface; contiguous; any dtype of
`xvcomm.types.dtype`. Mutable arrays are filled in place and also returned; for immutable ones (JAX) a new array of the same
framework is returned. `timeout` is in seconds; the default is the communicator's own.

On host memory a call blocks until its result is available, unless `async_op=True`, which returns a `Work`. On GPUs a call is
ordered on a stream and the host does not wait: on `stream`, by default the current stream of the arrays' framework; if that is
unknown, after the default stream, and then the host waits. With `async_op=True` the operation runs concurrently to that stream
until `Work.wait()`. Both can be captured in a graph, after one call outside of the capture.

Every operation may raise: ArrayError or DTypeError before any data moves; MismatchError if ranks call it with different
arguments; PeerLost if a rank dies; DeadlineExceeded; Aborted; ClosedError. After MismatchError, PeerLost, DeadlineExceeded and
Aborted the communicator is unusable on all its ranks; `shrink` makes a new one of those that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn, SupportsIndex

from xvcomm.abc.store import Store
from xvcomm.abc.transport import Rail
from xvcomm.comm import exporter
from xvcomm.comm.collectives import Collectives
from xvcomm.comm.growing import rejoin
from xvcomm.comm.lifetime import Lifetime
from xvcomm.comm.objects import Objects
from xvcomm.comm.point_to_point import PointToPoint
from xvcomm.comm.registration import Registering
from xvcomm.comm.subgroups import Meetings, naming, subgroups
from xvcomm.config import Config
from xvcomm.engine.context import Context
from xvcomm.engine.ranges import runners
from xvcomm.engine.session.session import Session
from xvcomm.engine.staging import Staging
from xvcomm.errors import NotPicklable
from xvcomm.trace.format import Record
from xvcomm.types.deadline import Deadline
from xvcomm.types.opcode import OpCode
from xvcomm.types.topology import Topology


class Communicator(Collectives, PointToPoint, Objects, Registering, Lifetime):
    """Ranks 0 to size - 1 that communicate with each other. Created by `xvcomm.init`, `split`, `subgroup`, `shrink`, `grow`.

    Attributes:
        rank: this process's rank.
        size: number of ranks.
        job_ranks: the numbers of its ranks in the whole job; they stay when the job shrinks and grows.
        topology: islands and hosts.
        device, device_index: type of this rank's device, `"host"`, `"cuda"` or `"rocm"`, and its index on this host.
        devices: device type of every rank.
        timeout: default timeout of an operation in seconds.
    """

    def __init__(self, context: Context, timeout: float) -> None:
        self._context = context
        self.collectives, self.messages = runners(context)
        self._staging = Staging(context.device)
        self.rank: int = context.rank
        self.size: int = len(context.ranks)
        self.job_ranks: tuple[int, ...] = tuple(context.session.numbers[r] for r in context.ranks)
        self.topology: Topology = context.topology
        self.device: str = context.kind
        self.device_index: int = context.index
        self.devices: tuple[str, ...] = tuple(context.session.infos[r].device for r in context.ranks)
        self.timeout = timeout
        self._splits = 0
        self._meetings = Meetings(context)
        self._init_point_to_point()
        self._init_lifetime()
        if context.session.config.metrics is not None:
            exporter.attend(context)

    @classmethod
    def join(
        cls, store: Store, rank: int, size: int, *, config: Config, deadline: Deadline, on_close: Callable[[], None]
    ) -> Communicator:
        """Join the other ranks through a store; `xvcomm.init` opens the store and calls this.

        Args:
            deadline: for joining; operations have `config.timeout` seconds each.
            on_close: called once, when everything is closed.

        Raises:
            DeadlineExceeded: names the ranks that did not join.
            ConfigError: two processes have the same rank.
            ResourceError: shared memory cannot be allocated.
        """
        session = Session(store, rank, size, config, deadline, on_close)
        try:
            return cls(Context(session, "0", tuple(range(size)), deadline, OpCode.INIT), config.timeout)
        except BaseException as error:
            session.give_up(error)
            raise

    @classmethod
    def rejoin(
        cls, store: Store, rank: int, *, config: Config, deadline: Deadline, on_close: Callable[[], None]
    ) -> Communicator:
        """Join a job that runs, through the store in which it has begun, when its ranks grow; see `growing.rejoin`."""
        context = rejoin(store, rank, config, deadline, on_close)
        try:
            return cls(context, config.timeout)
        except BaseException as error:
            context.session.give_up(error)
            raise

    @property
    def store(self) -> Store:
        """The store that the ranks used for rendezvous, under a prefix of this communicator."""
        return self._context.store

    @property
    def identity(self) -> tuple[object, str]:
        """An object that all communicators of this process's job share, and the name of this one, equal on its ranks."""
        return self._context.session, self._context.path

    def __repr__(self) -> str:
        islands = ", ".join(f"{i.label} x {i.size}" for i in self.topology.islands)
        return f"<xvcomm.Communicator rank {self.rank} of {self.size}: {islands}>"

    def __reduce__(self) -> NoReturn:
        raise NotPicklable(
            "a communicator cannot be pickled or copied, because it is bound to its process; pass comm.rank and comm.size, "
            "or the arguments of xvcomm.init, and let each process create its own",
            rank=self.rank,
        )

    def split(
        self, color: SupportsIndex | str | None, key: SupportsIndex = 0, *, timeout: float | None = None
    ) -> Communicator | None:
        """Create a communicator of the ranks that pass the same `color`, ordered by (key, rank).

        Blocks until all ranks of this communicator call it. Ranks with `color=None` get None (as with MPI_UNDEFINED in MPI).
        Bools and numpy's integers count as ints. A group within one island uses its native library alone.

        Raises:
            MismatchError: colours of different types; names two ranks.
        """
        deadline = self._deadline(timeout)
        self._splits += 1
        members = subgroups(self, color, key, deadline)
        if members is None:
            return None
        path = f"{self._context.path}.{self._splits}.{members[0]}"
        world = tuple(self._context.ranks[m] for m in members)
        with naming(self._context):
            return Communicator(Context(self._context.session, path, world, deadline), self.timeout)

    def subgroup(self, ranks: Sequence[int], name: str, *, timeout: float | None = None) -> Communicator:
        """Create a communicator of some ranks; only these call this (as MPI_Comm_create_group in MPI).

        Blocks until all of them call it. The other ranks of this communicator are not involved.

        Args:
            ranks: ranks of this communicator, including this one, in the group's order; the same on all members.
            name: distinguishes groups with common ranks that are created at the same time; the same on all members. It can be
                reused.

        Raises:
            ArgumentError: a rank is listed twice, or out of range; this rank is not listed.
            MismatchError: members that wait for each other pass different `ranks`.
            DeadlineExceeded: names the members that did not call this. This communicator remains usable.
        """
        deadline = self._deadline(timeout)
        with naming(self._context):
            path, world = self._meetings.meet(ranks, name, deadline)
            return Communicator(Context(self._context.session, path, world, deadline), self.timeout)

    def history(self) -> list[Record]:
        """The last operations of this process, oldest first, over all its communicators: its flight recorder. Never blocks.

        Returns:
            At most `XVCOMM_TRACE_RECORDS` records; `describe()` formats one, with the native library or the transport that
            carries it. Empty after `close`.
        """
        return self._context.session.history()

    def rails(self) -> list[Rail]:
        """The connections to ranks of this communicator on other hosts, with the bytes that each has carried. Never blocks.

        All communicators of a process use the same ones. They are made when ranks first communicate.
        """
        every = (rail for transport in self._context.session.transports for rail in transport.rails())
        ranks = self._context.ranks
        return [replace(rail, rank=ranks.index(rail.rank)) for rail in every if rail.rank in ranks]

    def refused(self) -> int:
        """How many connections of strangers this process has closed: they did not prove the job's key, or broke the protocol."""
        return sum(transport.refused() for transport in self._context.session.transports)

    def metrics_port(self) -> int | None:
        """On which port this process serves its metrics; None without `XVCOMM_METRICS`."""
        return exporter.port(self._context.session)
