"""Messages of a rank to itself, as in NCCL's groups: the second of the two calls copies.

Messages of one tag match in order, those of different tags in any order, as between ranks.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from xvcomm.adapters.torch.options import seconds
from xvcomm.adapters.torch.tensors import dense
from xvcomm.adapters.torch.works import HostWork, Work
from xvcomm.errors import ArgumentError, ArrayError, ClosedError

if TYPE_CHECKING:
    from xvcomm.adapters.torch.planes import Plane


class OwnWork(HostWork):
    """A message to or from this rank itself whose other end has not been called yet; waiting for it includes that.

    Args (of the constructor):
        future: completes with the Work of the copy.
        limit: default timeout of `wait` in seconds.
    """

    __slots__ = ("_limit",)

    def __init__(self, future: Future[Work], tensor: Tensor, what: str, source: int, limit: float) -> None:
        super().__init__(future, (tensor,), what, source)
        self._limit = limit

    def wait(self, timeout: Any = None) -> bool:
        """See `HostWork.wait`; on a GPU the current stream waits for the copy."""
        left = seconds(timeout)
        super().wait(self._limit if left is None else left)
        copied: Work = self._future.result()
        return bool(copied.wait() if left is None else copied.wait(left))

    def is_completed(self) -> bool:
        """Whether it is complete."""
        return self._future.done() and (self._future.exception() is not None or self._future.result().is_completed())


class _End(NamedTuple):
    """A call that waits for the other end."""

    sends: bool
    tensor: Tensor
    event: Any
    future: Future[Work]


class OwnMessages:
    """The messages of one plane to this rank itself. Thread-safe."""

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._waiting: dict[int, deque[_End]] = defaultdict(deque)  # of one tag either sends or receives

    def post(self, plane: Plane, tensor: Tensor, tag: int, *, sends: bool, waits: bool) -> Work:
        """Send a tensor to this rank itself, or receive it.

        Args:
            tensor: to send or to receive into.
            waits: whether the caller blocks, so that the other end must have been called before.

        Raises:
            ArrayError: the two tensors differ in length or dtype; both calls raise it, and the group remains usable.
            ArgumentError: the caller would deadlock.
        """
        plane.comm.check()
        dense(tensor, None)  # raises for tensors without plain memory
        rank, name = plane.comm.rank, "send" if sends else "recv"
        with self._gate:
            waiting = self._waiting[tag]
            other = waiting.popleft() if waiting and waiting[0].sends is not sends else None
            if other is None and not waits:
                end = _End(sends, tensor, plane.record_event(), Future())
                waiting.append(end)
            elif not waiting:
                del self._waiting[tag]
        if other is not None:
            return _copy(plane, other, tensor, f"{name} with rank {rank} itself")
        missing = "irecv" if sends else "isend"
        if waits:
            raise ArgumentError(
                f"{name} with rank {rank}, this rank itself, before its {missing} with tag {tag}: it would deadlock; "
                f"call {missing} first, or put both into one batch_isend_irecv"
            )
        what = f"i{name} with rank {rank}, this rank itself, which has not called {missing} with tag {tag}"
        return OwnWork(end.future, tensor, what, rank, plane.comm.timeout)

    def close(self) -> None:
        """Fail Works of messages whose other end was not called with ClosedError. Idempotent."""
        with self._gate:
            left = [end for ends in self._waiting.values() for end in ends]
            self._waiting.clear()
        for end in left:
            end.future.set_exception(
                ClosedError("a message of this rank to itself: the group was closed before its other end was called")
            )


def _copy(plane: Plane, first: _End, tensor: Tensor, what: str) -> Work:
    """Copy from the sent to the received tensor, in the second of the two calls; returns that call's Work."""
    rank = plane.comm.rank
    source, target = (first.tensor, tensor) if first.sends else (tensor, first.tensor)
    try:
        if (source.dtype, source.numel()) != (target.dtype, target.numel()):
            raise ArrayError(
                f"rank {rank} sends {source.numel()} x {source.dtype} to itself and receives {target.numel()} x "
                f"{target.dtype}; both must be the same"
            )
        plane.follow(first.event)
        with torch.no_grad():
            target.copy_(dense(source, None).view(target.shape))
        work = plane.over(tensor, what, rank, first.tensor)
        first.future.set_result(plane.over(first.tensor, what, rank, tensor))
    except BaseException as error:
        if not first.future.done():
            first.future.set_exception(error)
        raise
    return work
