"""What a process of the job of section `faults` does: errors first, and the loss of a rank at the end."""

from __future__ import annotations

import time

import numpy as np

import xvcomm
from xvcomm.cli.certify.child import Log
from xvcomm.cli.certify.control import describe
from xvcomm.cli.certify.operations import words
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import Aborted, PeerLost
from xvcomm.testing import failures
from xvcomm.testing.arrays import arrays

LOST, GOES_ON = "a rank is lost", "going on without the lost rank"


def run(tell: Log) -> None:
    """Tell of each trial (`name`, `seconds`, `wrong`)."""
    comm = xvcomm.init()
    for check in failures.CHECKS:
        begun = time.monotonic()
        tell(name=words(check), begun=True)
        try:
            check(comm)
        except Exception as error:
            comm.abort(f"{words(check)} failed")
            told = "" if isinstance(error, Aborted) else describe(error)
            tell(name=words(check), seconds=time.monotonic() - begun, wrong=told or "given up for another rank")
            return
        tell(name=words(check), seconds=time.monotonic() - begun, wrong="")
    _lose(comm, tell)


def _lose(comm: Communicator, tell: Log) -> None:
    """Let the last rank die while the others wait for it, and go on with those."""
    last = comm.size - 1
    comm.barrier()
    if comm.rank == last:
        tell(name=LOST, begun=True)
        failures.die_awaited(comm)
    begun = time.monotonic()
    errors = failures.wait_for_last(comm)
    wrong = [str(error) for error in errors if not isinstance(error, PeerLost) or error.peer != last]
    tell(name=LOST, seconds=time.monotonic() - begun, wrong="; ".join(wrong[:1]))
    begun = time.monotonic()
    try:
        with comm.shrink() as rest:
            a = arrays(rest)
            total = a.get(rest.all_reduce(a.put(np.ones(1000))))
            wrong = [] if (total == last).all() else [f"all_reduce of the {last} ranks that are left gave {total[0]}"]
    except Exception as error:
        wrong = [describe(error)]
    tell(name=GOES_ON, seconds=time.monotonic() - begun, wrong="; ".join(wrong))
