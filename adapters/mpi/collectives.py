"""The upper-case collectives, blocking and not. Buffers are those of `buffers`; reductions those of `ops`.

As in MPI, all ranks of a communicator call them in the same order. Equal types and lengths are checked: ranks that
differ raise MismatchError.
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
        """Wait for all ranks."""
        self._run(self._plans.barrier())

    def Ibarrier(self) -> Request:
        """`Barrier` without waiting."""
        return self._begin(self._plans.barrier())

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Give every rank the root's buffer."""
        self._run(self._plans.bcast(buf, root))

    def Ibcast(self, buf: Any, root: int = 0) -> Request:
        """`Bcast` without waiting."""
        return self._begin(self._plans.bcast(buf, root))

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Give the root equal blocks of all ranks."""
        self._run(self._plans.gather(sendbuf, recvbuf, root))

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """`Gather` without waiting."""
        return self._begin(self._plans.gather(sendbuf, recvbuf, root))

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Give the root blocks of any length; it alone says how long, and where they go."""
        self._run(self._plans.gatherv(sendbuf, recvbuf, root))

    def Igatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """`Gatherv` without waiting."""
        return self._begin(self._plans.gatherv(sendbuf, recvbuf, root))

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Give every rank an equal block of the root's buffer."""
        self._run(self._plans.scatter(sendbuf, recvbuf, root))

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """`Scatter` without waiting."""
        return self._begin(self._plans.scatter(sendbuf, recvbuf, root))

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Give every rank a block of any length; the root alone says how long, and where they lie."""
        self._run(self._plans.scatterv(sendbuf, recvbuf, root))

    def Iscatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """`Scatterv` without waiting."""
        return self._begin(self._plans.scatterv(sendbuf, recvbuf, root))

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Give every rank equal blocks of all."""
        self._run(self._plans.allgather(sendbuf, recvbuf))

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """`Allgather` without waiting."""
        return self._begin(self._plans.allgather(sendbuf, recvbuf))

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Give every rank blocks of any length of all."""
        self._run(self._plans.allgatherv(sendbuf, recvbuf))

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """`Allgatherv` without waiting."""
        return self._begin(self._plans.allgatherv(sendbuf, recvbuf))

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Give every rank an equal block of each."""
        self._run(self._plans.alltoall(sendbuf, recvbuf))

    def Ialltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        """`Alltoall` without waiting."""
        return self._begin(self._plans.alltoall(sendbuf, recvbuf))

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Give every rank a block of any length of each."""
        self._run(self._plans.alltoallv(sendbuf, recvbuf))

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """`Alltoallv` without waiting."""
        return self._begin(self._plans.alltoallv(sendbuf, recvbuf))

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> None:
        """Reduce over all ranks; the root gets the result."""
        self._run(self._plans.reduce(sendbuf, recvbuf, op, root))

    def Ireduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Request:
        """`Reduce` without waiting."""
        return self._begin(self._plans.reduce(sendbuf, recvbuf, op, root))

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Reduce over all ranks; every rank gets the same bits."""
        self._run(self._plans.allreduce(sendbuf, recvbuf, op))

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """`Allreduce` without waiting."""
        return self._begin(self._plans.allreduce(sendbuf, recvbuf, op))

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Reduce over all ranks, and give every rank an equal block."""
        self._run(self._plans.reduce_scatter_block(sendbuf, recvbuf, op))

    def Ireduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """`Reduce_scatter_block` without waiting."""
        return self._begin(self._plans.reduce_scatter_block(sendbuf, recvbuf, op))

    def Reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM) -> None:
        """Reduce over all ranks, and give every rank a block of any length."""
        self._run(self._plans.reduce_scatter(sendbuf, recvbuf, recvcounts, op))

    def Ireduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM
    ) -> Request:
        """`Reduce_scatter` without waiting."""
        return self._begin(self._plans.reduce_scatter(sendbuf, recvbuf, recvcounts, op))

    def Scan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Reduce over the ranks up to this one. Gathers the buffers of all on every rank: for small ones."""
        self._run(self._plans.scan(sendbuf, recvbuf, op, inclusive=True))

    def Iscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """`Scan` without waiting."""
        return self._begin(self._plans.scan(sendbuf, recvbuf, op, inclusive=True))

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Reduce over the ranks before this one; rank 0's buffer stays as it is. Gathers as `Scan` does."""
        self._run(self._plans.scan(sendbuf, recvbuf, op, inclusive=False))

    def Iexscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """`Exscan` without waiting."""
        return self._begin(self._plans.scan(sendbuf, recvbuf, op, inclusive=False))
