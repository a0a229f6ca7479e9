"""The lower-case operations: Python objects, with pickle. Messages are matched like those of buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from xvcomm.adapters.mpi.messages import ANY_SOURCE, ANY_TAG, scratch
from xvcomm.adapters.mpi.ops import SUM, Op
from xvcomm.adapters.mpi.part import Part
from xvcomm.adapters.mpi.pointtopoint import NOTHING, PROC_NULL, Message, PointToPoint, unpickled
from xvcomm.adapters.mpi.requests import Both, Done, Receiving, Request, Sending, Started
from xvcomm.adapters.mpi.status import Status
from xvcomm.comm.objects import cut, pickled
from xvcomm.errors import ArgumentError


class Objects(PointToPoint):
    """Part of Comm. Convenient, not fast; safe because only ranks that know the job's secret take part."""

    _part: Part
    rank: int
    size: int

    def _posting(self, obj: Any, dest: int, tag: int, *, synchronous: bool = False) -> Started:
        if dest == PROC_NULL:
            return Done()
        send = self._matcher.send(pickled(obj), dest, tag, synchronous=synchronous)
        return Done() if send is None else Sending(send)

    def _fetching(self, source: int, tag: int, *, waits: bool = False) -> Started:
        if source == PROC_NULL:
            return Done(NOTHING)
        return Receiving(self._matcher, self._matcher.post(source, tag, scratch, waits=waits), unpickled)

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object."""
        self._posting(obj, dest, tag).finish()

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Start to send an object, which may be modified at once."""
        return Request(self._posting(obj, dest, tag))

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object without waiting for the receiver."""
        started = self._posting(obj, dest, tag)
        if isinstance(started, Sending):
            self._matcher.look_after(started.send)

    def ibsend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Like `bsend`; the request is complete at once."""
        self.bsend(obj, dest, tag)
        return Request(Done())

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object; blocks until it is matched by a receive."""
        self._posting(obj, dest, tag, synchronous=True).finish()

    def issend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Start an `ssend`; the object may be modified at once."""
        return Request(self._posting(obj, dest, tag, synchronous=True))

    def recv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Any:
        """Receive an object. `buf`, which mpi4py receives into, is ignored."""
        return Request(self._fetching(source, tag, waits=True)).wait(status)

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Start to receive an object; `Request.wait` returns it."""
        return Request(self._fetching(source, tag))

    def sendrecv(
        self, sendobj: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG, status: Status | None = None,
    ) -> Any:  # fmt: skip
        """Send an object and receive one."""
        receive = self._fetching(source, recvtag)
        return Request(Both(self._posting(sendobj, dest, sendtag), receive)).wait(status)

    def probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        return self.Probe(source, tag, status)

    def iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        return self.Iprobe(source, tag, status)

    def mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message:
        """See `Mprobe`."""
        return self.Mprobe(source, tag, status)

    def improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message | None:
        """See `Improbe`."""
        return self.Improbe(source, tag, status)

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self._part.run(self._part.comm.barrier)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Send the root's object to every rank."""
        return self._part.run(lambda: self._part.comm.broadcast_object(obj, root))

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return the list of all ranks' objects on the root; None elsewhere."""
        found: list[Any] | None = self._part.run(lambda: self._part.comm.gather_object(sendobj, root))
        return found

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Send the i-th of the root's objects to rank i."""
        return self._part.run(lambda: self._part.comm.scatter_object(sendobj, root))

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the list of all ranks' objects."""
        found: list[Any] = self._part.run(lambda: self._part.comm.all_gather_object(sendobj))
        return found

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Send the i-th object to rank i, and return the objects received from all ranks.

        Raises:
            ArgumentError: the number of objects differs from that of ranks.
        """
        if len(sendobj) != self.size:
            raise ArgumentError(f"alltoall: {len(sendobj)} objects; pass {self.size}, one a rank")
        parts = [pickled(obj) for obj in sendobj]

        def run() -> list[Any]:
            comm = self._part.comm
            lengths = comm.all_to_all(np.array([part.size for part in parts], np.int64)).tolist()
            counts = [part.size for part in parts]
            data = comm.all_to_all(np.concatenate(parts), send_counts=counts, recv_counts=lengths)
            return cut(data, lengths)

        found: list[Any] = self._part.run(run)
        return found

    def reduce(self, sendobj: Any, op: Op | Callable[[Any, Any], Any] = SUM, root: int = 0) -> Any:
        """Combine all ranks' objects in rank order; returns the result on the root, None elsewhere."""
        found = self.gather(sendobj, root)
        return None if found is None else reduce(op, found)

    def allreduce(self, sendobj: Any, op: Op | Callable[[Any, Any], Any] = SUM) -> Any:
        """Combine all ranks' objects in rank order."""
        return reduce(op, self.allgather(sendobj))

    def scan(self, sendobj: Any, op: Op | Callable[[Any, Any], Any] = SUM) -> Any:
        """Combine the objects of the ranks up to this one."""
        return reduce(op, self.allgather(sendobj)[: self.rank + 1])

    def exscan(self, sendobj: Any, op: Op | Callable[[Any, Any], Any] = SUM) -> Any:
        """Combine the objects of the ranks before this one; None on rank 0."""
        before = self.allgather(sendobj)[: self.rank]
        return reduce(op, before) if before else None
