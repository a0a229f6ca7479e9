"""What a rank of benchmarks/faults.py does: `faults_rank.py CASE SETTINGS`, the settings as JSON; prints the times as JSON.

Times are those of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from typing import Any

import numpy as np

import xvcomm
from xvcomm.cli.bench.report import Setting
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import DeadlineExceeded, PeerLost


def say(**figures: Any) -> None:
    """Print a line for the benchmark."""
    print(json.dumps(figures), flush=True)


def survive(comm: Communicator, late: int | None, seconds: float) -> None:
    """Ranks are lost, and the others go on; one may die so many seconds after it has noticed, while they shrink."""
    me, x = comm.rank, np.ones(1 << 18)
    comm.all_reduce(x.copy())
    say(begun=True)
    with contextlib.suppress(PeerLost):
        while True:
            comm.all_reduce(x.copy())
    lost = time.monotonic()
    if me == late:
        time.sleep(seconds)
        say(died=time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    comm = comm.shrink()
    shrunk = time.monotonic()
    assert comm.all_reduce(x.copy())[0] == comm.size
    say(lost=lost, shrunk=shrunk, ranks=comm.job_ranks)
    comm.barrier()
    comm.close()


def hang(comm: Communicator, late: int, seconds: float) -> None:
    """One rank never calls what the others do, which have so many seconds for it."""
    comm.barrier()
    say(begun=True)
    while comm.rank == late:
        time.sleep(1)  # until it is killed
    deadline = time.monotonic() + seconds
    try:
        comm.all_reduce(np.ones(10), timeout=seconds)
    except DeadlineExceeded as error:
        print(error, flush=True)
        say(deadline=deadline, printed=time.monotonic(), named=f"rank {late}" in str(error))


def main() -> None:
    """Join the job and do what is asked for."""
    comm = xvcomm.init()
    say(setting=asdict(Setting.of(comm.topology, (), rehearsal=True, transports=("tcp",))))
    {"survive": survive, "hang": hang}[sys.argv[1]](comm, **json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
