"""Messages of a rank to itself, as in NCCL's groups: the second of the two calls copies.

Messages of one tag match in order, those of different tags in any order, as between ranks.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from xvcomm.adapters.torch.options import seconds
from xvcomm.adapters.torch.tensors import dense
from xvcomm.adapters.torch.works import HostWork, Work
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import ArgumentError, ArrayError, ClosedError


class Carrier(Protocol):
    """What a message of a rank to itself needs of its plane."""

    comm: Communicator

    def record_event(self) -> Any:
        """An event for `follow`, recorded on the current stream."""

    def follow(self, event: Any) -> None:
        """Make the current stream wait for an event; raises the error that ended the communicator, if any."""

    def over(self, tensor: Tensor, what: str, source: int, used: Tensor) -> Work:
        """A Work for what the call has done itself, on the current stream if there are streams."""


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

    def post(self, carrier: Carrier, tensor: Tensor, tag: int, *, sends: bool, waits: bool) -> Work:
        """Send a tensor to this rank itself, or receive it.

        Args:
            tensor: to send or to receive into.
            waits: whether the caller blocks, so that the other end must have been called before.

        Raises:
            ArrayError: the two tensors differ in length or dtype; both calls raise it, and the group remains usable.
            ArgumentError: the caller would deadlock.
        """
        carrier.comm.check()
        dense(tensor, None)  # raises for tensors without plain memory
        rank, name = carrier.comm.rank, "send" if sends else "recv"
        with self._gate:
            waiting = self._waiting[tag]
            other = waiting.popleft() if waiting and waiting[0].sends is not sends else None
            if other is None and not waits:
                end = _End(sends, tensor, carrier.record_event(), Future())
                waiting.append(end)
            elif not waiting:
                del self._waiting[tag]
        if other is not None:
            return _copy(carrier, other, tensor, f"{name} with rank {rank} itself")
        missing = "irecv" if sends else "isend"
        if waits:
            raise ArgumentError(
                f"{name} with rank {rank}, this rank itself, before its {missing} with tag {tag}: it would deadlock; "
                f"call {missing} first, or put both into one batch_isend_irecv"
            )
        what = f"i{name} with rank {rank}, this rank itself, which has not called {missing} with tag {tag}"
        return OwnWork(end.future, tensor, what, rank, carrier.comm.timeout)

    def close(self) -> None:
        """Fail Works of messages whose other end was not called with ClosedError. Idempotent."""
        with self._gate:
            left = [end for ends in self._waiting.values() for end in ends]
            self._waiting.clear()
        for end in left:
            end.future.set_exception(
                ClosedError("a message of this rank to itself: the group was closed before its other end was called")
            )


def _copy(carrier: Carrier, first: _End, tensor: Tensor, what: str) -> Work:
    """Copy from the sent to the received tensor, in the second of the two calls; returns that call's Work."""
    rank = carrier.comm.rank
    source, target = (first.tensor, tensor) if first.sends else (tensor, first.tensor)
    try:
        if (source.dtype, source.numel()) != (target.dtype, target.numel()):
            raise ArrayError(
                f"rank {rank} sends {source.numel()} x {source.dtype} to itself and receives {target.numel()} x "
                f"{target.dtype}; both must be the same"
            )
        carrier.follow(first.event)
        with torch.no_grad():
            target.copy_(dense(source, None).view(target.shape))
        work = carrier.over(tensor, what, rank, first.tensor)
        first.future.set_result(carrier.over(first.tensor, what, rank, tensor))
    except BaseException as error:
        if not first.future.done():
            first.future.set_exception(error)
        raise
    return work
