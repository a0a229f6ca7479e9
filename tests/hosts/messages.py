"""Messages of ranks on two hosts whose connections are slow; see `ranks`."""

import json
import time

import numpy as np


def share(comm, mib, times, uncounted=0):
    """Messages one way, each behind the other; rank 0 tells the bytes that it has sent over each interface, in their order."""
    x, before = np.zeros(int(mib) << 17), {}
    for number in range(int(times)):
        comm.barrier()
        if comm.rank == 0:
            if number == int(uncounted):
                before = {rail.local: rail.sent for rail in comm.rails()}
            x[:] = number
            comm.send(x, 1)
        else:
            comm.recv(x, 0)
            assert (x == number).all()
    comm.barrier()
    if comm.rank == 0:
        rails = sorted(comm.rails(), key=lambda rail: rail.local)
        print(json.dumps([rail.sent - before.get(rail.local, 0) for rail in rails]))


def not_awaited(comm):
    """Messages that fit the ring; the sender changes and frees each at once. The receiver is late for two of three."""
    for number, mib in enumerate((1, 3, 2, 3, 1, 3, 3, 2, 1, 3, 2, 3)):
        x = np.random.default_rng(number).integers(0, 255, mib << 20, np.uint8)
        with comm.split(0) as both:  # by another ring, which has not seen yet that messages are received late
            if comm.rank == 1:
                both.send(x, 0)
                x[:] = 255
                del x
            else:
                time.sleep(number % 3 * 0.02)
                got = np.zeros_like(x)
                both.recv(got, 1)
                assert (got == x).all()
    comm.barrier()
