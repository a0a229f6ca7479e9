"""Compiled programs on host memory run prepared operations without Python, which only handles exceptional cases."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxchecks import equal, separate, started

from xvcomm.adapters import jax as xvjax
from xvcomm.adapters.jax import compiled
from xvcomm.adapters.jax.customcalls import CollectiveCall
from xvcomm.errors import Aborted, ClosedError, DeadlineExceeded, MismatchError, PeerLost, XvcommError
from xvcomm.testing.world import World
from xvcomm.trace import recorder
from xvcomm.trace.format import State
from xvcomm.types.opcode import OpCode

SOON = 60.0
LATE = 0.3
"""Seconds; longer than compiled code waits before Python checks the deadline."""


@pytest.fixture(scope="module")
def island() -> Iterator[World]:
    """Two ranks in one island."""
    with started("a:2") as ranks:
        yield ranks


@contextlib.contextmanager
def python_refused():
    """Fail if Python runs a collective of a program."""

    def refuse(self, src, dst, stream):
        raise AssertionError(f"Python runs {self.text}")

    run = CollectiveCall.run
    CollectiveCall.run = refuse
    try:
        yield
    finally:
        CollectiveCall.run = run


def everything(x, comm):
    """Each collective, on a 4 x 3 array."""
    results = {
        "sum": xvjax.all_reduce(x, comm=comm),
        "max": xvjax.all_reduce(x, "max", comm=comm),
        "avg": xvjax.all_reduce(x, "avg", comm=comm),
        "reduce": xvjax.reduce(x, 1, comm=comm),
        "scattered": xvjax.reduce_scatter(x, comm=comm),
        "uneven": xvjax.reduce_scatter(x, counts=[1, 3], comm=comm),
        "gathered": xvjax.all_gather(x, comm=comm),
        "at the root": xvjax.gather(x, comm=comm),
        "from the root": xvjax.scatter(x, 1, comm=comm),
        "broadcast": xvjax.broadcast(x, 1, comm=comm),
        "exchanged": xvjax.all_to_all(x, comm=comm),
        "large": xvjax.all_reduce(jnp.tile(x, (40000, 1)), comm=comm),
    }
    xvjax.barrier(comm=comm)
    return results


def expected(rank, xs):
    mine, other = xs[rank], xs[1 - rank]
    block = slice(2 * rank, 2 * rank + 2)
    total = mine + other
    return {
        "sum": total, "max": np.maximum(mine, other), "avg": total / 2, "reduce": total if rank == 1 else mine,
        "scattered": total[block], "uneven": total[:1] if rank == 0 else total[1:], "gathered": np.concatenate(xs),
        "at the root": np.concatenate(xs) if rank == 0 else None, "from the root": xs[1][block], "broadcast": xs[1],
        "exchanged": np.concatenate([xs[0][block], xs[1][block]]), "large": np.tile(total, (40000, 1)),
    }  # fmt: skip


@separate
def all_collectives(comm):
    xs = [np.arange(12, dtype=np.float32).reshape(4, 3) * (rank + 1) for rank in range(2)]
    program = jax.jit(partial(everything, comm=comm))
    jax.block_until_ready(program(xs[comm.rank] + 1))
    for factor in (1, 2, 3):  # other data, mostly at other addresses
        with python_refused():
            found = jax.block_until_ready(program(jnp.asarray(xs[comm.rank] * factor)))
        for name, value in expected(comm.rank, [x * np.float32(factor) for x in xs]).items():
            if value is None:
                assert found[name] is None
            else:
                equal(found[name], value, name)
    jax.effects_barrier()


def test_all_collectives(island):
    island.run(all_collectives)


@separate
def recorded(comm):
    """Sequence numbers, call sites and states in the flight recorder, in one sequence with calls from Python."""
    x = jnp.ones(5, jnp.float32)
    program = jax.jit(lambda x: xvjax.all_reduce(x, comm=comm))
    program(x).block_until_ready()
    for number in range(1, 7):
        if number % 2:
            with python_refused():
                program(x).block_until_ready()
        else:
            comm.all_reduce(np.ones(7))
        record = comm.history()[-1]
        assert (record.sequence, record.op, record.state) == (number, OpCode.ALL_REDUCE, State.DONE)
        assert record.nbytes == (20 if number % 2 else 56)
        assert record.call_site.startswith("test_jax_compiled.py:") and record.ended >= record.posted > 0
    seen = []
    recorder.hooks.append(seen.append)
    program(x).block_until_ready()
    recorder.hooks.clear()
    assert [record.sequence for record in seen] == [7]
    with python_refused():
        program(x).block_until_ready()
    jax.effects_barrier()


def test_recorded(island):
    island.run(recorded)


@separate
def behind_asynchronous(comm):
    """A program does not overtake operations that were started before it."""
    program = jax.jit(lambda x: xvjax.all_reduce(x, comm=comm))
    x = jnp.ones(3, jnp.float32)
    program(x).block_until_ready()
    for _ in range(20):
        large = np.ones(300_000)
        works = [comm.all_reduce(large, async_op=True), comm.broadcast(np.ones(4), async_op=True)]
        equal(program(x), np.full(3, 2, np.float32))
        for work in works:
            work.wait()
        assert (large == 2).all()
    jax.effects_barrier()


def test_behind_asynchronous(island):
    island.run(behind_asynchronous)


@separate
def late(comm):
    """Python continues to wait for a rank that comes later than compiled code waits."""
    program = jax.jit(lambda x: xvjax.all_reduce(xvjax.all_gather(x, comm=comm), comm=comm))
    x = jnp.arange(3, dtype=jnp.float32)
    program(x).block_until_ready()
    for late_rank in (0, 1, 0):
        if comm.rank == late_rank:
            time.sleep(LATE)
        with python_refused():
            equal(program(x), np.array([0, 2, 4, 0, 2, 4], np.float32))
    jax.effects_barrier()


def test_a_late_rank(island):
    island.run(late)


def failing(comm, how):
    """The error that ends an operation in compiled code is raised with its class; the communicator is aborted, JAX stays
    usable.
    """
    sub = comm.split(0)
    sub.timeout = 1.0 if how == "deadline" else 20.0
    program = jax.jit(lambda x: xvjax.all_reduce(x, comm=sub))
    other = jax.jit(lambda x: xvjax.all_reduce(x, "max", comm=sub))
    x = jnp.ones(3, jnp.float32)
    for one in (program, other):
        one(x).block_until_ready()
    jax.effects_barrier()
    since = time.monotonic()
    error = None
    try:
        with xvjax.named_errors(), python_refused():
            if comm.rank == 0 or how == "mismatch":
                (program if comm.rank == 0 else other)(x).block_until_ready()
            elif how == "abort":
                time.sleep(LATE)
                sub.abort("enough")
            elif how == "leave":
                time.sleep(LATE)
                sub.close()
            else:
                with pytest.raises(XvcommError):
                    while True:
                        sub.check()
                        time.sleep(0.05)
    except XvcommError as raised:
        error = raised
    assert time.monotonic() - since < SOON
    sub.close()
    with pytest.raises(ClosedError), xvjax.named_errors():
        program(x).block_until_ready()
    equal(jax.jit(lambda x: x + 1)(jnp.zeros(2)), np.ones(2, np.float32))
    return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("mismatch", MismatchError, "all_reduce(max) of 3 x float32"),
        ("abort", Aborted, "enough"),
        ("leave", PeerLost, "rank 1"),
        ("deadline", DeadlineExceeded, "rank 1"),
    ],
)
def test_errors_during_an_operation(island, how, kind, text):
    name, message = island.run(failing, how)[0]
    assert name == kind.__name__ and text in message


def lost(comm):
    """Rank 1 is killed while rank 0 is in compiled code."""
    program = jax.jit(lambda x: xvjax.all_reduce(x, comm=comm))
    x = jnp.ones(3, jnp.float32)
    program(x).block_until_ready()
    if comm.rank == 1:
        time.sleep(LATE)
        os.kill(os.getpid(), signal.SIGKILL)
    since = time.monotonic()
    with pytest.raises(PeerLost) as caught, xvjax.named_errors(), python_refused():
        program(x).block_until_ready()
    assert time.monotonic() - since < SOON
    return caught.value.peer


def test_a_rank_is_killed_during_an_operation():
    with started("a:2") as ranks:
        for rank in range(2):
            ranks.submit(rank, lost)
        assert ranks.collect()[0] == 1


@separate
def threads(comm):
    """Several threads on one communicator: if compiled code finds it in use, Python waits for its turn."""
    program = jax.jit(lambda x, token: xvjax.all_reduce(x, comm=comm, token=token)[0])
    x, token = jnp.arange(4, dtype=jnp.float32), xvjax.make_token()
    program(x, token).block_until_ready()
    wrong = []

    def call():
        for _ in range(200):
            if not (np.asarray(program(x, token)) == np.arange(4) * 2).all():
                wrong.append("program")

    def call_python():
        for _ in range(200):
            if not (comm.all_reduce(np.arange(4, dtype=np.float32)) == np.arange(4) * 2).all():
                wrong.append("Python")

    callers = [threading.Thread(target=target) for target in (call, call, call_python)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_threads(island):
    island.run(threads)


def test_table():
    """Keys that hash to the same table entry are distinguished."""
    number = 1 << 40
    table = np.zeros(2 * compiled.ROOM, np.int64)
    for step in range(3):
        compiled.insert(table.ctypes.data, number + step * compiled.ROOM, 100 + step)
    entries = {int(key): int(value) for key, value in table.reshape(-1, 2) if value}
    assert entries == {number + step * compiled.ROOM: 100 + step for step in range(3)}
    assert [compiled.find(table.ctypes.data, n) for n in (*entries, number + 1, -5)] == [100, 101, 102, 0, 0]
