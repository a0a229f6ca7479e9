"""The upper-case collectives, blocking and non-blocking. Buffers are those of `buffers`, reductions those of `ops`.

As in MPI, all ranks of a communicator call them in the same order. Types and lengths must be equal on all ranks, otherwise they
raise MismatchError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xvcomm.adapters.mpi.ops import NAMED, Op
from xvcomm.adapters.mpi.part import Part
from xvcomm.adapters.mpi.plans import Plan, Plans
from xvcomm.adapters.mpi.requests import Queued, Request

SUM = NAMED["SUM"]


class Collectives:
    """Part of Comm."""

    _part: Part

    @property
    def _plans(self) -> Plans:
        return Plans(self._part.comm)

    def _run(self, plan: Plan) -> None:
        self._part.run(plan)

    def _begin(self, plan: Plan) -> Request:
        return Request(Queued(self._part.start(plan)))

    def Barrier(self) -> None:
        """Wait until all ranks have called this."""
        self._run(self._plans.barrier())

    def Ibarrier(self) -> Request:
        """`Barrier` without waiting."""
        return self._begin(self._plans.barrier())

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Copy the root's buffer to every rank."""
        self._run(self._plans.bcast(buf, root))

    def Ibcast(self, buf: Any, root: int = 0) -> Request:
        """`Bcast` without waiting."""
        return self._begin(self._plans.bcast(buf, root))

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Concatenate equal blocks of all ranks on the root."""
        self._run(self._plans.gather(sendbuf, recvbuf, root))

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """`Gather` without waiting."""
        return self._begin(self._plans.gather(sendbuf, recvbuf, root))

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Gather blocks of different length on the root, which alone passes counts and displacements."""
        self._run(self._plans.gatherv(sendbuf, recvbuf, root))

    def Igatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """`Gatherv` without waiting."""
        return self._begin(self._plans.gatherv(sendbuf, recvbuf, root))

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Send an equal block of the root's buffer to every rank."""
        self._run(self._plans.scatter(sendbuf, recvbuf, root))

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """`Scatter` without waiting."""
        return self._begin(self._plans.scatter(sendbuf, recvbuf, root))

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Send a block of different length to every rank; only the root passes counts and displacements."""
        self._run(self._plans.scatterv(sendbuf, recvbuf, root))

    def Iscatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """`Scatterv` without waiting."""
        return self._begin(self._plans.scatterv(sendbuf, recvbuf, root))

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Concatenate equal blocks of all ranks on every rank."""
        self._run(self._plans.allgather(sendbuf, recvbuf))

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """`Allgather` without waiting."""
        return self._begin(self._plans.allgather(sendbuf, recvbuf))

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Gather blocks of different length of all ranks on every rank."""
        self._run(self._plans.allgatherv(sendbuf, recvbuf))

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """`Allgatherv` without waiting."""
        return self._begin(self._plans.allgatherv(sendbuf, recvbuf))

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send an equal block to every rank, and receive one from each."""
        self._run(self._plans.alltoall(sendbuf, recvbuf))

    def Ialltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        """`Alltoall` without waiting."""
        return self._begin(self._plans.alltoall(sendbuf, recvbuf))

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send a block of different length to every rank, and receive one from each."""
        self._run(self._plans.alltoallv(sendbuf, recvbuf))

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """`Alltoallv` without waiting."""
        return self._begin(self._plans.alltoallv(sendbuf, recvbuf))

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> None:
        """Reduce over all ranks; only the root gets the result."""
        self._run(self._plans.reduce(sendbuf, recvbuf, op, root))

    def Ireduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Request:
        """`Reduce` without waiting."""
        return self._begin(self._plans.reduce(sendbuf, recvbuf, op, root))

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Reduce over all ranks; every rank gets bitwise equal results."""
        self._run(self._plans.allreduce(sendbuf, recvbuf, op))

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """`Allreduce` without waiting."""
        return self._begin(self._plans.allreduce(sendbuf, recvbuf, op))

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Reduce over all ranks, and give every rank an equal block of the result."""
        self._run(self._plans.reduce_scatter_block(sendbuf, recvbuf, op))

    def Ireduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """`Reduce_scatter_block` without waiting."""
        return self._begin(self._plans.reduce_scatter_block(sendbuf, recvbuf, op))

    def Reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM) -> None:
        """Reduce over all ranks, and give every rank a block of different length."""
        self._run(self._plans.reduce_scatter(sendbuf, recvbuf, recvcounts, op))

    def Ireduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM
    ) -> Request:
        """`Reduce_scatter` without waiting."""
        return self._begin(self._plans.reduce_scatter(sendbuf, recvbuf, recvcounts, op))

    def Scan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Reduce over the ranks up to this one. Gathers all buffers on every rank, so it is meant for small ones."""
        self._run(self._plans.scan(sendbuf, recvbuf, op, inclusive=True))

    def Iscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """`Scan` without waiting."""
        return self._begin(self._plans.scan(sendbuf, recvbuf, op, inclusive=True))

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Reduce over the ranks before this one; rank 0's buffer is unchanged. Gathers all buffers like `Scan`."""
        self._run(self._plans.scan(sendbuf, recvbuf, op, inclusive=False))

    def Iexscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """`Exscan` without waiting."""
        return self._begin(self._plans.scan(sendbuf, recvbuf, op, inclusive=False))
