"""This host's rank of a job that certifies the sections given as arguments after a folder; rank 0 loses a rail of RDMA meanwhile.
It ends with the certificate's code. For `test_rdma_certify`.
"""

import sys
import threading

import job

import xvcomm
from xvcomm.cli.certify.options import Options
from xvcomm.cli.certify.runner import certify_job
from xvcomm.testing.inside import network

NBYTES = 20 << 20
"""The rail that is lost has carried a part of so many bytes."""


def lose(comm, over):
    """Lose a rail in the middle of the messages."""
    while job.by_scheme(comm, "rdma") < NBYTES:
        if over.wait(0.02):
            return
    path = next(path for path in network(comm).paths() if path.scheme == "rdma" and path.up)
    network(comm).lose(1 - comm.rank, (path.local, path.remote, path.number))


def main():
    """Take part."""
    folder, *sections = sys.argv[1:]
    over = threading.Event()
    with xvcomm.init() as comm:
        loser = threading.Thread(target=lose, args=(comm, over))
        if comm.rank == 0:
            loser.start()
        code, _ = certify_job(comm, Options(sections=tuple(sections), out=folder))
        over.set()
        if comm.rank == 0:
            loser.join()
    sys.exit(code)


main()
