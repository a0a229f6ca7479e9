"""Requests, receives and completions of queue pairs from compiled code, through the provider's own functions.

Requests are collected into a chain, which `post` hands over by one call; only its last request is signalled. One queue pair works
in order: what it has written is there once the SEND behind it is received. Receives take the buffers of a ring, over and over, in
order; `offer` posts them. Completions of many queue pairs come in batches.

Each queue is used by one thread at a time, and so is each completion queue with the queues that end in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xvcomm.jit.atomics import load
from xvcomm.jit.ccall import call_3
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at, python_type

WRITE, SEND, READ = 0, 2, 4
"""IBV_WR_RDMA_WRITE, IBV_WR_SEND, IBV_WR_RDMA_READ."""
SIGNALED, INLINE = 2, 8
"""IBV_SEND_SIGNALED, IBV_SEND_INLINE."""
SUCCESS, FLUSHED = 0, 5
"""IBV_WC_SUCCESS; IBV_WC_WR_FLUSH_ERR: the queue pair was in the error state already, which something else has caused."""

PART = np.dtype([("address", "i8"), ("length", "u4"), ("key", "u4")], align=True)
"""struct ibv_sge."""

_TARGET = np.dtype([("address", "i8"), ("key", "u4"), ("rest", "i8", 2)], align=True)

REQUEST = np.dtype([
    ("id", "i8"), ("next", "i8"), ("parts", "i8"), ("part_count", "i4"), ("opcode", "u4"), ("flags", "u4"), ("immediate", "u4"),
    ("target", _TARGET), ("srq_number", "u4"), ("rest", "i8", 6),
], align=True)  # fmt: skip
"""struct ibv_send_wr. Of its union the member for WRITEs stands here, and `rest` fills it up to its size."""

RECEIVE = np.dtype([("id", "i8"), ("next", "i8"), ("parts", "i8"), ("part_count", "i4")], align=True)
"""struct ibv_recv_wr."""

COMPLETION = np.dtype([
    ("id", "i8"), ("status", "u4"), ("opcode", "u4"), ("vendor_error", "u4"), ("bytes", "u4"), ("immediate", "u4"),
    ("qp_num", "u4"), ("src_qp", "u4"), ("flags", "u4"), ("pkey_index", "u2"), ("slid", "u2"), ("sl", "u1"), ("path_bits", "u1"),
], align=True)  # fmt: skip
"""struct ibv_wc. After a failure only `id`, `status`, `qp_num` and `vendor_error` are valid."""

PLACE_BITS = 16
_REQUEST_BYTES, _RECEIVE_BYTES = REQUEST.itemsize, RECEIVE.itemsize
_PLACE_SHIFT = 63 - PLACE_BITS
_OF_RECEIVE = 1 << (_PLACE_SHIFT - 1)
"""Bit of the id of a receive: a completion's opcode is not valid after a failure."""
_COUNT_MASK = _OF_RECEIVE - 1

QUEUE = np.dtype([
    ("post", "i8"),  # address of the provider's post_send
    ("pair", "i8"),  # of the struct ibv_qp
    ("number", "i8"),  # its qp_num
    ("requests", "i8"),  # of `depth` requests, each of one part, each with the next one as its `next`
    ("parts", "i8"),
    ("depth", "i8"),  # most requests that may be posted and not ended, beside one of `flush`
    ("place", "i8"),  # in COMPLETIONS.queues
    ("filled", "i8"),  # requests of the chain that is not posted yet
    ("posted", "i8"),  # requests handed over; with the two below, counted from the first one
    ("ended", "i8"),  # requests that have ended, well or not: all is drained when it reaches `posted`
    ("written", "i8"),  # requests that have ended well: their bytes may be used again, and are there
    ("status", "i8"),  # what went wrong first, FLUSHED only if nothing else did: the ibv_wc_status of a request or receive,
    ("vendor_error", "i8"),
    ("error", "i8"),  # or the errno of a chain that was refused; 0: nothing
    ("bad", "i8"),  # address of the request or receive that was refused
    ("post_receive", "i8"),  # address of the provider's post_recv
    ("receives", "i8"),  # of a ring of `receive_depth` receives, each of one part, each with the following one as its `next`
    ("receive_parts", "i8"),
    ("receive_depth", "i8"),
    ("offered", "i8"),  # receives posted; with the one below, counted from the first one
    ("received", "i8"),  # receives that have ended well, in order
])  # fmt: skip
"""What compiled code needs to know of a queue pair."""

COMPLETIONS = np.dtype([
    ("poll", "i8"),  # addresses of the provider's poll_cq and req_notify_cq
    ("notify", "i8"),
    ("get_event", "i8"),  # of libibverbs' ibv_get_cq_event and ibv_ack_cq_events
    ("ack_events", "i8"),
    ("queue", "i8"),  # of the struct ibv_cq, and of its struct ibv_comp_channel, whose descriptor must not block
    ("channel", "i8"),
    ("batch", "i8"),  # of room for completions
    ("most", "i8"),  # how many fit in
    ("queues", "i8"),  # of the table of addresses of queues; 0 where there is none
    ("stray", "i8"),  # completions of queue pairs that are in the table no more
    ("event_queue", "i8"),  # what ibv_get_cq_event writes
    ("event_context", "i8"),
])  # fmt: skip
"""What compiled code needs to know of a completion queue."""

Queue, Completions = python_type(QUEUE), python_type(COMPLETIONS)
queue_at, completions_at = compiled_at(QUEUE), compiled_at(COMPLETIONS)
request_at, part_at = compiled_at(REQUEST), compiled_at(PART)
receive_at, completion_at = compiled_at(RECEIVE), compiled_at(COMPLETION)


@register_jitable
def room(queue: Any) -> int:
    """How many requests the chain may still take."""
    return queue.depth - (queue.posted - queue.ended) - queue.filled


@register_jitable
def _add(queue: Any, opcode: int, here: int, key: int, there: int, there_key: int, nbytes: int, flags: int) -> None:
    part, request = part_at(queue.parts, queue.filled), request_at(queue.requests, queue.filled)
    part.address, part.length, part.key = here, nbytes, key
    queue.filled += 1
    request.id = (queue.place << _PLACE_SHIFT) | (queue.posted + queue.filled)
    request.opcode, request.flags = opcode, flags
    request.target.address, request.target.key = there, there_key


@register_jitable
def write(queue: Any, here: int, key: int, there: int, there_key: int, nbytes: int) -> bool:
    """Add a WRITE of registered memory to the chain; False if there is no room. The memory must stay until it is `written`."""
    if room(queue) <= 0:
        return False
    _add(queue, WRITE, here, key, there, there_key, nbytes, 0)
    return True


@register_jitable
def write_inline(queue: Any, here: int, there: int, there_key: int, nbytes: int) -> bool:
    """Add a WRITE of a few bytes that `post` takes along, so that they may change afterwards and need no registration."""
    if room(queue) <= 0:
        return False
    _add(queue, WRITE, here, 0, there, there_key, nbytes, INLINE)
    return True


@register_jitable
def read(queue: Any, here: int, key: int, there: int, there_key: int, nbytes: int) -> bool:
    """Add a READ into registered memory to the chain; False if there is no room. The bytes are there when it is `written`."""
    if room(queue) <= 0:
        return False
    _add(queue, READ, here, key, there, there_key, nbytes, 0)
    return True


@register_jitable
def send(queue: Any, here: int, key: int, nbytes: int) -> bool:
    """Add a SEND of registered memory to the chain, as `write` does. It waits until the other side has a buffer for it."""
    if room(queue) <= 0:
        return False
    _add(queue, SEND, here, key, 0, 0, nbytes, 0)
    return True


@register_jitable
def send_inline(queue: Any, here: int, nbytes: int) -> bool:
    """Add a SEND of a few bytes to the chain, as `write_inline` does."""
    if room(queue) <= 0:
        return False
    _add(queue, SEND, here, 0, 0, 0, nbytes, INLINE)
    return True


@register_jitable
def failed(queue: Any) -> bool:
    """Whether a request or receive has failed or was refused: the queue pair is of no use any more."""
    return bool(queue.status != 0 or queue.error != 0)


@register_jitable
def post(queue: Any) -> int:
    """Hand the chain over; 0, or the errno of a refusal, after which the queue pair must be put into the error state."""
    count = queue.filled
    if count == 0:
        return 0
    last = request_at(queue.requests, count - 1)
    following = last.next
    last.next = 0
    last.flags |= SIGNALED
    queue.bad = 0
    error = int(np.int32(call_3(queue.post, queue.pair, queue.requests, address_of(queue, "bad"))))
    last.next = following
    queue.filled = 0
    if error != 0:
        if not failed(queue):
            queue.error = abs(error)
        if queue.bad != 0:
            count = (queue.bad - queue.requests) // _REQUEST_BYTES
    queue.posted += count
    return abs(error)


@register_jitable
def flush(queue: Any) -> int:
    """Post a WRITE of nothing: once it has ended, well or not, all that was posted before has. 0 or an errno.

    Of use after a failure, because requests that are not signalled end unseen, and where a completion seems lost. There is always
    room for one. A chain that was not posted is given up.
    """
    if queue.posted - queue.ended > queue.depth:
        return 0
    queue.filled = 0
    _add(queue, WRITE, 0, 0, 0, 0, 0, INLINE)
    return post(queue)


@register_jitable
def _offer(queue: Any, first: int, count: int) -> int:
    """Post receives that lie one behind the other in the ring."""
    last = receive_at(queue.receives, first + count - 1)
    following = last.next
    last.next = 0
    begin = queue.receives + first * _RECEIVE_BYTES
    queue.bad = 0
    error = int(np.int32(call_3(queue.post_receive, queue.pair, begin, address_of(queue, "bad"))))
    last.next = following
    if error != 0:
        if not failed(queue):
            queue.error = abs(error)
        if queue.bad != 0:
            count = (queue.bad - begin) // _RECEIVE_BYTES
    queue.offered += count
    return abs(error)


@register_jitable
def offer(queue: Any, count: int) -> int:
    """Post the next receives of the ring, whose buffers may be overwritten; 0, or the errno of a refusal as from `post`.

    No more than `receive_depth` may be posted and not received.
    """
    while count > 0:
        first = queue.offered % queue.receive_depth
        together = min(count, queue.receive_depth - first)
        error = _offer(queue, first, together)
        if error != 0:
            return error
        count -= together
    return 0


def receive_id(place: int) -> int:
    """The id of receives of the queue that has a place in a completion queue's table."""
    return place << _PLACE_SHIFT | _OF_RECEIVE


@register_jitable
def _settle(completions: Any, completion: Any) -> None:
    address = load(completions.queues + 8 * (completion.id >> _PLACE_SHIFT))
    if address == 0 or queue_at(address).number != completion.qp_num:
        completions.stray += 1
        return
    queue = queue_at(address)
    of_receive = completion.id & _OF_RECEIVE != 0
    if not of_receive:
        queue.ended = completion.id & _COUNT_MASK
    if completion.status == SUCCESS:
        if of_receive:
            queue.received += 1
        else:
            queue.written = queue.ended
    elif not failed(queue) or (queue.status == FLUSHED and completion.status != FLUSHED):
        queue.status, queue.vendor_error = completion.status, completion.vendor_error


@register_jitable
def take(completions: Any) -> int:
    """Poll a batch of completions and count them in their queues; how many there were, negative if the device refuses."""
    count = int(np.int32(call_3(completions.poll, completions.queue, completions.most, completions.batch)))
    for i in range(count):
        _settle(completions, completion_at(completions.batch, i))
    return count


@register_jitable
def arm(completions: Any) -> int:
    """Let the next completion make the channel's descriptor ready; 0 or an errno. `take` once more before sleeping on it."""
    return int(np.int32(call_3(completions.notify, completions.queue, 0, 0)))


@register_jitable
def take_events(completions: Any) -> int:
    """Reset a channel's descriptor that is ready; the number of events there were."""
    queue, context = address_of(completions, "event_queue"), address_of(completions, "event_context")
    events = 0
    while np.int32(call_3(completions.get_event, completions.channel, queue, context)) == 0:
        events += 1
    if events > 0:
        call_3(completions.ack_events, completions.queue, events, 0)
    return events
