"""Registered arrays of ranks of two hosts whose rings go over RDMA."""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
import time

import job
import numpy as np
import pytest

import xvcomm
from xvcomm import pipeline
from xvcomm.abc.device import RingStalled
from xvcomm.engine.session.rings import Use
from xvcomm.memory.ring import Message
from xvcomm.testing.inside import context
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import UINT8
from xvcomm.types.opcode import OpCode

pytestmark = pytest.mark.rdma

MOST = 6 << 20
FREE = 0xEE
"""What owners of arrays write into them once they have them back."""
_ports = itertools.count(7800)


@pytest.fixture
def comm(monkeypatch):
    """A communicator of one rank on each host, whose rails are all up."""
    for name, value in job.settings(next(_ports)).items():
        monkeypatch.setenv(name, value)
    made = xvcomm.init()
    job.meet(made)
    yield made
    made.close()


def content(seed, nbytes):
    """Bytes that both ranks know."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def exchange(comm, source, target, seed):
    """Exchange parts of two arrays, and overwrite each array as soon as the call has returned."""
    chance = np.random.default_rng(seed)
    nbytes = int(chance.integers(1, MOST) if seed % 2 else chance.integers(1, 300_000))
    begin = int(chance.integers(0, MOST - nbytes + 1))
    sent, received = source[begin : begin + nbytes], target[begin : begin + nbytes]
    sent[:] = content(2 * seed + comm.rank, nbytes)
    comm.sendrecv(sent, 1 - comm.rank, received, 1 - comm.rank)
    sent[:] = FREE
    right = (received == content(2 * seed + 1 - comm.rank, nbytes)).all()
    target[:] = FREE
    assert right, f"message {seed} of {nbytes} bytes"


@pytest.mark.parametrize("which", ["both", "first", "source", "target"])
def test_random_messages(comm, which):
    """All bytes are right, whichever of the arrays are registered, and none comes after a message is complete."""
    source, target = np.zeros(MOST, np.uint8), np.full(MOST, FREE, np.uint8)
    before = job.by_scheme(comm, "rdma")
    with comm.register(source) as first, comm.register(target) as second:
        if which == "target" or (which == "first" and comm.rank):
            first.close()
        if which == "source" or (which == "first" and comm.rank):
            second.close()
        for seed in range(16):
            exchange(comm, source, target, seed)
    assert job.by_scheme(comm, "rdma") - before > MOST
    assert (target == FREE).all()


def test_collectives(comm):
    x, everything = np.arange(MOST // 4, dtype=np.float32), np.zeros(MOST // 2, np.float32)
    with comm.register(x), comm.register(everything):
        for number in range(3):
            x[:] = np.arange(MOST // 4) % 1000 + number + comm.rank
            comm.all_reduce(x)
            np.testing.assert_array_equal(x, 2 * (np.arange(MOST // 4) % 1000 + number) + 1)
            comm.all_gather(x, out=everything)
            np.testing.assert_array_equal(everything, np.tile(x, 2))


class Scale:
    """A stage of y = 2 x, whose receives go into buffers that are handed out in turn."""

    input_spec = output_spec = ((1 << 17,), "float32")

    def __init__(self, comm, micro_batches):
        self.first, self.last, self.gradients = comm.rank == 0, comm.rank == comm.size - 1, []
        self.buffers = np.zeros((2 * micro_batches, *self.input_spec[0]), np.float32)
        self.next = itertools.cycle(self.buffers)

    def forward(self, x, micro_batch):
        x = np.full(*self.input_spec[0], 1 + micro_batch, np.float32) if self.first else x
        return float(x.sum()) if self.last else 2 * x

    def backward(self, dy, micro_batch):
        if self.first:
            self.gradients.append(set(dy.tolist()))
        return np.full(*self.input_spec[0], 9 + micro_batch, np.float32) if self.last else None

    def empty(self, shape, dtype):
        return next(self.next)


def test_a_pipeline_that_registers_its_buffers_once(comm):
    """Its losses and gradients are those of one that does not."""
    stage = Scale(comm, 3)
    pipe = pipeline.Pipeline(stage, comm, pipeline.build("1f1b", stages=2, micro_batches=3))
    with comm.register(stage.buffers):
        losses = [pipe.run() for _ in range(3)]
    losses.append(pipe.run())
    assert losses == 4 * [[float((2 << 17) * (1 + m)) for m in range(3)] if stage.last else []]
    assert stage.gradients == (4 * [{9.0}, {10.0}, {11.0}] if stage.first else [])


def test_a_link_is_cut(comm):
    """In the middle of messages, and comes back."""
    source, target = np.zeros(MOST, np.uint8), np.full(MOST, FREE, np.uint8)
    with comm.register(source), comm.register(target):
        for victim in range(2):
            job.meet(comm)
            comm.barrier()

            def cut():
                for state, pause in (("down", 0.3), ("up", 3)):
                    time.sleep(pause)
                    subprocess.run(["ip", "link", "set", "eth1", state], check=True)

            cutter = threading.Thread(target=cut)
            if comm.rank == victim:
                cutter.start()
            until, seed = time.monotonic() + 6, 0
            while any(comm.all_gather_object(time.monotonic() < until)):
                exchange(comm, source, target, seed := seed + 1)
            if comm.rank == victim:
                cutter.join()
        job.meet(comm)
    assert (target == FREE).all()


def test_a_receive_is_given_up_in_the_middle(comm):
    """Nothing is written into its array afterwards. The ring is used without what says at length why the deadline has passed."""
    data = np.full(32 << 20, FREE, np.uint8)
    with comm.register(data):
        comm.barrier()
        if comm.rank == 0:
            with pytest.raises(xvcomm.Aborted):
                comm.send(data, 1)
        else:
            inside = context(comm)
            end = inside.rings.end(0, Use.POINT_TO_POINT, Deadline.after(job.SECONDS), producer=False)
            (stream,) = inside.device.streams(1)
            stream.deadline = Deadline.after(0.1)
            inside.device.get(end, data.ctypes.data, Message(int(OpCode.SEND), UINT8.code, data.nbytes, 0), stream)
            with pytest.raises(RingStalled):
                stream.synchronize()
            data[:] = 1
            time.sleep(3)
            comm.abort("enough")
            assert (data == 1).all()


def test_a_send_is_given_up_in_the_middle(comm):
    """What its owner changes then is not received."""
    data = np.full(32 << 20, 1 + comm.rank, np.uint8)
    with comm.register(data):
        comm.barrier()
        if comm.rank == 0:
            with pytest.raises(xvcomm.DeadlineExceeded):
                comm.send(data, 1, timeout=0.1)
            data[:] = FREE
        else:
            with pytest.raises(xvcomm.DeadlineExceeded):
                comm.recv(data, 0)
            assert set(np.unique(data).tolist()) <= {1, 2}


def test_a_fork_while_arrays_are_registered(comm):
    """The child has the arrays, and can close; the parent's messages go on."""
    source, target = np.zeros(MOST, np.uint8), np.full(MOST, FREE, np.uint8)
    with comm.register(source) as held, comm.register(target):
        child = os.fork()
        if child == 0:
            held.close()
            os._exit(0 if (target == FREE).all() else 1)
        assert os.waitpid(child, 0)[1] == 0
        for seed in range(4):
            exchange(comm, source, target, seed)


def test_many_are_registered_and_closed(comm):
    """With messages between."""
    for number in range(8):
        source, target = np.zeros(MOST, np.uint8), np.full(MOST, FREE, np.uint8)
        with comm.register(source), comm.register(target), comm.register(target[100:]):
            exchange(comm, source, target, number)
