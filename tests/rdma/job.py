"""A job of one rank on each of two hosts with RDMA devices."""

from __future__ import annotations

import os
import time

import numpy as np

from xvcomm.testing.inside import network

SECONDS = 180


def settings(port, **more):
    """Environment of this host's rank; ranks with one port are one job."""
    me = int(os.environ["HOST_INDEX"])
    return {
        "XVCOMM_RANK": str(me), "XVCOMM_SIZE": "2", "XVCOMM_LOCAL_RANK": "0", "XVCOMM_LOCAL_SIZE": "1",
        "XVCOMM_STORE": f"tcp://{os.environ['HOST_ADDR_0_0']}:{port}", "XVCOMM_SECRET": "of the test",
        "XVCOMM_DEVICE": "host", "XVCOMM_ISLAND": "ab"[me], "XVCOMM_TIMEOUT": str(SECONDS), **more,
    }  # fmt: skip


def by_scheme(comm, scheme):
    """Bytes that rails of a scheme have sent, those too that are lost."""
    return sum(path.sent for path in network(comm).paths() if path.scheme == scheme)


def meet(comm, pairs=4):
    """Send until all rails of RDMA are up on both hosts."""
    until = time.monotonic() + SECONDS
    up = 0
    while up < pairs:
        assert time.monotonic() < until, comm.rails()
        up = min(comm.all_gather_object(sum(rail.scheme == "rdma" for rail in comm.rails())))


def exchange(comm, count, most, seed):
    """Send so many messages of random sizes both ways, and compare each."""
    chance = np.random.default_rng(seed)
    sizes = np.minimum(most, (chance.pareto(0.5, count) * 8).astype(np.int64))
    content = np.arange(2 * most, dtype=np.uint32).astype(np.uint16).view(np.uint8)
    buffer = np.zeros(most, np.uint8)
    other = 1 - comm.rank
    for number, size in enumerate(sizes.tolist()):
        mine, theirs = ((number * 7 + rank * 13) % 1000 for rank in (comm.rank, other))
        comm.sendrecv(content[mine : mine + size], other, buffer[:size], other)
        assert (buffer[:size] == content[theirs : theirs + size]).all(), f"message {number} of {size} bytes"
    return int(sizes.sum())
