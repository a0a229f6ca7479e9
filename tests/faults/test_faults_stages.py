"""How far an operation is that has not ended, as other ranks read it: held back by the host, enqueued, or running."""

import time
from pathlib import Path

import numpy as np
import pytest

from xvcomm.testing.arrays import arrays
from xvcomm.testing.cases import SMALL_GPU_RINGS
from xvcomm.testing.inside import context
from xvcomm.testing.world import World
from xvcomm.trace.format import Stage, State
from xvcomm.types.deadline import Deadline
from xvcomm.types.opcode import OpCode

SOON = 60.0


def until(true):
    deadline = Deadline.after(SOON)
    while not true():
        assert not deadline.expired()
        time.sleep(0.02)


def stages_of_rank_1(comm, op, *wanted):
    """Wait until the operations of a kind that rank 1 is in have these stages; gives the lines of the report on them."""
    session, found = context(comm).session, []

    def look():
        found[:] = [r.stage for r in session.journal.newest(1, 16) if r.state == State.POSTED and r.op == op]
        return tuple(found) == wanted

    try:
        until(look)
    except AssertionError:
        pytest.fail(f"its stages are {found}")
    text = session.explaining.explain(Deadline.after(5)).text
    return [line for line in text.splitlines() if line.startswith("  rank 1 (") and f": {op} " in line]


def on_gpus(comm, folder, one_island):
    """The report on rank 1 at three moments, from rank 0, which keeps it waiting."""
    own, go_on, sent, told = arrays(comm), Path(folder, "go on"), Path(folder, "sent"), []
    x, large = own.put(np.ones(16)), own.put(np.ones(1 << 16))
    with comm.split(0) as group:
        group.barrier()
        if comm.rank == 0:
            told.append(stages_of_rank_1(comm, OpCode.ALL_REDUCE, Stage.RUNNING))
            go_on.touch()
            # In two islands rank 1 waits until this rank opens the ring between both.
            last = Stage.ENQUEUED if one_island else Stage.CALLED
            told.append(stages_of_rank_1(comm, OpCode.ALL_REDUCE, Stage.RUNNING, Stage.ENQUEUED, last))
        group.all_reduce(x)
        if comm.rank == 1:
            until(go_on.exists)
        group.all_reduce(x)
        group.all_reduce(large)
        own.get(large)
        if comm.rank == 1:
            works = [group.irecv(own.put(np.zeros(16)), 0) for _ in range(2)]
            until(sent.exists)  # a wait for a message lets all of its ring go
            for work in works:
                work.synchronize()
        elif comm.rank == 0:
            told.append(stages_of_rank_1(comm, OpCode.RECV, Stage.RUNNING, Stage.HELD))
            group.send(x, 1)
            group.send(x, 1)
            sent.touch()
        group.barrier()
    return told


@pytest.mark.parametrize("islands", [{}, {"islands": "a:2,b:2"}], ids=["one island", "two islands"])
def test_operations_of_gpus(rocm_path, tmp_path, islands):
    pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install hip-python")
    environment = {"ROCM_PATH": str(rocm_path), "HIPHOST_DEVICES": "4", **SMALL_GPU_RINGS}
    with World(4, devices="rocm:4", env=environment, timeout=100, **islands) as world:
        running, enqueued, held = world.run(on_gpus, str(tmp_path), not islands)[0]
    # In two islands of few ranks a short sum has no native call.
    way = "rings in shared memory" if islands else "the native library"
    assert f", by {way}, running: all earlier operations of its stream are over; waits for 0" in running[0]
    assert f", by {way}, enqueued behind earlier work of its stream; waits for 0" in enqueued[1]
    last = "not yet enqueued by the host" if islands else "enqueued behind earlier work of its stream"
    assert f", by the native library{' + ' + way if islands else ''}, {last}; waits for 0" in enqueued[2]
    assert "recv from rank 0" in held[1] and "held back by the host (deferred queue); waits for 0" in held[1]


def on_the_host(comm):
    told = []
    if comm.rank == 1:
        comm.barrier()
        comm.all_reduce(np.ones(16), async_op=True).wait()
    else:
        comm.barrier()
        told = stages_of_rank_1(comm, OpCode.ALL_REDUCE, Stage.WORKER)
        comm.all_reduce(np.ones(16))
    return told


def test_a_collective_of_the_worker_thread():
    with World(2, timeout=100) as world:
        (line,) = world.run(on_the_host)[0]
    assert "all_reduce #" in line and "run by the host's worker thread; waits for 0" in line
