"""Operations on Python objects, by pickle: only between ranks that proved the job's secret to each other."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from xvcomm.errors import ArgumentError


class Objects:
    """Part of Communicator. Convenient, not fast: every object is pickled and its length sent first."""

    rank: int
    size: int
    send: Any
    recv: Any
    broadcast: Any
    all_gather: Any
    gather: Any
    scatter: Any

    def send_object(self, obj: Any, dst: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Send a picklable object to rank `dst`."""
        data = _pickled(obj)
        self.send(np.array([data.size], np.int64), dst, tag, timeout=timeout)
        self.send(data, dst, tag, timeout=timeout)

    def recv_object(self, src: int, tag: int = 0, *, timeout: float | None = None) -> Any:
        """Receive an object from rank `src`; blocks until it is there."""
        length = self.recv(np.empty(1, np.int64), src, tag, timeout=timeout)
        return _unpickled(self.recv(np.empty(int(length[0]), np.uint8), src, tag, timeout=timeout))

    def broadcast_object(self, obj: Any = None, root: int = 0, *, timeout: float | None = None) -> Any:
        """Give every rank the root's object; what the others pass does not matter."""
        data = _pickled(obj) if self.rank == root else np.empty(0, np.uint8)
        length = self.broadcast(np.array([data.size], np.int64), root, timeout=timeout)
        if self.rank != root:
            data = np.empty(int(length[0]), np.uint8)
        return _unpickled(self.broadcast(data, root, timeout=timeout))

    def all_gather_object(self, obj: Any, *, timeout: float | None = None) -> list[Any]:
        """Give every rank the list of all ranks' objects, in rank order."""
        data = _pickled(obj)
        counts = self.all_gather(np.array([data.size], np.int64), timeout=timeout).tolist()
        return _cut(self.all_gather(data, counts=counts, timeout=timeout), counts)

    def gather_object(self, obj: Any, root: int = 0, *, timeout: float | None = None) -> list[Any] | None:
        """Give the root the list of all ranks' objects, in rank order; None elsewhere."""
        data = _pickled(obj)
        counts = self.all_gather(np.array([data.size], np.int64), timeout=timeout).tolist()
        gathered = self.gather(data, root, counts=counts, timeout=timeout)
        return _cut(gathered, counts) if self.rank == root else None

    def scatter_object(self, objs: Sequence[Any] | None = None, root: int = 0, *, timeout: float | None = None) -> Any:
        """Give rank i the i-th of the root's objects; what the others pass does not matter."""
        parts = [np.empty(0, np.uint8)] * self.size
        if self.rank == root:
            if objs is None or len(objs) != self.size:
                raise ArgumentError(f"scatter_object: the root must pass {self.size} objects, one a rank")
            parts = [_pickled(o) for o in objs]
        counts = self.broadcast(np.array([p.size for p in parts], np.int64), root, timeout=timeout).tolist()
        everything = np.concatenate(parts) if self.rank == root else None
        mine = np.empty(counts[self.rank], np.uint8)
        return _unpickled(self.scatter(everything, root, out=mine, counts=counts, timeout=timeout))


def _pickled(obj: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)


def _unpickled(data: np.ndarray[Any, Any]) -> Any:
    return pickle.loads(data.tobytes())


def _cut(data: np.ndarray[Any, Any], counts: list[int]) -> list[Any]:
    ends = np.cumsum(counts)
    return [_unpickled(data[end - count : end]) for end, count in zip(ends, counts, strict=True)]
