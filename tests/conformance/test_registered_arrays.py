"""Registering arrays where no RDMA device is in use: programs that do so work as without."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest

from xvcomm.comm.communicator import Communicator
from xvcomm.errors import ArrayError, ClosedError
from xvcomm.memory.dlpack import Managed, pointer_of
from xvcomm.testing import World
from xvcomm.testing.inside import context


@pytest.fixture(scope="module", params=[{}, {"hosts": "a,b"}], ids=["one host", "two hosts by label"])
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    """Two ranks, which share memory or are joined by TCP."""
    with World(2, timeout=100, **request.param) as made:
        yield made


def messages(comm: Communicator) -> None:
    sent, received = np.full(1 << 20, comm.rank), np.zeros(1 << 20, np.int64)
    with comm.register(sent), comm.register(received) as held, comm.register(received[5:]):
        comm.sendrecv(sent, 1 - comm.rank, received, 1 - comm.rank)
        held.close()
        held.close()
        assert (received == 1 - comm.rank).all()
        comm.all_reduce(sent)
        assert (sent == 1).all()
    comm.register(np.zeros(0)).close()


def nonsense(comm: Communicator) -> None:
    with pytest.raises(ArrayError):
        comm.register("text")
    with pytest.raises(ArrayError):
        comm.register(np.zeros((4, 4))[:, 1])


class GpuArray:
    """An array of an NVIDIA GPU, as DLPack describes it; the test does not access its memory."""

    def __dlpack__(self, **_: object) -> object:
        tensor = np.zeros(4).__dlpack__()
        Managed.from_address(pointer_of(tensor, b"dltensor")).tensor.device_type = 2
        return tensor


def in_a_gpu(comm: Communicator) -> None:
    """No transport is told of it: its address is none of this process's memory."""
    with contextlib.ExitStack() as patched:
        for transport in context(comm).session.transports:
            patched.enter_context(mock.patch.object(transport, "register", side_effect=AssertionError))
        with comm.register(GpuArray()) as held:
            held.close()


def closed(comm: Communicator) -> None:
    made = comm.subgroup([comm.rank], "alone")
    held = made.register(np.zeros(9))
    made.close()
    with pytest.raises(ClosedError, match="register"):
        made.register(np.zeros(9))
    held.close()


def in_a_child(comm: Communicator) -> None:
    held = comm.register(np.zeros(9))
    child = os.fork()
    if child == 0:
        held.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    held.close()


@pytest.mark.parametrize("what", [messages, nonsense, in_a_gpu, closed, in_a_child])
def test_registering(ranks: World, what: object) -> None:
    ranks.run(what)
