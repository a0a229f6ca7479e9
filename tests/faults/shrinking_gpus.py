"""What ranks with GPU memory do when others die, and afterwards: for the stand-in of AMD's libraries, and for real GPUs."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
from growing import take_in
from shrinking import BIG, SOON, die, own, shrunk, works

import xvcomm
from xvcomm.errors import ClosedError, PeerLost
from xvcomm.testing import collectives, graphs, pointtopoint
from xvcomm.testing.arrays import DeviceArrays, arrays, on_device
from xvcomm.testing.inside import context
from xvcomm.testing.signals import Signals, await_that

PHASES = ("idle", "native", "messages", "streams", "running", "graph")
"""What the ranks are in when some of them die."""
PLACES = {
    "1 and 1": ("{gpu}:2", "a,b", (1,)),
    "1, 1 and 1": ("{gpu}:3", "a,b,c", (0,)),
    "one island of 2": ("{gpu}:2", None, (1,)),
    "one island of 3": ("{gpu}:3", None, (1,)),
    "2 of one island of 4": ("{gpu}:4", None, (1, 2)),
    "2 and 2": ("{gpu}:4", "a:2,b:2", (2,)),
    "2 and 2 in turns": ("{gpu}:4", "a,b,a,b", (0,)),
    "an island of 2 and 2": ("{gpu}:4", "a:2,b:2", (2, 3)),
    "1 and a host": ("{gpu}:1,host:1", None, (1,)),
    "a GPU of 2 and 2 hosts": ("{gpu}:2,host:2", None, (1,)),
    "all GPUs, of 2 and 2 hosts": ("{gpu}:2,host:2", None, (0, 1)),
}
"""Devices, islands, and the ranks that die."""
_SMALL, _STREAMS, _WAIT_SECONDS = 1000, 3, 0.05
_WEIGHTS = 100_003


def survive(comm, phase, victims):
    """The victims die in this phase, and the others go on; the seconds until they had all errors, and those of `shrink`."""
    left, graph = [rank for rank in comm.job_ranks if rank not in victims], _captured(comm, phase)
    begun, lost = _lose(comm, phase, victims, graph)
    made, seconds = shrunk(comm)
    ended(begun)
    if graph is not None:
        with pytest.raises(ClosedError, match="shrunk"), on_device(comm):
            graphs.captured(comm, lambda: comm.all_reduce(arrays(comm).put(np.ones(_SMALL))))
    carries(made, left)
    made.close()
    return round(lost, 3), round(seconds, 3)


def survive_and_take_in(comm, phase, victims):
    """The same, and processes in the places of the victims come back and get the weights of one that has stayed."""
    everyone, weights = comm.job_ranks, arrays(comm).put(_weights())
    begun, _ = _lose(comm, phase, victims, _captured(comm, phase))
    left, _ = shrunk(comm)
    ended(begun)
    carries(left, [rank for rank in everyone if rank not in victims])
    made, seconds = take_in(left, len(victims))
    catch_up(made, weights, next(rank for rank in everyone if rank not in victims))
    carries(made, everyone)
    made.close()
    return round(seconds, 3)


def come_back(everyone, victims):
    """In a restarted process: join the others, get the weights, and check that all works."""
    with xvcomm.init() as comm:
        catch_up(comm, arrays(comm).put(np.zeros(_WEIGHTS)), next(rank for rank in everyone if rank not in victims))
        carries(comm, everyone)


def catch_up(comm, weights, replica):
    """A rank that has the weights sends them to all others."""
    comm.broadcast(weights, replica)
    assert (arrays(comm).get(weights) == _weights()).all()


def carries(comm, ranks):
    """Check that all kinds of operations work, and that islands of several ranks on GPUs use their native library."""
    works(comm, ranks)
    collectives.check_all_reduce(comm, "float32", "sum", 10_001)
    collectives.check_reduce_scatter(comm, "float32", "sum", 101)
    for check in (collectives.check_broadcast, collectives.check_all_gather, collectives.check_all_to_all):
        check(comm, "float32", 101)
    collectives.check_split(comm)
    if comm.size > 1:
        pointtopoint.check_exchange(comm, "float32", 10_001)
    if "host" not in comm.devices and comm.size > 1:
        graphs.check_graph_of_few(comm)
    native = context(comm).session.backend.native
    if comm.topology.island_of(comm.rank).size > 1 and comm.device != "host":
        assert any(native in record.way for record in comm.history()), f"{native} was not used"


def ended(begun):
    """Check that what was under way has ended, and that what waited for a victim has an error."""
    for work, waits in begun:
        await_that(work.done)
        assert isinstance(work.exception(), PeerLost | ClosedError) or (work.exception() is None and not waits)


def _lose(comm, phase, victims, graph):
    """The victims die; the others have PeerLost from all that waits for them, and their streams go on."""
    comm.barrier()
    a, signals, doomed = arrays(comm), Signals(comm), own(comm) in victims
    others = [rank for rank in range(comm.size) if comm.job_ranks[rank] not in victims]
    late = others[0] if len(others) > 1 and phase in ("native", "graph") else None  # until they are dead
    if doomed:
        with contextlib.suppress(PeerLost):  # another victim may be dead
            begun = _begin(comm, phase, victims, graph)
            signals.hear("waiting", others)
            if phase == "running":
                _run(comm, time.monotonic() + _WAIT_SECONDS)
        die()
    begun = [] if comm.rank == late else _begin(comm, phase, victims, graph)
    signals.tell("waiting")
    since, gone = time.monotonic(), context(comm).session.liveness.gone
    if comm.rank == late:
        await_that(lambda: all(map(gone, victims)))
    with pytest.raises(PeerLost):
        _run(comm, since + SOON)
    for work, waits in begun:
        with pytest.raises(PeerLost) if waits else contextlib.suppress(PeerLost):
            work.synchronize()
    a.get(a.put(np.ones(_SMALL)))
    seconds = time.monotonic() - since
    assert seconds < SOON
    return begun, seconds


def _run(comm, until):
    """Operations of all kinds, one after the other, until a time."""
    a = arrays(comm)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    while time.monotonic() < until:
        comm.all_reduce(a.put(np.ones(_SMALL)))
        a.get(comm.all_reduce(a.put(np.ones(BIG))))
        a.get(comm.sendrecv(a.put(np.ones(BIG // 8)), after, a.put(np.ones(BIG // 8)), before))
        comm.broadcast(a.put(np.ones(BIG // 8)), comm.size - 1, async_op=True).synchronize()


def _begin(comm, phase, victims, graph):
    """Start what is under way when the victims die: (Work, whether it waits for one of them)."""
    if phase == "native":
        return _in_a_collective(comm, victims)
    if phase == "messages":
        return _in_messages(comm, victims)
    if phase == "streams":
        return _on_streams(comm, victims)
    if phase == "graph" and own(comm) not in victims:
        graph()
    return []


def _in_a_collective(comm, victims):
    """All but the first survivor are in a collective; with one survivor, all but the victims."""
    doomed, alone = own(comm) in victims, comm.size - len(victims) == 1
    if doomed and alone:
        return []
    return [(comm.all_reduce(arrays(comm).put(np.ones(BIG)), async_op=True), not doomed)]


def _in_messages(comm, victims):
    """Survivors and victims exchange what is much longer than a ring; survivors also wait for what never comes."""
    a, doomed = arrays(comm), own(comm) in victims
    begun = []
    for peer in range(comm.size):
        if (comm.job_ranks[peer] in victims) != doomed:
            begun += [(comm.isend(a.put(np.ones(BIG)), peer), False), (comm.irecv(a.put(np.ones(BIG)), peer), False)]
            if not doomed:
                begun.append((comm.irecv(a.put(np.ones(_SMALL)), peer, channel=1), True))
    return begun


def _on_streams(comm, victims):
    """On several streams, and in another communicator too: what survivors began, and the victims do not take part in."""
    beside, device = comm.split(0), context(comm).device
    beside.barrier()  # which joins the native library
    if own(comm) in victims:
        return []
    begun, peer = [], comm.job_ranks.index(victims[0])
    for number in range(_STREAMS):
        a = DeviceArrays(device) if comm.device != "host" else arrays(comm)
        stream = getattr(a, "handle", None)
        place = {"channel": 1 + number, "stream": stream}
        begun.append((comm.irecv(a.put(np.ones(_SMALL)), peer, **place), True))
        begun.append((comm.isend(a.put(np.ones(BIG)), peer, **place), True))
        for each in (comm, beside):
            begun.append((each.all_reduce(a.put(np.ones(_SMALL)), async_op=True, stream=stream), True))
    return begun


def _captured(comm, phase):
    """A graph of a collective and an exchange, for the phase that launches it."""
    if phase != "graph":
        return None
    a = arrays(comm)
    x, y = a.put(np.ones(BIG)), a.put(np.zeros(BIG))
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def enqueue():
        comm.all_reduce(x, "avg")
        comm.sendrecv(x, after, y, before)

    with on_device(comm):
        enqueue()
        launch = graphs.captured(comm, enqueue)
        launch()
        a.synchronize()
    return launch


def _weights():
    return np.arange(float(_WEIGHTS))
