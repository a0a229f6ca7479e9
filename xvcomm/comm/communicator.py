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
from time import monotonic
from typing import Any, NoReturn, SupportsIndex

from xvcomm.abc.store import Store
from xvcomm.abc.transport import Rail
from xvcomm.comm import exporter
from xvcomm.comm.counts import blocks, in_elements, own_block, whole
from xvcomm.comm.growing import rejoin
from xvcomm.comm.lifetime import Lifetime
from xvcomm.comm.objects import Objects
from xvcomm.comm.point_to_point import PointToPoint
from xvcomm.comm.subgroups import Meetings, naming, subgroups
from xvcomm.config import Config
from xvcomm.engine.context import Context
from xvcomm.engine.inflight.work import Work
from xvcomm.engine.ranges import runners
from xvcomm.engine.request import CollectiveRequest, Key
from xvcomm.engine.session.session import Session
from xvcomm.engine.staging import Staging
from xvcomm.errors import ArgumentError, ArrayError, NotPicklable
from xvcomm.memory import array
from xvcomm.memory.array_view import ArrayView
from xvcomm.trace.format import Record
from xvcomm.types.deadline import Deadline, checked
from xvcomm.types.dtype import UINT8, ReduceOp, Reduction, reduction_on
from xvcomm.types.opcode import OpCode
from xvcomm.types.topology import Topology

Op = str | ReduceOp | Reduction
# Looked up once: access to a member of an Enum takes longer than most steps of a small operation.
_BROADCAST, _ALL_REDUCE = OpCode.BROADCAST, OpCode.ALL_REDUCE
_ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL = OpCode.ALL_GATHER, OpCode.REDUCE_SCATTER, OpCode.ALL_TO_ALL


class Communicator(PointToPoint, Objects, Lifetime):
    """Ranks 0 to size - 1 that communicate with each other. Created by `xvcomm.init`, `split`, `subgroup`, `shrink`, `grow`.

    Attributes:
        rank: this process's rank.
        size: number of ranks.
        job_ranks: the numbers of its ranks in the whole job; they stay when the job shrinks and grows.
        topology: islands and hosts.
        device, device_index: type of this rank's device, `"host"`, `"cuda"` or `"rocm"`, and its index on this host.
        devices: device type of every rank.
        timeout: default timeout of an operation in seconds.
        collectives: runs `CollectiveRequest`s, and prepares them for compiled code; for adapters.
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

    def broadcast(
        self, x: Any, root: int = 0, *, async_op: bool = False, timeout: float | None = None, stream: Any = None
    ) -> Any:
        """Copy the root's array to every rank.

        Args:
            x: the array on the root; on the other ranks a buffer of equal shape and dtype.
        """
        self._check_rank("root", root)
        mine = self.rank == root
        src = array.view(x, output=not mine)
        key = _key(_BROADCAST, root, src, src, async_op)
        if key and self.collectives.again(key, src, src, self.timeout if timeout is None else checked(timeout), stream):
            return src.array
        dst = src if mine or not src.immutable else self._empty_like(src, src.shape)
        call = CollectiveRequest(_BROADCAST, src, dst, src.dtype, count=src.count, root=root, key=key)
        return self._call(call, async_op, timeout, stream)

    def all_reduce(
        self, x: Any, op: Op = "sum", *, out: Any = None,
        async_op: bool = False, timeout: float | None = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Reduce elementwise over all ranks; every rank gets bitwise equal results.

        Args:
            x: the input; also the output unless `out` is given or `x` is immutable.
            op: `"sum"`, `"avg"`, `"prod"`, `"min"`, `"max"`, `"band"`, `"bor"`, `"bxor"`, `xvcomm.premul_sum(factor)`.
            out: output of equal shape and dtype.
        """
        src, given = array.view(x, output=out is None), None if out is None else array.view(out, output=True)
        dst = given or src
        key = _key(_ALL_REDUCE, op, src, dst, async_op)
        if key and self.collectives.again(key, src, dst, self.timeout if timeout is None else checked(timeout), stream):
            return dst.array
        how = reduction_on(op, src.dtype)
        if given or src.immutable:
            dst = self._output(src, given, None, src.count)
        call = CollectiveRequest(_ALL_REDUCE, src, dst, src.dtype, how, count=src.count, key=key)
        return self._call(call, async_op, timeout, stream)

    def reduce(
        self, x: Any, root: int = 0, op: Op = "sum", *, out: Any = None,
        async_op: bool = False, timeout: float | None = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Reduce elementwise over all ranks; only the root gets the result. Other ranks' `x` is unchanged and returned."""
        self._check_rank("root", root)
        mine = self.rank == root
        src = array.view(x, output=mine and out is None)
        how = reduction_on(op, src.dtype)
        dst = None
        if mine:
            dst = src if out is None and not src.immutable else self._output(src, out, None, src.count)
        call = CollectiveRequest(OpCode.REDUCE, src, dst, src.dtype, how, count=src.count, root=root)
        return self._call(call, async_op, timeout, stream)

    def reduce_scatter(
        self, x: Any, op: Op = "sum", *, out: Any = None, counts: Sequence[int] | None = None,
        async_op: bool = False, timeout: float | None = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Reduce elementwise over all ranks, and give rank i the i-th block of rows.

        Args:
            x: `sum(counts)` rows along axis 0; without `counts` their number must be a multiple of `size`.
            out: this rank's block; allocated by default.
            counts: rows per rank; by default equal.
        """
        src, given = array.view(x), None if out is None else array.view(out, output=True)
        key = _key(_REDUCE_SCATTER, op, src, given, async_op or counts is not None)
        seconds = self.timeout if timeout is None else checked(timeout)
        if key and given and self.collectives.again(key, src, given, seconds, stream):
            return given.array
        how = reduction_on(op, src.dtype)
        rows, elements = blocks(src, counts, self.size, self.rank)
        dst = self._output(src, given, rows, elements[self.rank])
        call = CollectiveRequest(
            _REDUCE_SCATTER, src, dst, src.dtype, how, counts=elements, uneven=counts is not None, key=key
        )
        return self._call(call, async_op, timeout, stream)

    def all_gather(
        self, x: Any, *, out: Any = None, counts: Sequence[int] | None = None,
        async_op: bool = False, timeout: float | None = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Concatenate the blocks of all ranks along axis 0, on every rank.

        Args:
            x: this rank's block, `counts[rank]` rows. A scalar counts as one row.
            out: output for all rows; allocated by default.
            counts: rows per rank; by default equal.
        """
        src, given = array.view(x), None if out is None else array.view(out, output=True)
        key = _key(_ALL_GATHER, None, src, given, async_op or counts is not None)
        seconds = self.timeout if timeout is None else checked(timeout)
        if key and given and self.collectives.again(key, src, given, seconds, stream):
            return given.array
        rows, elements = own_block(src, counts, self.size, self.rank)
        dst = self._output(src, given, rows, sum(elements))
        call = CollectiveRequest(_ALL_GATHER, src, dst, src.dtype, counts=elements, uneven=counts is not None, key=key)
        return self._call(call, async_op, timeout, stream)

    def gather(
        self, x: Any, root: int = 0, *, out: Any = None, counts: Sequence[int] | None = None,
        async_op: bool = False, timeout: float | None = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Concatenate the blocks of all ranks along axis 0 on the root; None elsewhere. Arguments as in `all_gather`."""
        self._check_rank("root", root)
        src = array.view(x)
        rows, elements = own_block(src, counts, self.size, self.rank)
        dst = self._output(src, out, rows, sum(elements)) if self.rank == root else None
        call = CollectiveRequest(
            OpCode.GATHER, src, dst, src.dtype, counts=elements, root=root, uneven=counts is not None
        )
        return self._call(call, async_op, timeout, stream)

    def scatter(
        self, x: Any, root: int = 0, *, out: Any = None, counts: Sequence[int] | None = None,
        async_op: bool = False, timeout: float | None = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Give rank i the i-th block of the root's rows.

        Args:
            x: all rows on the root; on other ranks None, or an array that defines shape and dtype if `out` is not given.
            out: this rank's block; required if `x` is None.
            counts: rows per rank, the same on all ranks; by default equal.
        """
        self._check_rank("root", root)
        mine = self.rank == root
        if x is None and (mine or out is None):
            raise ArgumentError("scatter: the root needs the array x, the other ranks need out (or x for its shape)")
        src = None if x is None else array.view(x)
        if src is not None:
            rows, elements = blocks(src, counts, self.size, self.rank)
            dst = self._output(src, out, rows, elements[self.rank])
        else:
            dst = array.view(out, output=True)
            _, elements = own_block(dst, counts, self.size, self.rank)
            dst = self._empty_like(dst, dst.shape) if dst.immutable else dst
        call = CollectiveRequest(
            OpCode.SCATTER, src if mine else None, dst, dst.dtype, counts=elements, root=root, uneven=counts is not None
        )  # fmt: skip
        return self._call(call, async_op, timeout, stream)

    def all_to_all(
        self, x: Any, *, out: Any = None, send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None, async_op: bool = False, timeout: float | None = None,
        stream: Any = None,
    ) -> Any:  # fmt: skip
        """Send the i-th block of rows to rank i, and receive one block from each rank, in rank order.

        Args:
            x: `sum(send_counts)` rows along axis 0.
            out: `sum(recv_counts)` rows; allocated by default. Must not overlap `x`.
            send_counts, recv_counts: rows for and from each rank; by default equal. Give both or neither.
        """
        if (send_counts is None) != (recv_counts is None):
            raise ArgumentError("all_to_all: give both send_counts and recv_counts, or neither")
        src, given = array.view(x), None if out is None else array.view(out, output=True)
        special = async_op or send_counts is not None or (given is not None and given.address == src.address)
        key = _key(_ALL_TO_ALL, None, src, given, special)
        seconds = self.timeout if timeout is None else checked(timeout)
        if key and given and self.collectives.again(key, src, given, seconds, stream):
            return given.array
        _, elements = blocks(src, send_counts, self.size, self.rank)
        rows, back = src.shape[0], elements
        if recv_counts is not None:
            counts = whole("recv_counts", recv_counts)
            if len(counts) != self.size or min(counts) < 0:
                raise ArgumentError(f"recv_counts {counts}: expected {self.size} numbers of rows")
            rows, back = sum(counts), in_elements(counts, src.shape)
        dst = self._output(src, given, rows, sum(back))
        if dst.address == src.address and src.nbytes:
            raise ArrayError("all_to_all: out must not be x; omit it or pass another array")
        uneven = send_counts is not None
        call = CollectiveRequest(
            _ALL_TO_ALL, src, dst, src.dtype, counts=elements, recv_counts=back, uneven=uneven, key=key
        )
        return self._call(call, async_op, timeout, stream)

    def barrier(self, *, async_op: bool = False, timeout: float | None = None, stream: Any = None) -> Work | None:
        """Wait until every rank has called this."""
        token = self.collectives.token()
        call = CollectiveRequest(OpCode.BARRIER, token, token, UINT8, Reduction(ReduceOp.MAX), count=1)
        result = self._call(call, async_op, timeout, stream)
        return result if async_op else None

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

    def _call(self, call: CollectiveRequest, async_op: bool, timeout: float | None, stream: Any) -> Any:
        call.deadline = Deadline(monotonic() + (self.timeout if timeout is None else checked(timeout)))
        if stream is not None:
            call.stream = array.stream_handle(stream)
        return self.collectives.start(call) if async_op else self.collectives.run(call)

    def _check_rank(self, what: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ArgumentError(f"{what} {rank}: ranks of this communicator go from 0 to {self.size - 1}")

    def _empty_like(self, x: ArrayView, shape: tuple[int, ...]) -> ArrayView:
        return array.empty_like(x, shape, self._context.device.empty)

    def _output(self, src: ArrayView, out: Any, rows: int | None, count: int) -> ArrayView:
        """The output array, with the shape of the input except for the number of rows, if `rows` is given."""
        dst = None if out is None else array.view(out, output=True)
        if dst is not None and dst.dtype is src.dtype and dst.count == count:
            return self._empty_like(dst, dst.shape) if dst.immutable else dst
        shape = src.shape if rows is None else (rows, *src.shape[1:])
        if dst is not None:
            raise ArrayError(f"out has {dst.count} x {dst.dtype}, needed are {count} x {src.dtype} (shape {shape})")
        return self._empty_like(src, shape)


def _key(op: OpCode, how: object, src: ArrayView, dst: ArrayView | None, special: bool) -> Key | None:
    """Key of a repeated collective for the compiled call; None if it is asynchronous, uneven, or allocates its output."""
    if special or dst is None:
        return None
    kind = src.kind or _host_kind(src)
    other = 0 if dst is src else dst.kind or _host_kind(dst)
    return (op, how, kind, other) if kind and other is not None else None


def _host_kind(x: ArrayView) -> tuple[int, tuple[int, ...]] | None:
    """The same as `ArrayView.kind` for an array in host memory that can be filled."""
    return (x.dtype.code, x.shape) if x.device == "host" and not x.immutable else None
