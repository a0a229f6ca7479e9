"""The records of `wire.verbs` for queue pairs and completion queues that exist, whichever library made them."""

from __future__ import annotations

import ctypes
import os

import numpy as np

from xvcomm.backends.rdma.layout import CHANNEL, COMPLETION_QUEUE, CONTEXT, QUEUE_PAIR, at
from xvcomm.errors import ResourceError
from xvcomm.wire.verbs import COMPLETION, PART, PLACE_BITS, RECEIVE, REQUEST, Completions, Queue, receive_id

STATUSES = (
    "SUCCESS", "LOC_LEN_ERR", "LOC_QP_OP_ERR", "LOC_EEC_OP_ERR", "LOC_PROT_ERR", "WR_FLUSH_ERR", "MW_BIND_ERR", "BAD_RESP_ERR",
    "LOC_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_ACCESS_ERR", "REM_OP_ERR", "RETRY_EXC_ERR", "RNR_RETRY_EXC_ERR",
    "LOC_RDD_VIOL_ERR", "REM_INV_RD_REQ_ERR", "REM_ABORT_ERR", "INV_EECN_ERR", "INV_EEC_STATE_ERR", "FATAL_ERR",
    "RESP_TIMEOUT_ERR", "GENERAL_ERR", "TM_ERR", "TM_RNDV_INCOMPLETE",
)  # fmt: skip
"""Names of enum ibv_wc_status, without IBV_WC_."""

_CAUSES = {
    "LOC_PROT_ERR": "the memory is not registered, or not any more (in containers look at the memlock limit of the runtime)",
    "WR_FLUSH_ERR": "the queue pair was in the error state, or the memory is not registered and the device is Soft-RoCE",
    "REM_ACCESS_ERR": "the other side has not registered that memory for writing, or not any more",
    "REM_INV_REQ_ERR": "the other side's queue pair does not accept such a request",
    "REM_OP_ERR": "the other side's device or queue pair failed",
    "RETRY_EXC_ERR": "the other side does not answer: its process or host has ended, a link is down, a GID of another network or "
    "RoCE version was taken, or a firewall drops UDP port 4791",
    "RNR_RETRY_EXC_ERR": "the other side had no receive request ready",
    "FATAL_ERR": "the device failed",
}


def status_text(status: int) -> str:
    """The name of an ibv_wc_status and its likely cause."""
    name = STATUSES[status] if 0 <= status < len(STATUSES) else f"status {status}"
    cause = _CAUSES.get(name)
    return f"{name}: {cause}" if cause else name


class CompletionQueue:
    """The completions of several queue pairs.

    Attributes:
        record: what `wire.verbs` works on, a COMPLETIONS.
        address: of the record.
        fd: ready when a completion has come after `wire.verbs.arm`; `wire.verbs.take_events` resets it.
    """

    def __init__(self, queue: int, get_event: int, ack_events: int, batch: int = 64) -> None:
        """Use a struct ibv_cq with a completion channel, whose descriptor will not block any more.

        Args:
            queue: address of the struct.
            get_event, ack_events: addresses of ibv_get_cq_event and ibv_ack_cq_events.
            batch: most completions that are taken at a time.
        """
        made = at(queue, COMPLETION_QUEUE)
        operations = at(int(made["context"]), CONTEXT)["operations"]
        self._batch = np.zeros(batch, COMPLETION)
        self._queues = np.zeros(1 << PLACE_BITS, np.int64)
        self.record = Completions(
            poll=int(operations["poll_cq"]), notify=int(operations["req_notify_cq"]), get_event=get_event, ack_events=ack_events,
            queue=queue, channel=int(made["channel"]), batch=self._batch.ctypes.data, most=batch,
            queues=self._queues.ctypes.data,
        )  # fmt: skip
        self.address = ctypes.addressof(self.record)
        self.fd = int(at(self.record.channel, CHANNEL)["fd"])
        os.set_blocking(self.fd, False)

    def add(self, queue: PostedQueue) -> None:
        """Count completions for a queue from now on.

        Raises:
            ResourceError: there are 65,536 already.
        """
        free = np.flatnonzero(self._queues == 0)
        if not len(free):
            raise ResourceError(f"a completion queue serves at most {len(self._queues)} queue pairs; use fewer rails")
        queue.record.place = int(free[0])
        self._queues[queue.record.place] = queue.address

    def remove(self, queue: PostedQueue) -> None:
        """Forget a queue; completions of it that still come are counted as stray."""
        self._queues[queue.record.place] = 0


class PostedQueue:
    """The requests and receives of one queue pair.

    Attributes:
        record: what `wire.verbs` works on, a QUEUE.
        address: of the record.
    """

    def __init__(self, pair: int, depth: int) -> None:
        """Use a struct ibv_qp.

        Args:
            pair: address of the struct.
            depth: most requests that may be posted and not ended; the queue pair must have room for one more.
        """
        made = at(pair, QUEUE_PAIR)
        operations = at(int(made["context"]), CONTEXT)["operations"]
        self._parts, self._requests = np.zeros(depth, PART), np.zeros(depth, REQUEST)
        places = np.arange(depth, dtype=np.int64)
        self._requests["parts"] = self._parts.ctypes.data + places * PART.itemsize
        self._requests["next"] = self._requests.ctypes.data + (places + 1) * REQUEST.itemsize
        self._requests["part_count"] = 1
        self.record = Queue(
            post=int(operations["post_send"]), post_receive=int(operations["post_recv"]), pair=pair, number=int(made["qp_num"]),
            depth=depth, requests=self._requests.ctypes.data, parts=self._parts.ctypes.data,
        )  # fmt: skip
        self.address = ctypes.addressof(self.record)

    def receive_into(self, address: int, key: int, nbytes: int, count: int) -> None:
        """Set the buffers that `wire.verbs.offer` posts. None may be posted yet, and a completion queue must count for this one.

        Args:
            address: of the first one; each begins where the one before it ends.
            key: lkey of their memory.
            nbytes: of each one.
            count: how many there are; the queue pair must have room for so many receives.
        """
        places = np.arange(count, dtype=np.int64)
        self._receive_parts, self._receives = np.zeros(count, PART), np.zeros(count, RECEIVE)
        self._receive_parts["address"] = address + places * nbytes
        self._receive_parts["length"], self._receive_parts["key"] = nbytes, key
        self._receives["id"], self._receives["part_count"] = receive_id(self.record.place), 1
        self._receives["parts"] = self._receive_parts.ctypes.data + places * PART.itemsize
        self._receives["next"] = self._receives.ctypes.data + (places + 1) * RECEIVE.itemsize
        self.record.receives, self.record.receive_parts = self._receives.ctypes.data, self._receive_parts.ctypes.data
        self.record.receive_depth = count

    @property
    def drained(self) -> bool:
        """Whether all that was posted has ended, so that the device reads no memory for it any more."""
        return bool(self.record.ended == self.record.posted)

    def failure(self) -> str | None:
        """What went wrong first, by name; None if nothing did."""
        if self.record.status:
            text = status_text(self.record.status)
            return f"{text} (vendor error {self.record.vendor_error:#x})" if self.record.vendor_error else text
        if self.record.error:
            return f"the device refused a request: {os.strerror(self.record.error)}"
        return None
