"""Operations on Python objects, with pickle: safe because only ranks that know the job's secret take part."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xvcomm.engine.staging import Staging
from xvcomm.errors import ArgumentError
from xvcomm.types.dtype import INT64, UINT8

Array = NDArray[Any]


class Objects:
    """Part of Communicator. Convenient, not fast: every object is pickled, and its length is sent first."""

    rank: int
    size: int
    send: Any
    recv: Any
    broadcast: Any
    all_gather: Any
    gather: Any
    scatter: Any
    _staging: Staging

    def send_object(self, obj: Any, dst: int, tag: int = 0, *, channel: int = 0, timeout: float | None = None) -> None:
        """Send a picklable object to rank `dst`, as two messages: its length and its bytes."""
        data, up = pickled(obj), self._staging.up
        self.send(up(np.array([data.size], np.int64)), dst, tag, channel=channel, timeout=timeout)
        self.send(up(data), dst, tag, channel=channel, timeout=timeout)

    def recv_object(self, src: int, tag: int = 0, *, channel: int = 0, timeout: float | None = None) -> Any:
        """Receive an object from rank `src`; blocks until it has arrived."""
        empty, down = self._staging.empty, self._staging.down
        length = down(self.recv(empty((1,), INT64), src, tag, channel=channel, timeout=timeout))
        room = empty((int(length[0]),), UINT8)
        return _unpickled(down(self.recv(room, src, tag, channel=channel, timeout=timeout)))

    def broadcast_object(self, obj: Any = None, root: int = 0, *, timeout: float | None = None) -> Any:
        """Send the root's object to every rank; the other ranks' `obj` is ignored."""
        up, down = self._staging.up, self._staging.down
        data = pickled(obj) if self.rank == root else np.empty(0, np.uint8)
        length = down(self.broadcast(up(np.array([data.size], np.int64)), root, timeout=timeout))
        room = up(data) if self.rank == root else self._staging.empty((int(length[0]),), UINT8)
        return _unpickled(down(self.broadcast(room, root, timeout=timeout)))

    def all_gather_object(self, obj: Any, *, timeout: float | None = None) -> list[Any]:
        """Return the list of all ranks' objects, in rank order."""
        data, counts = gather_bytes(self, pickled(obj), None, timeout)
        return cut(data, counts)

    def gather_object(self, obj: Any, root: int = 0, *, timeout: float | None = None) -> list[Any] | None:
        """Return the list of all ranks' objects, in rank order, on the root; None elsewhere."""
        data, counts = gather_bytes(self, pickled(obj), root, timeout)
        return cut(data, counts) if self.rank == root else None

    def scatter_object(self, objs: Sequence[Any] | None = None, root: int = 0, *, timeout: float | None = None) -> Any:
        """Send the i-th of the root's objects to rank i; the other ranks' `objs` is ignored."""
        parts = [np.empty(0, np.uint8)] * self.size
        if self.rank == root:
            if objs is None or len(objs) != self.size:
                raise ArgumentError(f"scatter_object: the root must pass {self.size} objects, one per rank")
            parts = [pickled(o) for o in objs]
        up, down = self._staging.up, self._staging.down
        sizes = up(np.array([p.size for p in parts], np.int64))
        counts = down(self.broadcast(sizes, root, timeout=timeout)).tolist()
        everything = up(np.concatenate(parts)) if self.rank == root else None
        mine = self._staging.empty((counts[self.rank],), UINT8)
        return _unpickled(down(self.scatter(everything, root, out=mine, counts=counts, timeout=timeout)))


def gather_bytes(comm: Objects, data: Array, root: int | None, timeout: float | None) -> tuple[Array, list[int]]:
    """Concatenate the bytes of all ranks, on the root or (None) on every rank; returns them with each rank's count."""
    staging = comm._staging
    up, down, empty = staging.up, staging.down, staging.empty
    sizes = comm.all_gather(up(np.array([data.size], np.int64)), out=empty((comm.size,), INT64), timeout=timeout)
    counts = down(sizes).tolist()
    if root is None:
        return down(comm.all_gather(up(data), out=empty((sum(counts),), UINT8), counts=counts, timeout=timeout)), counts
    room = empty((sum(counts),), UINT8) if comm.rank == root else None
    comm.gather(up(data), root, out=room, counts=counts, timeout=timeout)
    return (data if room is None else down(room)), counts


def pickled(obj: Any) -> Array:
    """An object as bytes."""
    return np.frombuffer(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)


def _unpickled(data: Array) -> Any:
    return pickle.loads(data.tobytes())


def cut(data: Array, counts: list[int]) -> list[Any]:
    """The objects of all ranks, from their bytes."""
    ends = np.cumsum(counts)
    return [_unpickled(data[end - count : end]) for end, count in zip(ends, counts, strict=True)]
