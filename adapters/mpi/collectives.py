"""The upper-case collectives, blocking and non-blocking. Buffers are those of `buffers`, reductions those of `ops`.

As in MPI, all ranks of a communicator call them in the same order. Types and lengths must be equal on all ranks, otherwise they
raise MismatchError.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

from xvcomm.adapters.mpi.part import Part
from xvcomm.adapters.mpi.plans import Plan, Plans
from xvcomm.adapters.mpi.requests import Queued, Request

_Arguments = ParamSpec("_Arguments")


def _both(
    plan: Callable[Concatenate[Plans, _Arguments], Plan],
) -> tuple[
    Callable[Concatenate[Collectives, _Arguments], None], Callable[Concatenate[Collectives, _Arguments], Request]
]:
    """The method that runs a plan, and the one that starts it without waiting."""

    @wraps(plan)
    def run(self: Collectives, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        part = self._part
        part.run(plan(Plans(part.comm), *args, **kwargs))

    @wraps(plan)
    def start(self: Collectives, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Request:
        part = self._part
        return Request(Queued(part.start(plan(Plans(part.comm), *args, **kwargs))))

    return run, start


class Collectives:
    """Part of Comm. Arguments are those of the plans."""

    _part: Part

    Barrier, Ibarrier = _both(Plans.barrier)
    Bcast, Ibcast = _both(Plans.bcast)
    Gather, Igather = _both(Plans.gather)
    Gatherv, Igatherv = _both(Plans.gatherv)
    Scatter, Iscatter = _both(Plans.scatter)
    Scatterv, Iscatterv = _both(Plans.scatterv)
    Allgather, Iallgather = _both(Plans.allgather)
    Allgatherv, Iallgatherv = _both(Plans.allgatherv)
    Alltoall, Ialltoall = _both(Plans.alltoall)
    Alltoallv, Ialltoallv = _both(Plans.alltoallv)
    Reduce, Ireduce = _both(Plans.reduce)
    Allreduce, Iallreduce = _both(Plans.allreduce)
    Reduce_scatter_block, Ireduce_scatter_block = _both(Plans.reduce_scatter_block)
    Reduce_scatter, Ireduce_scatter = _both(Plans.reduce_scatter)
    Scan, Iscan = _both(Plans.scan)
    Exscan, Iexscan = _both(Plans.exscan)
