"""Later collectives between two islands of one rank in host memory, which compiled code runs: results, errors and aborts."""

import signal
import time

import numpy as np
import pytest
from repeated_calls import begun_by_python

from xvcomm.errors import Aborted, ClosedError, DeadlineExceeded, MismatchError, PeerLost
from xvcomm.testing.world import World

LIMIT = 20
SIZES = [1, 3000, 8000, 1 << 18, 3 << 20]
"""Elements: up to one slot of a ring, several, more than a ring holds, and several segments."""
HOSTS = {"one host": "x,x", "two hosts": "x,y"}


@pytest.fixture(params=HOSTS)
def pair(request):
    with World(islands="a,b", hosts=HOSTS[request.param], timeout=LIMIT) as world:
        yield world


def warm(comm, count=10):
    """Let compiled code run an all_reduce in place."""
    for _ in range(3):
        comm.all_reduce(np.zeros(count, np.float32))


def repeated(comm):
    """Calls with ever new arrays; which of them Python has begun after the first ones."""
    begun = []
    for count in SIZES:
        for turn in range(5):
            x, y = np.arange(count) * (comm.rank + 1) + turn, np.zeros(count, np.int64)
            sums, firsts = 3 * np.arange(count) + 2 * turn, np.arange(count) + turn
            with begun_by_python(comm) as mock:
                comm.all_reduce(x, out=y)
                np.testing.assert_array_equal(y, sums)
                first = comm.broadcast(x.copy(), 0)
                np.testing.assert_array_equal(first, firsts)
                in_place = comm.all_reduce(x)
                np.testing.assert_array_equal(in_place, sums)
            if turn > 2:
                begun.append((count, mock.call_count))
    return begun


def test_compiled_code_runs_collectives_that_consist_of_messages():
    with World(islands="a,b", hosts="x,y", timeout=LIMIT) as world:
        for begun in world.run(repeated):
            assert begun == [(count, 0) for count in SIZES for _ in range(2)]


def test_results_are_the_same_on_one_host(pair):
    assert len(pair.run(repeated)) == 2


class Interrupted(Exception):
    """Raised by a signal handler."""


def interrupt(*_):
    raise Interrupted


def failing(comm, kind):
    """A failure of a collective that compiled code runs, in a communicator of its own; its error's text."""
    both = comm.split(0)
    warm(both)
    warm(both, 11)
    try:
        if kind == "mismatch":
            with pytest.raises(MismatchError) as caught:
                both.all_reduce(np.zeros(10 + both.rank, np.float32))
        elif both.rank == 1:
            time.sleep(1)
            with pytest.raises((PeerLost, Aborted, DeadlineExceeded)) as caught:
                both.all_reduce(np.zeros(10, np.float32))
        elif kind == "deadline":
            with pytest.raises(DeadlineExceeded) as caught:
                both.all_reduce(np.zeros(10, np.float32), timeout=0.2)
        elif kind == "interrupt":
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.005)  # while compiled code waits
            with pytest.raises(Interrupted):
                both.all_reduce(np.zeros(10, np.float32))
            with pytest.raises(Aborted) as caught:
                both.all_reduce(np.zeros(10, np.float32))
        else:
            signal.signal(signal.SIGALRM, lambda *_: both.abort("enough"))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Aborted) as caught:
                both.all_reduce(np.zeros(10, np.float32))
        return str(caught.value)
    finally:
        both.close()


@pytest.mark.parametrize("kind", ["mismatch", "deadline", "abort", "interrupt"])
def test_failures_end_a_collective_on_both_ranks(pair, kind):
    texts = pair.run(failing, kind)
    assert all("all_reduce" in text for text in texts)
    if kind == "mismatch":
        assert all("10 x float32" in text and "11 x float32" in text for text in texts)


def closed(comm):
    """A call of a shape that was called once before the communicator was closed."""
    both = comm.split(0)
    both.all_reduce(np.zeros(10))
    both.close()
    with pytest.raises(ClosedError):
        both.all_reduce(np.zeros(10))


def test_no_call_is_prepared_after_close(pair):
    pair.run(closed)
