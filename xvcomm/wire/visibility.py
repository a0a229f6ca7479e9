"""Compiled code that makes what an RDMA device has written to a GPU's memory visible to the GPU.

A completion tells that the bytes have left the device; on their way to a GPU they may still be behind what the processor writes
to host memory. A READ from the same memory comes back only after them. It is made over a queue pair of the device that is joined
with itself. AMD's GPUs need a WRITE before it. Sources: NCCL's and RCCL's `ncclIbIflush`.
"""

from __future__ import annotations

from errno import ETIMEDOUT
from typing import Any

from xvcomm.jit.atomics import monotonic, sched_yield
from xvcomm.jit.inline import register_jitable
from xvcomm.wire.locks import begin_copy, end_copy
from xvcomm.wire.verbs import completions_at, failed, post, queue_at, read, take, write

_LONGEST_NS = 1_000_000_000
"""A device that has not answered after this time is of no use."""


@register_jitable
def reach(loopback: Any, completions: Any, word: int, key: int, there: int, there_key: int, scratch: int) -> bool:
    """Wait until all that the device has written to the memory around `there` can be seen; False if the device fails.

    Args:
        loopback, completions: of the queue pair that is joined with itself.
        word, key: 8 registered bytes of host memory, and their lkey.
        there, there_key: bytes of the memory, and their rkey.
        scratch: address of 8 bytes beside them that a WRITE may change, or 0 if none is needed.
    """
    if scratch != 0:
        write(loopback, word, key, scratch, there_key, 8)
    read(loopback, word, key, there, there_key, 1)
    if post(loopback) != 0:
        return False
    until = monotonic() + _LONGEST_NS
    while loopback.written < loopback.posted:
        if take(completions) < 0 or failed(loopback):
            return False
        if monotonic() > until:
            loopback.error = ETIMEDOUT
            return False
        sched_yield()  # Soft-RoCE answers in the kernel, perhaps on this core
    return True


@register_jitable
def make_visible(carrier: Any, rail: Any, rdma: Any, wire: Any) -> bool:
    """Let the GPU see what a rail has received for a ring with slots in its memory; False if the device fails."""
    begin_copy(carrier, rail)
    done = reach(
        queue_at(rdma.loopback), completions_at(rdma.loopback_completions), rdma.word, rdma.word_key, wire.slots,
        wire.given[rdma.device], wire.scratch,
    )  # fmt: skip
    end_copy(carrier, rail)
    return done
