"""Direct reductions between the ranks' arrays: the same bits as staged ones, and no access to arrays of ranks that gave up."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from tracer import WRITE, hold_in_copy

from xvcomm.backends.host import direct
from xvcomm.backends.host.kernels import Mode
from xvcomm.backends.host.tuning import NEVER, TRIES
from xvcomm.errors import DeadlineExceeded, PeerLost
from xvcomm.testing.cases import reductions
from xvcomm.testing.inside import context
from xvcomm.testing.world import World
from xvcomm.types.dtype import BY_NAME, DTYPES, premul_sum

ODD = 1003
"""Bytes added to the smallest size with a choice, so that it is not divisible."""
SOON = 60.0
STAGED, DIRECT = 0, 1
BIG, HUGE = 1 << 23, 1 << 26


def native(comm):
    return context(comm).joined_native()


def line(comm, rank):
    """A rank's line in the arena."""
    return native(comm).member(rank)


def offers(comm):
    """Whether each rank offered its arrays in the last reduction that had the choice."""
    return [line(comm, rank).src != 0 for rank in range(comm.size)]


def settle(comm, way):
    """Fix the choice between direct and staged for all size classes that were used before."""
    comm.barrier()
    for tuning in native(comm).tunings.values():
        tuning.trials, tuning.best[:] = -1, [way, 1 - way]
    comm.barrier()


def reach(comm):
    """Let the ranks determine whether they can access each other's memory: 1, or -1."""
    comm.all_reduce(np.ones(direct.LEAST, np.uint8))
    return native(comm).access.reach


def some(dtype, count, seed):
    """Numbers whose sums and products depend on the order of operations."""
    rng = np.random.default_rng(seed)
    if dtype.kind in "iub":
        most = 1 if dtype.kind == "b" else 100
        return rng.integers(0, most, count, dtype=np.uint8, endpoint=True).astype(dtype.numpy)
    values = rng.uniform(-2, 2, count)
    return (values + 1j * rng.uniform(-2, 2, count) if dtype.kind == "c" else values).astype(dtype.numpy)


def both_ways(comm, name, ops):
    """Reductions of a dtype give the same bits directly and staged: in place, not in place, async, with uneven blocks."""
    dtype = BY_NAME[name]
    count = (direct.LEAST + ODD) // dtype.itemsize + comm.size
    mine = some(dtype, count, comm.rank)
    counts = [count // comm.size + (7 if r == 0 else 0) for r in range(comm.size)]
    counts[-1] += count - sum(counts)
    for op in ops:
        how = premul_sum(3) if op == "premul_sum" else op

        def results():
            x, y, z, out, root = mine.copy(), mine.copy(), mine.copy(), np.empty_like(mine), mine.copy()
            comm.all_reduce(x, how)
            comm.all_reduce(y, how, out=out)
            comm.all_reduce(z, how, async_op=True).wait()
            assert out.tobytes() == x.tobytes() == z.tobytes(), (name, op)
            assert y.tobytes() == mine.tobytes(), "the input changed"
            comm.reduce(root, comm.size - 1, how)
            block = comm.reduce_scatter(y, how, counts=counts)
            return [a.tobytes() for a in (x, root, block)]

        results()  # once, so that every class of sizes is there
        settle(comm, STAGED)
        staged = results()
        settle(comm, DIRECT)
        assert results() == staged, (name, op)
        assert all(offers(comm))


@pytest.fixture(scope="module", params=(2, 3, 4))
def ranks(request):
    """Ranks of one island that can access each other's memory."""
    with World(request.param, timeout=100) as world:
        if set(world.run(reach)) != {1}:
            pytest.skip("processes may not use each other's memory here (kernel.yama.ptrace_scope, seccomp)")
        yield world


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_ways_give_the_same_bits(ranks, dtype):
    """Every dtype with all of its reductions on two and three ranks; with one reduction on four, which reduce like three."""
    ops = [str(op) for op in reductions(dtype)]
    if ranks.size > 3:
        ops = ops[dtype.code % len(ops) :][:1]
    ranks.run(both_ways, dtype.name, ops)


def choices(comm):
    """This rank's choices for two sizes, once made; takes the same number of calls on all ranks."""
    sub, results = comm.split(0), []
    reach(sub)
    for count in (direct.LEAST, 4 * direct.LEAST):
        calls, x = 0, np.empty(count // 4, np.int32)
        while not calls or native(sub).tunings[Mode.ALL, count.bit_length()].trials >= 0:
            x[...] = comm.rank + calls
            sub.all_reduce(x)
            assert (x == sum(range(comm.size)) + comm.size * calls).all()
            calls += 1
        results.append((calls, *native(sub).tunings[Mode.ALL, count.bit_length()].best))
    sub.close()
    return results


def test_all_ranks_choose_the_same(ranks):
    first, *others = ranks.run(choices)
    assert all(other == first for other in others)
    for calls, staged, straight in first:
        assert calls >= 2 * TRIES
        assert 0 < staged < NEVER and 0 < straight < NEVER


def sums(comm):
    """Several large reductions with checked results; returns which ranks offered arrays in the end."""
    for i in range(2 * TRIES + 2):
        x = comm.all_reduce(np.full(direct.LEAST, comm.rank + i, np.float32))
        assert (x == sum(range(comm.size)) + comm.size * i).all()
    return native(comm).access.reach, offers(comm)


def test_one_rank_disables_process_memory():
    """Through its environment: all ranks stage."""
    with World(3, env=[{}, {"XVCOMM_PROCESS_MEMORY": "0"}, {}]) as world:
        found = world.run(sums)
        assert found[1][0] == -1
        assert not any(offered[1] for _, offered in found)
        if found[0][0] == found[2][0] == 1:
            assert found[0][1] == [True, False, True]


def fake_process_id(comm):
    """Make rank 1's memory look like that of another process, as if process ids were of different namespaces."""
    comm.barrier()
    if comm.rank == 1:
        line(comm, 1).process.value += 1
    comm.barrier()


def test_another_process_with_the_same_pid():
    """No rank accesses that memory; all stage."""
    with World(3) as world:
        world.run(fake_process_id)
        found = world.run(sums)
        assert found[0][0] == found[2][0] == -1
        assert not any(offered[0] or offered[2] for _, offered in found)


def give_up(comm, way):
    """All but the last rank join and give up; the last one comes later. Returns whether all arrays are unchanged."""
    reach(comm)
    sub = comm.split(0)
    reach(sub)
    settle(sub, way)
    x = np.full(direct.LEAST // 4, comm.rank + 1, np.int32)
    late = comm.rank == comm.size - 1
    if late:
        comm.barrier()
    try:
        sub.all_reduce(x, timeout=0.3)
    except DeadlineExceeded:
        pass
    else:
        return "no error"
    x[:] = -1  # the array is this rank's own again
    if not late:
        comm.barrier()
    comm.barrier()
    sub.close()
    return bool((x == -1).all())


@pytest.mark.parametrize("way", [STAGED, DIRECT])
def test_arrays_of_a_rank_that_gave_up_are_not_accessed(ranks, way):
    assert ranks.run(give_up, way) == [True] * ranks.size


def continue_after_sigstop(comm, pids):
    """The last rank stops itself during a copy; another rank gives up, reuses its array and continues it."""
    reach(comm)
    sub = comm.split(0)
    x = np.ones(HUGE // 4, np.float32)
    reach(sub)
    sub.all_reduce(x)
    settle(sub, DIRECT)
    sub.barrier()
    if comm.rank == comm.size - 1:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    try:
        while True:
            sub.all_reduce(x, timeout=1.0)
    except DeadlineExceeded:
        pass
    x[:] = -1
    if comm.rank == 0:
        os.kill(pids[-1], signal.SIGCONT)
    comm.barrier()
    sub.close()
    return bool((x == -1).all())


def test_a_rank_stopped_during_a_copy_accesses_nothing_later(ranks):
    for rank in range(ranks.size):
        ranks.submit(rank, continue_after_sigstop, ranks.pids())
    assert ranks.collect() == [True] * ranks.size


def continue_after_hold_in_copy(comm, pids):
    """As `continue_after_sigstop`, but held at the entry of the system call that copies."""
    reach(comm)
    sub = comm.split(0)
    x = np.ones(HUGE // 4, np.float32)
    reach(sub)
    sub.all_reduce(x)
    settle(sub, DIRECT)
    held = hold_in_copy(pids[-1], WRITE) if comm.rank == 0 else None
    comm.barrier()
    try:
        sub.all_reduce(x, timeout=1.0)
    except DeadlineExceeded:
        pass
    else:
        return "no error"
    x[:] = -1
    if held is not None:
        assert held.there.is_set()
        held.release()
    comm.barrier()
    sub.close()
    return bool((x == -1).all())


def test_a_rank_held_before_a_copy_writes_nothing_after_the_timeout(ranks):
    """The kernel must find the memory withdrawn when the rank continues."""
    for rank in range(ranks.size):
        ranks.submit(rank, continue_after_hold_in_copy, ranks.pids())
    assert ranks.collect() == [True] * ranks.size


def for_ever(comm):
    x = np.ones(BIG // 4, np.float32)
    reach(comm)
    comm.all_reduce(x)
    settle(comm, DIRECT)
    comm.barrier()
    while True:
        comm.all_reduce(x)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("delay", [0.0, 0.003, 0.011])
def test_killed_in_the_middle(size, delay):
    with World(size) as world:
        world.run(reach)
        for rank in range(size):
            world.submit(rank, for_ever)
        time.sleep(0.5 + delay)
        killed = time.monotonic()
        world.kill(size - 1)
        outcomes = world.collect()
        assert time.monotonic() - killed < SOON
        for outcome in outcomes[:-1]:
            assert isinstance(outcome, PeerLost) and outcome.peer == size - 1, outcome
