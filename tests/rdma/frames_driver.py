"""Compiled code that sends frames over a queue pair and takes those that come, as the wire's carrier does."""

from __future__ import annotations

from numba import njit

from xvcomm.wire import verbs


@njit(nogil=True)
def send(queue, here, key, nbytes):
    """Send bytes of registered memory; False if there is no room, or if the device refuses."""
    queue = verbs.queue_at(queue)
    return verbs.send(queue, here, key, nbytes) and verbs.post(queue) == 0


@njit(nogil=True)
def send_inline(queue, here, nbytes):
    """Send a few bytes that the request takes along."""
    queue = verbs.queue_at(queue)
    return verbs.send_inline(queue, here, nbytes) and verbs.post(queue) == 0


@njit(nogil=True)
def write(queue, here, key, there, there_key, nbytes):
    """Write bytes of registered memory into the other side's."""
    queue = verbs.queue_at(queue)
    return verbs.write(queue, here, key, there, there_key, nbytes) and verbs.post(queue) == 0


@njit(nogil=True)
def take(completions):
    """Take a batch of completions."""
    return verbs.take(verbs.completions_at(completions))
