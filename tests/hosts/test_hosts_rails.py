"""Several connections and threads that carry: bits are right while rails are lost at random."""

import random
import threading
import time

import numpy as np
import pytest

from xvcomm.testing import World
from xvcomm.testing.inside import network
from xvcomm.wire.records import UP

MOST_BYTES = 1 << 22


def lose_rails(comm, stop):
    """Lose one of several rails after another, as if their connections broke; how many."""
    carrier = network(comm).carrier
    choice, lost = random.Random(comm.rank), 0
    while not stop.wait(choice.uniform(0.1, 0.5)):
        up = [index for index, rail in enumerate(carrier.rails) if rail.state == UP]
        if len(up) > 1:
            carrier.drop(choice.choice(up))
            lost += 1
    return lost


def exchange(comm, seed, until):
    """Messages and reductions of random sizes until rank 0 has no more time; how many."""
    choice, count, other = random.Random(seed), 0, 1 - comm.rank
    while comm.broadcast_object(time.monotonic() < until):
        for _ in range(20):
            data = np.random.default_rng(choice.randrange(1 << 30)).integers(
                0, 255, int(MOST_BYTES ** choice.random()), np.uint8
            )
            kind, sends = choice.random(), choice.random() < 0.5
            got = np.zeros_like(data)
            if kind < 0.2:
                got[:] = data & 1
                comm.all_reduce(got)
                assert (got == (data & 1) * 2).all()
            elif kind < 0.4:
                comm.sendrecv(data, other, got, other)
                assert (got == data).all()
            elif sends == (comm.rank == 0):
                comm.send(data, other)
                data[:] = 255
            else:
                time.sleep(max(0.0, random.uniform(-0.02, 0.005)))
                comm.recv(got, other)
                assert (got == data).all()
            count += 1
    return count


def work(comm, seconds):
    """The same in three threads, each with a communicator, while rails are lost; operations, and rails lost."""
    stop, done, lost = threading.Event(), [], []
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=lambda c, seed: done.append(exchange(c, seed, until)), args=(comm.split(0), seed))
        for seed in range(3)
    ]
    losing = threading.Thread(target=lambda: lost.append(lose_rails(comm, stop)))
    for thread in (losing, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    losing.join()
    assert len(done) == len(threads), "a thread has failed"
    return sum(done), lost[0]


@pytest.mark.parametrize("seconds", [4, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tls", ["0", "1"])
def test_rails_are_lost(tls, seconds):
    """Nothing is lost, doubled or mixed up, whichever rail is lost when."""
    variables = {"XVCOMM_DEVICE": "host", "XVCOMM_WIRE_THREADS": "5", "XVCOMM_TLS": tls}
    with World(hosts="a,b", env=variables, timeout=seconds + 100) as ranks:
        for operations, lost in ranks.run(work, seconds, timeout=seconds + 100):
            assert operations > 0 and lost > 0
