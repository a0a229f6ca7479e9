"""What a rank of a test between hosts does: `ranks.py ACTION [ARGUMENT]`."""

import contextlib
import os
import signal
import socket
import sys
import time

import numpy as np

import xvcomm


def collectives(comm):
    """An all_reduce of several sizes, and messages both ways."""
    for count in (1, 1000, 1 << 20):
        x = np.full(count, comm.rank + 1.0, np.float32)
        comm.all_reduce(x)
        assert (x == 3).all()
    other = 1 - comm.rank
    sent, received = np.arange(300_000) * (comm.rank + 1), np.zeros(300_000, int)
    comm.sendrecv(sent, other, received, other)
    assert (received == np.arange(300_000) * (other + 1)).all()
    print(comm.topology.hosts)


def cut(comm):
    """Messages of known contents, while the test cuts a link after the first line and mends it after the second."""
    x = np.zeros(1 << 18, np.int64)
    began, longest = time.monotonic(), 0.0
    number = 0
    go_on = True
    while go_on:
        start = time.monotonic()
        if comm.rank == 0:
            x[:] = number
            comm.send(x, 1, tag=number)
        else:
            comm.recv(x, 0, tag=number)
            assert (x == number).all()
        longest = max(longest, time.monotonic() - start)
        number += 1
        if number == 5:
            print("begun", flush=True)
        go_on = comm.broadcast_object(time.monotonic() - began < 4)
    print(f"{number} {longest:.3f}")


def die(comm):
    """Rank 1 ends without a word while rank 0 waits for it."""
    x = np.zeros(10)
    comm.all_reduce(x)
    if comm.rank == 1:
        os._exit(0)
    began = time.monotonic()
    try:
        comm.recv(x, 1)
    except xvcomm.PeerLost as error:
        assert time.monotonic() - began < 5, time.monotonic() - began
        print(error)


def outlive(comm):
    """Rank 0, which serves the store, is killed while rank 1 waits for rank 2: neither has a wire to rank 0."""
    comm.store.add("ready", 1)
    if comm.rank == 0:
        while comm.store.add("ready", 0) < comm.size:
            time.sleep(0.01)
        with contextlib.suppress(
            ConnectionRefusedError
        ):  # the store listens on the address that it was given, and on no other
            socket.create_connection(("10.77.1.1", 29711))
            raise AssertionError
        print("ready", time.monotonic(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.recv(np.zeros(10), 3 - comm.rank)
    except xvcomm.PeerLost as error:
        print(time.monotonic(), error.peer, error)


def differ(comm):
    """The ranks describe a message differently."""
    try:
        if comm.rank == 0:
            comm.send(np.zeros(4, np.float32), 1, tag=7)
            comm.recv(np.zeros(1), 1)
        else:
            comm.recv(np.zeros(8, np.int16), 0, tag=7)
    except xvcomm.MismatchError as error:
        print(error)


def idle(comm):
    """CPU seconds of a rank that does nothing for five seconds."""
    comm.all_reduce(np.zeros(10))
    time.sleep(0.5)
    before = time.process_time()
    time.sleep(5)
    print(f"{time.process_time() - before:.3f}")
    comm.barrier()


if __name__ == "__main__":
    with xvcomm.init() as communicator:
        globals()[sys.argv[1]](communicator)
