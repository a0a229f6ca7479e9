"""The methods of `cupyx.distributed.NCCLBackend`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from xvcomm.adapters.cupy.joining import HOST, PORT, join
from xvcomm.adapters.cupy.sparse import Parts, is_sparse
from xvcomm.adapters.cupy.streams import Kept, external
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import ArgumentError, ArrayError
from xvcomm.memory import array

_OPS = ("sum", "prod", "max", "min")


def init_process_group(
    n_devices: int, rank: int, *, backend: str = "nccl", host: str | None = None, port: int | None = None,
    use_mpi: bool = False,
) -> NCCLBackend:  # fmt: skip
    """Join the job like `cupyx.distributed.init_process_group`; blocks until all ranks have joined.

    Args:
        n_devices: number of ranks.
        rank: of this process. Its GPU is CuPy's current one.
        backend: `"nccl"`; within an island of NVIDIA GPUs, NCCL is used.
        host, port: address of rank 0's store; by default `CUPYX_DISTRIBUTED_HOST` and `CUPYX_DISTRIBUTED_PORT`.
        use_mpi: use mpi4py's COMM_WORLD for the rendezvous instead.

    Raises:
        ArgumentError: rank or number of ranks are out of range; another backend.
        ConfigError: `host` is another host, and `XVCOMM_SECRET` is not set.
        DeadlineExceeded: names the ranks that did not join.
    """
    if n_devices <= 0 or not 0 <= rank < n_devices:
        raise ArgumentError(f"rank {rank} of {n_devices} devices: ranks go from 0 to n_devices - 1")
    if backend != "nccl":
        raise ArgumentError(f"backend {backend!r}: the only one is 'nccl'")
    host = host or os.environ.get("CUPYX_DISTRIBUTED_HOST", HOST)
    port = port or int(os.environ.get("CUPYX_DISTRIBUTED_PORT", PORT))
    return NCCLBackend(n_devices, rank, host, port, use_mpi)


class NCCLBackend:
    """The methods of `cupyx.distributed.NCCLBackend` over a Communicator, `communicator`.

    Arrays are treated as plain memory: contiguous in C or Fortran order, on this rank's device. An operation is ordered on
    `stream`, by default CuPy's current stream, and the host does not wait. Arrays of a call on another stream are kept alive
    until that stream has completed it, so that CuPy's pool does not reuse their memory too early.

    Sparse matrices are exchanged in parts, for which the host waits; results replace the parts of the output matrices.
    """

    def __init__(self, n_devices: int, rank: int, host: str = HOST, port: int = PORT, use_mpi: bool = False) -> None:
        self._begin(join(n_devices, rank, host, port, use_mpi))

    @classmethod
    def over(cls, communicator: Communicator) -> NCCLBackend:
        """The same methods over an existing Communicator; `stop` closes it."""
        made = cls.__new__(cls)
        made._begin(communicator)
        return made

    def _begin(self, communicator: Communicator) -> None:
        self.communicator, self.rank, self._n_devices = communicator, communicator.rank, communicator.size
        self._kept = Kept(communicator.device != "host")

    def all_reduce(self, in_array: Any, out_array: Any, op: str = "sum", stream: Any = None) -> None:
        """Reduce over all ranks; every rank gets the result. `out_array` may be `in_array`."""
        _check_op(op)
        if is_sparse(in_array):
            self.reduce(in_array, out_array, 0, op, stream)
            self.broadcast(out_array, 0, stream)
            return
        x, out = _flat(in_array), _flat(out_array)
        self.communicator.all_reduce(x, op, out=out, stream=stream)
        self._kept.add(stream, x, out)

    def reduce(self, in_array: Any, out_array: Any, root: int = 0, op: str = "sum", stream: Any = None) -> None:
        """Reduce over all ranks; only the root gets the result. Elsewhere `out_array` is unchanged and may be None."""
        _check_op(op)
        if is_sparse(in_array):
            self._reduce_sparse(in_array, out_array, root, op, stream)
            return
        x, out = _flat(in_array), _flat(out_array) if self.rank == root else None
        self.communicator.reduce(x, root, op, out=out, stream=stream)
        self._kept.add(stream, x, out)

    def broadcast(self, in_out_array: Any, root: int = 0, stream: Any = None) -> None:
        """Copy the root's array to every rank."""
        if is_sparse(in_out_array):
            mine = Parts.of(in_out_array)
            told = self.communicator.broadcast_object(mine.told if self.rank == root else None, root)
            parts = mine if self.rank == root else told.room(in_out_array)
            for part in parts.arrays:
                self.broadcast(part, root, stream)
            parts.assign(in_out_array)
            return
        x = _flat(in_out_array)
        self.communicator.broadcast(x, root, stream=stream)
        self._kept.add(stream, x)

    def reduce_scatter(self, in_array: Any, out_array: Any, count: int, op: str = "sum", stream: Any = None) -> None:
        """Reduce over all ranks, and give rank i the i-th `count` elements; with sparse matrices, the i-th of a list."""
        _check_op(op)
        if is_sparse(in_array):
            self._check_list("reduce_scatter", in_array)
            for root, matrix in enumerate(in_array):
                self._reduce_sparse(matrix, out_array, root, op, stream)
            return
        x, out = _flat(in_array)[: count * self._n_devices], _flat(out_array)[:count]
        apart = not _overlap(x, out)
        result = self.communicator.reduce_scatter(x, op, out=out if apart else None, stream=stream)
        self._kept.add(stream, x, out, result)
        if not apart:
            self._copy(out, result, stream)

    def all_gather(self, in_array: Any, out_array: Any, count: int, stream: Any = None) -> None:
        """Gather `count` elements of each rank on every rank; sparse matrices are appended to the list `out_array`."""
        if is_sparse(in_array):
            mine = Parts.of(in_array)
            for root, told in enumerate(self.communicator.all_gather_object(mine.told)):
                parts = mine if root == self.rank else told.room(in_array)
                for part in parts.arrays:
                    self.broadcast(part, root, stream)
                out_array.append(parts.matrix(in_array))
            return
        x, out = _flat(in_array)[:count], _flat(out_array)[: count * self._n_devices]
        if _overlap(x, out):
            with self._on(stream):
                x = x.copy()
        self.communicator.all_gather(x, out=out, stream=stream)
        self._kept.add(stream, x, out)

    def send(self, array: Any, peer: int, stream: Any = None) -> None:
        """Send to a rank."""
        if is_sparse(array):
            parts = Parts.of(array)
            self.communicator.send_object(parts.told, peer)
            self._exchange([(part, peer) for part in parts.arrays], [], stream)
            return
        x = _flat(array)
        self.communicator.send(x, peer, stream=stream)
        self._kept.add(stream, x)

    def recv(self, out_array: Any, peer: int, stream: Any = None) -> None:
        """Receive from a rank."""
        if is_sparse(out_array):
            parts = self.communicator.recv_object(peer).room(out_array)
            self._exchange([], [(part, peer) for part in parts.arrays], stream)
            parts.assign(out_array)
            return
        x = _flat(out_array)
        self.communicator.recv(x, peer, stream=stream)
        self._kept.add(stream, x)

    def send_recv(self, in_array: Any, out_array: Any, peer: int, stream: Any = None) -> None:
        """Send to a rank and receive from it; it may be this rank."""
        if is_sparse(in_array):
            mine = Parts.of(in_array)
            told = mine.told
            if peer != self.rank:
                self.communicator.send_object(told, peer)
                told = self.communicator.recv_object(peer)
            parts = told.room(out_array)
            pairs = zip(mine.arrays, parts.arrays, strict=True)
            for part, room in pairs:
                self.send_recv(part, room, peer, stream)
            parts.assign(out_array)
            return
        self._exchange([(_flat(in_array), peer)], [(_flat(out_array), peer)], stream)

    def scatter(self, in_array: Any, out_array: Any, root: int = 0, stream: Any = None) -> None:
        """Give rank i the i-th row of the root's array, or the i-th of its sparse matrices."""
        if is_sparse(out_array):
            mine = [Parts.of(matrix) for matrix in in_array] if self.rank == root else []
            told = self.communicator.scatter_object([parts.told for parts in mine] if mine else None, root)
            parts = mine[root] if mine else told.room(out_array)
            sends = [(a, peer) for peer, p in enumerate(mine) if peer != root for a in p.arrays]
            self._exchange(sends, [] if mine else [(a, root) for a in parts.arrays], stream)
            parts.assign(out_array)
            return
        out = _flat(out_array)
        x = self._rows("scatter", in_array) if self.rank == root else None
        self.communicator.scatter(x, root, out=out, stream=stream)
        self._kept.add(stream, x, out)

    def gather(self, in_array: Any, out_array: Any, root: int = 0, stream: Any = None) -> None:
        """Gather all arrays on the root, as rows of `out_array`; sparse matrices are appended to it, a list."""
        if is_sparse(in_array):
            self._gather_sparse(in_array, out_array, root, stream)
            return
        x = _flat(in_array)
        out = self._rows("gather", out_array) if self.rank == root else None
        self.communicator.gather(x, root, out=out, stream=stream)
        self._kept.add(stream, x, out)

    def all_to_all(self, in_array: Any, out_array: Any, stream: Any = None) -> None:
        """Give rank i the i-th row of every rank's array, or the i-th of its sparse matrices."""
        if is_sparse(in_array):
            self._check_list("all_to_all", in_array)
            mine = [Parts.of(matrix) for matrix in in_array]
            everybodys = self.communicator.all_gather_object([parts.told for parts in mine])
            rooms = [told[self.rank].room(model) for told, model in zip(everybodys, in_array, strict=True)]
            rooms[self.rank] = mine[self.rank]
            others = [peer for peer in range(self._n_devices) if peer != self.rank]
            sends = [(a, peer) for peer in others for a in mine[peer].arrays]
            self._exchange(sends, [(a, peer) for peer in others for a in rooms[peer].arrays], stream)
            out_array.extend(parts.matrix(model) for parts, model in zip(rooms, in_array, strict=True))
            return
        x, out = self._rows("all_to_all", in_array), self._rows("all_to_all", out_array)
        self.communicator.all_to_all(x, out=out, stream=stream)
        self._kept.add(stream, x, out)

    def barrier(self) -> None:
        """Block the host until all ranks have called this."""
        self.communicator.barrier()

    def stop(self) -> None:
        """Close the communicator. Idempotent."""
        self.communicator.close()

    def _exchange(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]], stream: Any) -> None:
        """Send and receive concurrently. Messages of this rank to itself are copied, in order."""
        with self.communicator.group():
            for x, peer in sends:
                if peer != self.rank:
                    self.communicator.send(x, peer, stream=stream)
            for x, peer in recvs:
                if peer != self.rank:
                    self.communicator.recv(x, peer, stream=stream)
        sources = [x for x, peer in sends if peer == self.rank]
        for x, source in zip((x for x, peer in recvs if peer == self.rank), sources, strict=True):
            if (x.size, x.dtype) != (source.size, source.dtype):
                raise ArrayError(
                    f"{source.size} x {source.dtype} from this rank to itself, but the output has {x.size} x {x.dtype}"
                )
            self._copy(x, source, stream)
        self._kept.add(stream, *(x for x, _ in (*sends, *recvs)))

    def _copy(self, target: Any, source: Any, stream: Any) -> None:
        """Copy on the stream of an operation."""
        with self._on(stream):
            target[...] = source

    def _on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """A context manager in which CuPy uses the stream of an operation."""
        if stream is None or self.communicator.device == "host":
            return contextlib.nullcontext()
        found: contextlib.AbstractContextManager[Any] = external(stream)
        return found

    def _gather_sparse(self, in_matrix: Any, found: Any, root: int, stream: Any) -> None:
        mine = Parts.of(in_matrix)
        everybodys = self.communicator.gather_object(mine.told, root)
        if everybodys is None:
            self._exchange([(a, root) for a in mine.arrays], [], stream)
            return
        rooms = [mine if peer == root else told.room(in_matrix) for peer, told in enumerate(everybodys)]
        self._exchange([], [(a, peer) for peer, p in enumerate(rooms) if peer != root for a in p.arrays], stream)
        found.extend(parts.matrix(in_matrix) for parts in rooms)

    def _reduce_sparse(self, in_matrix: Any, out_matrix: Any, root: int, op: str, stream: Any) -> None:
        """Reduce in rank order. `prod` is `*`, as in cupyx: elementwise for sparse arrays, a product for sparse matrices."""
        if op not in ("sum", "prod"):
            raise ArgumentError(f"op {op!r}: sparse matrices support 'sum' and 'prod'")
        if self.rank == root and in_matrix.format != out_matrix.format:
            raise ArgumentError(
                f"in_array is {in_matrix.format}, out_array {out_matrix.format}; both must have the same format"
            )
        matrices: list[Any] = []
        self._gather_sparse(in_matrix, matrices, root, stream)
        if self.rank != root:
            return
        total = matrices[0]
        with self._on(stream):
            for matrix in matrices[1:]:
                total = total + matrix if op == "sum" else total * matrix
            Parts.of(total.asformat(out_matrix.format)).assign(out_matrix)

    def _rows(self, what: str, x: Any) -> Any:
        """An array with a row for each rank."""
        if not x.shape or x.shape[0] != self._n_devices:
            raise ArrayError(
                f"{what}: shape {x.shape}; the first dimension must be {self._n_devices}, one for each rank"
            )
        if not x.flags.c_contiguous:
            raise ArrayError(f"{what}: the array's rows must be contiguous; pass an array in C order")
        return x.reshape(-1)

    def _check_list(self, what: str, matrices: Any) -> None:
        if not isinstance(matrices, (list, tuple)) or len(matrices) != self._n_devices:
            raise ArgumentError(f"{what}: pass a list of {self._n_devices} sparse matrices, one for each rank")


def _check_op(op: str) -> None:
    if op not in _OPS:
        raise ArgumentError(f"op {op!r}: expected one of {', '.join(_OPS)}")


def _flat(x: Any) -> Any:
    """An array as a vector, in memory order.

    Raises:
        ArrayError: it is not contiguous.
    """
    if x.flags.c_contiguous:
        return x.reshape(-1)
    if x.flags.f_contiguous:
        return x.T.reshape(-1)
    raise ArrayError(f"array of shape {x.shape} and strides {x.strides} is not contiguous; pass a contiguous copy")


def _overlap(one: Any, other: Any) -> bool:
    a, b = array.view(one), array.view(other)
    return a.address < b.address + b.nbytes and b.address < a.address + a.nbytes
