"""Messages of a rank to itself, in groups and by sendrecv, on host memory and on streams."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from xvcomm.comm.communicator import Communicator
from xvcomm.errors import ArgumentError
from xvcomm.testing import World
from xvcomm.testing.arrays import arrays, on_device
from xvcomm.testing.cases import SMALL_GPU_RINGS
from xvcomm.trace import recorder
from xvcomm.trace.format import Record


@pytest.fixture(scope="module", params=[1, 2])
def host(request: pytest.FixtureRequest) -> Iterator[World]:
    """Jobs of one and of two ranks."""
    with World(request.param, timeout=100) as ranks:
        yield ranks


@pytest.fixture(scope="module", params=["a", "a,b"])
def streams(rocm_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    """The same on devices with asynchronous streams."""
    pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install hip-python")
    count = request.param.count(",") + 1
    env = {"ROCM_PATH": str(rocm_path), "HIPHOST_DEVICES": "2", **SMALL_GPU_RINGS}
    with World(devices=f"rocm:{count}", islands=request.param, env=env) as ranks:
        yield ranks


def in_groups(comm: Communicator) -> None:
    a, me, after, before = arrays(comm), comm.rank, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent = [a.put(np.full(n + 1, 10.0 * me + n)) for n in range(4)]
    got = [a.put(np.zeros(n + 1)) for n in range(4)]
    with on_device(comm):
        assert comm.sendrecv(sent[3], me, got[3], me, 7, 7) is got[3]
        with comm.group():
            comm.recv(got[0], me, 5)
            comm.recv(got[2], me, channel=3)
            comm.send(sent[0], me, 5)
            comm.send(sent[1], me)
            comm.send(sent[2], me, channel=3)
            comm.recv(got[1], me)
        for x, y in zip(sent, got, strict=True):
            assert (a.get(x) == a.get(y)).all()
        cross, mine = a.put(np.zeros(300_000)), a.put(np.zeros(4))
        far = a.put(np.full(300_000, float(me)))
        with comm.group():
            works = [comm.isend(sent[3], me), comm.irecv(mine, me)]
            if comm.size > 1:
                works += [comm.isend(far, after), comm.irecv(cross, before)]
        assert works[1].wait() is mine
        for work in works:
            work.wait()
            work.synchronize()
        assert all(work.done() for work in works)
        assert (a.get(mine) == 10.0 * me + 3).all()
        assert (a.get(cross) == (before if comm.size > 1 else 0)).all()


def refused(comm: Communicator) -> None:
    a, me = arrays(comm), comm.rank
    x, y = a.put(np.ones(3)), a.put(np.zeros(4))
    with on_device(comm):
        for call in (lambda: comm.send(x, me), lambda: comm.irecv(x, me)):
            with pytest.raises(ArgumentError, match=r"would deadlock; send and receive inside one group\(\)"):
                call()
        alone, works = r"this rank sends 1 messages to itself on channel 2 and receives 0", []
        with pytest.raises(ArgumentError, match=alone), comm.group():
            works.append(comm.isend(x, me, channel=2))
        with pytest.raises(ArgumentError, match=alone):
            works[0].wait()
        with pytest.raises(
            ArgumentError, match=r"sends 3 x float64 with tag 1 to itself and receives 4 x float64 with"
        ):
            comm.sendrecv(x, me, y, me, 1, 1)
    in_groups(comm)  # it goes on


def seen(comm: Communicator) -> list[str]:
    records: list[Record] = []
    recorder.hooks.append(records.append)
    try:
        comm.sendrecv(np.ones(2), comm.rank, np.zeros(2), comm.rank)
    finally:
        recorder.hooks.remove(records.append)
    return [record.describe() for record in records]


def test_on_host_memory(host: World) -> None:
    host.run(in_groups)
    host.run(refused)
    for rank, (sent, received) in enumerate(host.run(seen)):
        assert re.match(rf"send #\d+ with rank {rank} of 2 x float64 at test_messages_to_oneself.py:\d+ \(done", sent)
        assert received.startswith("recv ") and received.endswith("(done)")


def test_on_streams(streams: World) -> None:
    for _ in range(3):
        streams.run(in_groups)
    streams.run(refused)
