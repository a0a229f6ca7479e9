"""What a device reports of itself, its ports and its queue pairs, beside completions: read without blocking, and named."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from xvcomm.backends.rdma.layout import CONTEXT, EVENT, QUEUE_PAIR, at
from xvcomm.backends.rdma.library import libibverbs
from xvcomm.errors import ResourceError

NAMES = (
    "CQ_ERR", "QP_FATAL", "QP_REQ_ERR", "QP_ACCESS_ERR", "COMM_EST", "SQ_DRAINED", "PATH_MIG", "PATH_MIG_ERR", "DEVICE_FATAL",
    "PORT_ACTIVE", "PORT_ERR", "LID_CHANGE", "PKEY_CHANGE", "SM_CHANGE", "SRQ_ERR", "SRQ_LIMIT_REACHED", "QP_LAST_WQE_REACHED",
    "CLIENT_REREGISTER", "GID_CHANGE", "WQ_FATAL",
)  # fmt: skip
"""Names of enum ibv_event_type, without IBV_EVENT_."""
GID_CHANGE = "GID_CHANGE"

_OF_PAIRS = {name for name in NAMES if name.startswith(("QP_", "PATH_"))} | {"COMM_EST", "SQ_DRAINED"}
_OF_PORTS = {
    "PORT_ACTIVE", "PORT_ERR", "LID_CHANGE", "PKEY_CHANGE", "SM_CHANGE", "CLIENT_REREGISTER", "GID_CHANGE",
}  # fmt: skip
_LOSSES = {
    "CQ_ERR", "QP_FATAL", "QP_REQ_ERR", "QP_ACCESS_ERR", "PATH_MIG_ERR", "DEVICE_FATAL", "PORT_ERR", "LID_CHANGE", "SRQ_ERR",
    "WQ_FATAL",
}  # fmt: skip

_CAUSES = {
    "CQ_ERR": "a completion queue has overflowed: it was made with less room than its queue pairs have requests",
    "QP_FATAL": "the device has given it up: a fault of its firmware or driver (`dmesg`), or of its completion queue",
    "QP_REQ_ERR": "the other side has sent a request that this queue pair does not accept",
    "QP_ACCESS_ERR": "the other side has written to memory that is not registered for it, or not any more",
    "DEVICE_FATAL": "the device has failed, was reset or was removed (`dmesg`); all its queue pairs are lost",
    "PORT_ACTIVE": "the link is up",
    "PORT_ERR": "the link is down: the cable, the switch's port, or `ip link set ... down`",
    "LID_CHANGE": "the subnet manager has given the port another LID; queue pairs must be connected again",
    "PKEY_CHANGE": "the subnet manager has changed the port's partitions",
    "SM_CHANGE": "another subnet manager rules the subnet",
    "CLIENT_REREGISTER": "the subnet manager has begun anew",
    GID_CHANGE: "the GID has gone: its network interface has lost the address, if only for a moment",
}


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a device has reported.

    Attributes:
        name: of `NAMES`, `PORT_ERR`.
        port: number of the port that it concerns; 0 if it concerns none.
        queue_pair: qp_num of the queue pair that it concerns; 0 if it concerns none.
        completion_queue: address of the one that it concerns; 0 if it concerns none.
        loss: what it concerns cannot be used any more, a port until it is active again.
        cause: the likely one; empty for what needs none.
    """

    name: str
    port: int
    queue_pair: int
    completion_queue: int
    loss: bool
    cause: str

    def __str__(self) -> str:
        return f"{self.name}: {self.cause}" if self.cause else self.name


class Events:
    """The events of an open device, for one thread.

    Attributes:
        fd: ready to read when there are some.
    """

    def __init__(
        self,
        device: str,
        context: int,
        get: Callable[[int, int], int] | None = None,
        acknowledge: Callable[[int], None] | None = None,
    ) -> None:
        """Read those of a device, whose descriptor will not block any more.

        Args:
            device: its name.
            context: address of its struct ibv_context.
            get, acknowledge: ibv_get_async_event and ibv_ack_async_event, which keep errno for ctypes; libibverbs' if left out.
        """
        self._device, self._context = device, context
        self._get = get or libibverbs().ibv_get_async_event
        self._acknowledge = acknowledge or libibverbs().ibv_ack_async_event
        self.fd = int(at(context, CONTEXT)["async_fd"])
        os.set_blocking(self.fd, False)

    def take(self) -> Iterator[Event]:
        """The events since the last time, in their order; none if there were none.

        Raises:
            ResourceError: the device reports nothing any more, as after its removal.
        """
        while (event := self._next()) is not None:
            yield event

    def _next(self) -> Event | None:
        record = np.zeros(1, EVENT)
        while self._get(self._context, record.ctypes.data):
            number = ctypes.get_errno()
            if number == errno.EAGAIN:
                return None
            if number != errno.EINTR:
                raise ResourceError(
                    f"{self._device} reports no events any more: {os.strerror(number)}; was it removed?"
                )
        try:
            return self._named(int(record["type"][0]), int(record["element"][0]))
        finally:
            self._acknowledge(record.ctypes.data)  # until then the queue pair stays, which is read here

    def _named(self, number: int, element: int) -> Event:
        name = NAMES[number] if number < len(NAMES) else f"event {number}"
        port = element if name in _OF_PORTS else 0
        pair = int(at(element, QUEUE_PAIR)["qp_num"]) if name in _OF_PAIRS else 0
        queue = element if name == "CQ_ERR" else 0
        return Event(name, port, pair, queue, name in _LOSSES, _CAUSES.get(name, ""))
