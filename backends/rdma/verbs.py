"""Requests and completions of queue pairs from compiled code, through the provider's own functions.

Requests are collected into a chain, which `post` hands over by one call; only its last request is signalled. A chain that fills
slots ends with `write_inline` of their counter: one queue pair writes in order. Completions of many queue pairs come in batches.

Each queue is used by one thread at a time, and so is each completion queue with the queues that end in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from xvcomm.backends.rdma.layout import COMPLETION, PART, REQUEST
from xvcomm.jit.atomics import load
from xvcomm.jit.ccall import call_3
from xvcomm.jit.record import address_of, compiled_at, python_type

WRITE = 0
"""IBV_WR_RDMA_WRITE."""
SIGNALED, INLINE = 2, 8
"""IBV_SEND_SIGNALED, IBV_SEND_INLINE."""
SUCCESS = 0
"""IBV_WC_SUCCESS."""

PLACE_BITS = 16
_REQUEST_BYTES = REQUEST.itemsize
_COUNT_BITS = 63 - PLACE_BITS
_COUNT_MASK = (1 << _COUNT_BITS) - 1

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
    ("status", "i8"),  # what went wrong first: the ibv_wc_status of a request that failed,
    ("vendor_error", "i8"),
    ("error", "i8"),  # or the errno of a chain that was refused; 0: nothing
    ("bad", "i8"),  # address of the request that was refused
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
request_at, part_at, completion_at = compiled_at(REQUEST), compiled_at(PART), compiled_at(COMPLETION)


@register_jitable
def room(queue: Any) -> int:
    """How many requests the chain may still take."""
    return queue.depth - (queue.posted - queue.ended) - queue.filled


@register_jitable
def _add(queue: Any, here: int, key: int, there: int, there_key: int, nbytes: int, flags: int) -> None:
    part, request = part_at(queue.parts, queue.filled), request_at(queue.requests, queue.filled)
    part.address, part.length, part.key = here, nbytes, key
    queue.filled += 1
    request.id = (queue.place << _COUNT_BITS) | (queue.posted + queue.filled)
    request.flags = flags
    request.target.address, request.target.key = there, there_key


@register_jitable
def write(queue: Any, here: int, key: int, there: int, there_key: int, nbytes: int) -> bool:
    """Add a WRITE of registered memory to the chain; False if there is no room. The memory must stay until it is `written`."""
    if room(queue) <= 0:
        return False
    _add(queue, here, key, there, there_key, nbytes, 0)
    return True


@register_jitable
def write_inline(queue: Any, here: int, there: int, there_key: int, nbytes: int) -> bool:
    """Add a WRITE of a few bytes that `post` takes along, so that they may change afterwards and need no registration."""
    if room(queue) <= 0:
        return False
    _add(queue, here, 0, there, there_key, nbytes, INLINE)
    return True


@register_jitable
def failed(queue: Any) -> bool:
    """Whether a request has failed or was refused: the queue pair is of no use any more."""
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
    _add(queue, 0, 0, 0, 0, 0, INLINE)
    return post(queue)


@register_jitable
def _settle(completions: Any, completion: Any) -> None:
    address = load(completions.queues + 8 * (completion.id >> _COUNT_BITS))
    if address == 0 or queue_at(address).number != completion.qp_num:
        completions.stray += 1
        return
    queue = queue_at(address)
    queue.ended = completion.id & _COUNT_MASK
    if completion.status == SUCCESS:
        queue.written = queue.ended
    elif not failed(queue):
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
