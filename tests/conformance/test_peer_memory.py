"""Rings in GPU memory between ranks of one island, with the ROCm simulation: which pairs use them, and how they end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xvcomm.comm.communicator import Communicator
from xvcomm.errors import Aborted, ArgumentError, PeerLost
from xvcomm.testing import World, channels, graphs, pointtopoint
from xvcomm.testing.arrays import arrays
from xvcomm.testing.cases import SMALL_GPU_RINGS
from xvcomm.testing.inside import context
from xvcomm.testing.pointtopoint import rings_in_gpu_memory
from xvcomm.testing.signals import await_that, meet

pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install hip-python")

COUNT = 20_001
Job = Callable[..., World]


@pytest.fixture(scope="module")
def job(rocm_path: Path) -> Job:
    """Starts ranks, with additional variables for all or for each rank."""
    common = {"ROCM_PATH": str(rocm_path), "HIPHOST_DEVICES": "4", **SMALL_GPU_RINGS}

    def start(devices: str, islands: str | None = None, *further: dict[str, str]) -> World:
        each = [{**common, **one} for one in further or ({},)]
        return World(devices=devices, islands=islands, env=each if len(each) > 1 else each[0])

    return start


@pytest.mark.parametrize(
    ("start", "wanted"),
    [
        (("rocm:2",), [[1], [0]]),
        (("rocm:2", "a,b"), [[], []]),
        (("rocm:3", "a,b,a"), [[2], [], [0]]),
        (("rocm:2,host:1",), [[1], [0], []]),
        (("rocm:2", None, {"HIPHOST_PEERS": "0"}), [[], []]),
        (("rocm:2", None, {"XVCOMM_PEER_MEMORY": "0"}, {}), [[], []]),
    ],
    ids=["one island", "a rehearsal", "two islands", "beside a host rank", "out of reach", "switched off by one"],
)
def test_which_pairs_have_rings_in_gpu_memory(job: Job, start: tuple[Any, ...], wanted: list[list[int]]) -> None:
    """Pairs of one island whose devices reach each other; other pairs use host memory and work too."""
    with job(*start) as ranks:
        assert ranks.run(rings_in_gpu_memory, COUNT) == wanted


def test_messages_are_in_order_behind_late_streams(job: Job) -> None:
    """For both rings of a pair and for additional channels."""
    with job("rocm:2", None, {"HIPHOST_DELAY_US": "500"}) as ranks:
        ranks.run(pointtopoint.check_order, 40)
        ranks.run(pointtopoint.check_exchange, "float32", 65_537)
        ranks.run(channels.check_channels_pass)
        assert ranks.run(rings_in_gpu_memory, COUNT) == [[1], [0]]


def capture_first_message(comm: Communicator) -> None:
    """The message opens the ring, which allocates and pins memory."""
    x = arrays(comm).put(np.zeros(10))
    with pytest.raises(ArgumentError, match="once before"):
        graphs.captured(comm, lambda: comm.send(x, 1))


def test_the_first_message_cannot_be_in_a_graph(job: Job) -> None:
    with job("rocm:2") as ranks:
        ranks.submit(0, capture_first_message)
        ranks.submit(1, capture_first_message_alone)
        assert ranks.collect() == [None, None]


def capture_first_message_alone(comm: Communicator) -> None:
    """The other rank's failure aborts this one."""
    with pytest.raises(Aborted, match=r"rank 0.*once before"):
        comm.recv(arrays(comm).put(np.zeros(10)), 0)
        comm.barrier()


def send_and_leave(comm: Communicator) -> None:
    """Close with a message in this rank's GPU memory that nobody has received yet."""
    a = arrays(comm)
    comm.send(a.put(np.arange(1000.0)), 1)
    assert context(comm).rings.ends()[0].made
    comm.close()


def receive_after_close(comm: Communicator) -> None:
    """The message that was sent is received; a further receive fails."""
    a, buffer = arrays(comm), np.zeros(1000)
    await_that(lambda: bool(context(comm).lifecycle.departed))
    got = a.put(buffer)
    comm.recv(got, 0)
    assert (a.get(got) == np.arange(1000.0)).all()
    with pytest.raises(PeerLost):
        comm.irecv(got, 0).synchronize()


def test_sent_messages_arrive_after_the_sender_has_closed(job: Job) -> None:
    """The sender's process ends when the message has been received."""
    with job("rocm:2") as ranks:
        ranks.submit(0, send_and_leave)
        ranks.submit(1, receive_after_close)
        assert ranks.collect() == [None, None]


def wait_in_a_ring(comm: Communicator, producer: bool) -> Exception | None:
    """Wait for a peer that will be killed, in rings that both ranks have opened."""
    a = arrays(comm)
    rings_in_gpu_memory(comm, COUNT)
    meet(comm)
    array = a.put(np.zeros(100 * COUNT, np.float32))
    try:
        (comm.isend if producer else comm.irecv)(array, 1).synchronize()
    except PeerLost as error:
        return error
    return None


def exchange_and_die(comm: Communicator) -> None:
    """End as by SIGKILL, without closing anything."""
    rings_in_gpu_memory(comm, COUNT)
    meet(comm)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("producer", [True, False])
def test_a_kernel_leaves_the_ring_when_its_peer_is_killed(job: Job, producer: bool) -> None:
    """Whichever rank exports the memory; the surviving rank continues and no other fails."""
    with job("rocm:2") as ranks:
        ranks.submit(0, wait_in_a_ring, producer)
        ranks.submit(1, exchange_and_die)
        outcome, dead = ranks.collect()
    assert isinstance(outcome, PeerLost) and outcome.peer == 1
    assert isinstance(dead, EOFError)


def renew(comm: Communicator) -> int:
    """Messages over several communicators in turn; returns how much memory was exported in total."""
    for number in range(4):
        with comm.subgroup(range(comm.size), f"again {number}") as group:
            rings_in_gpu_memory(group, COUNT)
            meet(group)
    pool = context(comm).device._shared  # type: ignore[attr-defined]
    with comm.subgroup(range(comm.size), "last") as group:
        rings_in_gpu_memory(group, COUNT)
        meet(group)
    return len(pool._idle) + len(pool._away)


def test_memory_serves_one_communicator_after_the_other(job: Job) -> None:
    """At most two rings are exported at a time, and two more until their other ends are closed."""
    with job("rocm:2") as ranks:
        assert sum(ranks.run(renew)) <= 4
