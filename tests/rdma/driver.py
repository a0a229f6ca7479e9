"""Compiled code that drives queue pairs: chains of WRITEs, each with the WRITE of a counter or the SEND of a frame behind it."""

from __future__ import annotations

import numpy as np
from numba import njit

from xvcomm.jit.atomics import load, store
from xvcomm.jit.record import compiled_at
from xvcomm.wire import verbs, visibility

JOB = np.dtype([("here", "i8"), ("key", "i8"), ("there", "i8"), ("there_key", "i8"), ("bytes", "i8")])
"""One WRITE."""

_job_at = compiled_at(JOB)
REFUSED = -1


@njit(nogil=True)
def _write_all(queue, jobs, count):
    """Add WRITEs to the chain; False if there is no room for them and one request behind them."""
    if verbs.room(queue) < count + 1:
        return False
    for i in range(count):
        job = _job_at(jobs, i)
        verbs.write(queue, job.here, job.key, job.there, job.there_key, job.bytes)
    return True


@njit(nogil=True)
def send_chain(queue, jobs, count, counter, there, there_key):
    """Post WRITEs and, behind them, the counter increased by one; 0 if there is no room, 1 if posted, REFUSED."""
    queue = verbs.queue_at(queue)
    if not _write_all(queue, jobs, count):
        return 0
    store(counter, load(counter) + 1)
    verbs.write_inline(queue, counter, there, there_key, 8)
    return REFUSED if verbs.post(queue) else 1


@njit(nogil=True)
def send_frame(queue, jobs, count, frame, key, nbytes):
    """Post WRITEs and, behind them, the SEND of a frame, inline if its key is 0; as `send_chain`."""
    queue = verbs.queue_at(queue)
    if not _write_all(queue, jobs, count):
        return 0
    if key == 0:
        verbs.send_inline(queue, frame, nbytes)
    else:
        verbs.send(queue, frame, key, nbytes)
    return REFUSED if verbs.post(queue) else 1


@njit(nogil=True)
def offer(queue, count):
    """Post the next receives."""
    return verbs.offer(verbs.queue_at(queue), count)


@njit(nogil=True)
def flush(queue):
    """Post a WRITE of nothing behind all others."""
    return verbs.flush(verbs.queue_at(queue))


@njit(nogil=True)
def take(completions):
    """Take a batch of completions."""
    return verbs.take(verbs.completions_at(completions))


@njit(nogil=True)
def arm(completions):
    """Ask for an event at the next completion."""
    return verbs.arm(verbs.completions_at(completions))


@njit(nogil=True)
def take_events(completions):
    """Reset the channel."""
    return verbs.take_events(verbs.completions_at(completions))


@njit(nogil=True)
def reach(loopback, completions, word, key, there, there_key, scratch):
    """Make visible what a device has written to a GPU's memory."""
    pair, queue = verbs.queue_at(loopback), verbs.completions_at(completions)
    return visibility.reach(pair, queue, word, key, there, there_key, scratch)
