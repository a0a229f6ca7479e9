"""NCCL through CuPy: direct calls on the default stream, without a process group. Shows the minimum cost of an NCCL call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from xvcomm.cli.bench.case import Buffers, Case, one_way, ping_pong
from xvcomm.cli.bench.measure import Meeting
from xvcomm.errors import BackendUnavailable


class CupyNccl:
    """`cupy.cuda.nccl`."""

    name = "nccl-cupy"
    communicates = True

    def __init__(self, meeting: Meeting) -> None:
        from cupy.cuda import nccl

        if not nccl.available:
            raise BackendUnavailable("peer nccl-cupy: this CuPy has no NCCL; install NVIDIA's NCCL package")
        self._nccl, self._rank, self._size = nccl, meeting.rank, meeting.size
        mine = nccl.get_unique_id() if meeting.rank == 0 else b""
        identity = meeting.exchange(list(mine))[0]
        self._comm = nccl.NcclCommunicator(meeting.size, bytes(identity), meeting.rank)

    def refuses(self, case: Case) -> str | None:
        """See `Contender.refuses`."""
        if case.op == "barrier":
            return "NCCL has no barrier"
        return None if self._dtype(case) is not None else f"NCCL has no {case.dtype}"

    def _dtype(self, case: Case) -> int | None:
        return getattr(self._nccl, f"NCCL_{case.dtype.name.upper()}", None)

    def bind(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        """See `Contender.bind`."""
        comm, nccl, rank, size = self._comm, self._nccl, self._rank, self._size
        src, dst = _address(buffers.src), _address(buffers.dst)
        block, kind, add, stream = case.block, self._dtype(case), nccl.NCCL_SUM, 0
        right, left = (rank + 1) % size, (rank - 1) % size

        def grouped(*calls: Callable[[], object]) -> Callable[[], None]:
            def together() -> None:
                nccl.groupStart()
                for call in calls:
                    call()
                nccl.groupEnd()

            return together

        def send(address: int, to: int = 1 - rank) -> None:
            comm.send(address, block, kind, to, stream)

        def recv(address: int, source: int = 1 - rank) -> None:
            comm.recv(address, block, kind, source, stream)

        step = case.block * case.dtype.itemsize
        blocks = [
            call for r in range(size) for call in (partial(send, src + r * step, r), partial(recv, dst + r * step, r))
        ]
        of_root = range(size if rank == 0 else 0)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: comm.allReduce(src, dst, block, kind, add, stream),
            "reduce": lambda: comm.reduce(src, dst, block, kind, add, 0, stream),
            "broadcast": lambda: comm.broadcast(src, dst, block, kind, 0, stream),
            "all_gather": lambda: comm.allGather(src, dst, block, kind, stream),
            "reduce_scatter": lambda: comm.reduceScatter(src, dst, block, kind, add, stream),
            "all_to_all": grouped(*blocks),
            "gather": grouped(partial(send, src, 0), *(partial(recv, dst + r * step, r) for r in of_root)),
            "scatter": grouped(*(partial(send, src + r * step, r) for r in of_root), partial(recv, dst, 0)),
            "sendrecv": grouped(partial(send, src, right), partial(recv, dst, left)),
            "send": one_way(rank, send, recv, src, dst),
            "p2p": ping_pong(rank, send, recv, src, dst),
        }
        return calls[case.op]

    def close(self) -> None:
        """Free the communicator."""
        self._comm.destroy()


def _address(array: Any) -> int:
    return int(array.data_ptr() if hasattr(array, "data_ptr") else array.data.ptr)
