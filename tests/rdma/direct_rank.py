"""This host's rank of a job whose GPUs are the stand-in's, for `test_rdma_direct_hosts`: rings lie in their memory, or do not.

Arguments: of each rank, `direct` if devices reach its GPU's memory, `refused` if not, `off` if they are not to.
"""

import sys

import job
import numpy as np

import xvcomm
from xvcomm.testing import inside, pointtopoint
from xvcomm.testing.arrays import arrays
from xvcomm.trace.snapshot import Grades
from xvcomm.types.deadline import Deadline

SIZES = (1, 100, 5_000, 300_000)
ROUNDS = 20


def exchange(comm):
    """Messages both ways and sums, compared bit by bit."""
    a, other = arrays(comm), 1 - comm.rank
    for number in range(ROUNDS):
        size = SIZES[number % len(SIZES)]
        mine, theirs = (np.arange(size, dtype=np.int64) * (rank + 3) + number for rank in (comm.rank, other))
        buffer = a.put(np.zeros_like(theirs))
        comm.sendrecv(a.put(mine), other, buffer, other)
        np.testing.assert_array_equal(a.get(buffer), theirs)
        np.testing.assert_array_equal(a.get(comm.all_reduce(a.put(mine))), mine + theirs)


def grades(wanted):
    """How far both devices of a rank come."""
    reached = {"direct": "direct", "refused": "exported"}.get(wanted)
    return tuple(Grades(f"rxe{nic}", reached, reached) for nic in range(2)) if reached else ()


def check_grades(comm, wanted):
    """Both ranks know how far the devices of each came with its GPU: this host's by shared memory, the other's by asking."""
    states = inside.context(comm).session.recorders.snapshot((0, 1), Deadline.after(job.SECONDS)).ranks
    assert [states[rank].grades for rank in range(2)] == list(map(grades, wanted)), states
    comm.barrier()


def main():
    """Take part, and say what was found."""
    wanted = sys.argv[1:]
    with xvcomm.init() as comm:
        reached = pointtopoint.rings_in_gpu_memory(comm, 100_003)
        assert reached == ([1 - comm.rank] if wanted[comm.rank] == "direct" else []), reached
        job.meet(comm)
        before = job.by_scheme(comm, "rdma")
        exchange(comm)
        check_grades(comm, wanted)
        assert job.by_scheme(comm, "rdma") - before > ROUNDS * sum(SIZES) // len(SIZES), inside.network(comm).paths()
    print("all right")


main()
