"""Operations run on every rank in the order in which the program calls them, so that ranks do not deadlock."""

from __future__ import annotations

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jaxchecks import equal, separate

from xvcomm.adapters import jax as xvjax
from xvcomm.trace import recorder
from xvcomm.types.opcode import OpCode

CALLS = 12


class Order:
    """Sizes, in float32 elements, of the collectives that this process has run."""

    def __enter__(self):
        self.sizes = []
        recorder.hooks.append(self._note)
        return self

    def __exit__(self, *exc):
        recorder.hooks.remove(self._note)

    def _note(self, record):
        self.sizes.append(record.nbytes // 4)


def independent(xs, reduce):
    """Calls without common operands; the first ones depend on the slowest computation."""
    results = []
    for number, x in enumerate(xs):
        for _ in range((CALLS - number) // 3):
            x = jnp.sin(x @ x)
        results.append(reduce(x.reshape(-1)[: number + 1]))
    return results


@separate
def in_a_program(comm):
    xs = [jnp.ones((150, 150)) * number for number in range(CALLS)]
    program = jax.jit(lambda xs: independent(xs, lambda x: xvjax.all_reduce(x, comm=comm)))
    jax.block_until_ready(program(xs))
    for _ in range(5):
        with Order() as order:
            jax.block_until_ready(program(xs))
        assert order.sizes == list(range(1, CALLS + 1))


def test_in_a_program(world):
    world.run(in_a_program)


@separate
def by_tokens(comm):
    xs = [jnp.ones((150, 150)) * number for number in range(CALLS)]

    def program(xs):
        token = xvjax.make_token()

        def reduce(x):
            nonlocal token
            y, token = xvjax.all_reduce(x, token=token, comm=comm)
            return y

        return independent(xs, reduce), token

    program = jax.jit(program)
    jax.block_until_ready(program(xs))
    for _ in range(5):
        with Order() as order:
            jax.block_until_ready(program(xs))
        assert order.sizes == list(range(1, CALLS + 1))


def test_by_tokens(pair):
    pair.run(by_tokens)


@separate
def of_programs(comm):
    """A slow program, a fast one that does not depend on it, an eager call; twice."""
    slow = jax.jit(lambda x: xvjax.all_reduce(jnp.sin(x @ x @ x)[0, :1], comm=comm))
    quick = jax.jit(lambda x: xvjax.all_reduce(x, comm=comm))
    big, two, three = jnp.ones((400, 400)), jnp.ones(2), jnp.ones(3)
    jax.block_until_ready((slow(big), quick(two)))
    for _ in range(5):
        with Order() as order:
            results = [slow(big), quick(two), xvjax.all_reduce(three, comm=comm), slow(big), quick(two)]
            jax.block_until_ready(results)
        assert order.sizes == [1, 2, 3, 1, 2]


def test_of_programs(world):
    world.run(of_programs)


@separate
def unused(comm):
    """An operation whose result is unused still runs, because other ranks wait for it."""
    with Order() as order:
        jax.jit(lambda x: (xvjax.all_reduce(x, comm=comm), x + 1)[1])(jnp.ones(3)).block_until_ready()
        jax.effects_barrier()
    assert order.sizes == [3]
    other = 1 - comm.rank

    def send_only(x):
        xvjax.send(x, other, comm=comm)

    jax.jit(send_only)(jnp.full(3, comm.rank, jnp.float32))
    equal(xvjax.recv(jnp.ones(3), other, comm=comm), np.full(3, other, np.float32))


def test_unused_results(pair):
    pair.run(unused)


@separate
def twice(comm):
    """Two equal calls are two operations."""
    with Order() as order:
        both = jax.jit(lambda x: xvjax.all_reduce(x, comm=comm) + xvjax.all_reduce(x, comm=comm))
        both(jnp.ones(3)).block_until_ready()
    assert order.sizes == [3, 3]


def test_equal_calls(pair):
    pair.run(twice)


@separate
def opposite(comm):
    """One rank sends and then receives, the other receives and then sends; several messages, all larger than a ring."""
    other = 1 - comm.rank

    @jax.jit
    def exchange(x):
        if comm.rank == 0:
            xvjax.send(x, other, 1, comm=comm)
            xvjax.send(x + 1, other, 2, comm=comm)
            return xvjax.recv(x, other, 3, comm=comm)
        first = xvjax.recv(x, other, 1, comm=comm)
        second = xvjax.recv(x, other, 2, comm=comm)
        xvjax.send(x, other, 3, comm=comm)
        return second - first

    x = jnp.full(1_000_000, comm.rank, jnp.float32)
    for _ in range(3):
        equal(exchange(x), np.ones(1_000_000, np.float32))


def test_opposite_directions(pair):
    pair.run(opposite)


@separate
def barriers(comm):
    """No rank leaves a barrier before the last one has entered it."""
    late = comm.size - 1
    for form in (lambda: xvjax.barrier(comm=comm), lambda: jax.jit(lambda: xvjax.barrier(comm=comm))()):
        form()
        jax.effects_barrier()
        started = time.monotonic()
        if comm.rank == late:
            time.sleep(0.3)
        form()
        jax.effects_barrier()
        assert comm.rank == late or time.monotonic() - started > 0.25
    token = jax.jit(lambda: xvjax.barrier(comm=comm, token=xvjax.make_token()))()
    equal(token, np.float32(0))


def test_barrier(world):
    world.run(barriers)


@separate
def others_go_on(comm):
    """While a program waits for another rank, Python threads run."""
    program, x = jax.jit(lambda x: xvjax.all_reduce(x, comm=comm)), jnp.ones(3)
    program(x).block_until_ready()
    over, turns = threading.Event(), []

    def count():
        while not over.wait(0.002):
            turns.append(time.monotonic())

    thread = threading.Thread(target=count)
    thread.start()
    begin = time.monotonic()
    if comm.rank:
        time.sleep(0.5)
    program(x).block_until_ready()
    end = time.monotonic()
    over.set()
    thread.join()
    assert end - begin > 0.4 or comm.rank
    assert sum(begin < turn < end for turn in turns) > 10


def test_threads_of_python_go_on(pair):
    pair.run(others_go_on)


@separate
def recorded(comm):
    """The flight recorder contains the user's call site."""
    call_sites = []
    recorder.hooks.append(hook := lambda record: call_sites.append((OpCode(record.op), record.call_site)))
    try:
        jax.jit(lambda x: xvjax.all_reduce(x, comm=comm))(jnp.ones(3)).block_until_ready()
        xvjax.all_reduce(jnp.ones(5), comm=comm)
    finally:
        recorder.hooks.remove(hook)
    assert [op for op, _ in call_sites] == [OpCode.ALL_REDUCE] * 2
    assert all(call_site.startswith("test_jax_order.py:") for _, call_site in call_sites), call_sites


def test_call_sites(pair):
    pair.run(recorded)


@separate
def tokens_dropped(comm):
    """Only results are used and all tokens are dropped: each rank still runs each operation."""
    root, other, rank = 0, 1 - comm.rank, comm.rank

    def message(x, token):
        if rank == 0:
            xvjax.send(x, other, token=token, comm=comm)
            return x
        return xvjax.recv(x, other, token=token, comm=comm)[0]

    x = jnp.arange(2, dtype=jnp.float32) + rank
    cases = {
        "broadcast": (lambda x, t: xvjax.broadcast(x, root, token=t, comm=comm)[0] * 2, [[0, 2], [0, 2]]),
        "reduce": (lambda x, t: xvjax.reduce(x, root, token=t, comm=comm)[0] + 1, [[2, 4], [2, 3]]),
        "gather": (lambda x, t: xvjax.gather(x, root, token=t, comm=comm)[0], [[0, 1, 1, 2], None]),
        "scatter": (lambda x, t: xvjax.scatter(x, root, token=t, comm=comm)[0], [[0], [1]]),
        "exchange": (lambda x, t: xvjax.sendrecv(x, other, x, other, token=t, comm=comm)[0], [[1, 2], [0, 1]]),
        "message": (message, [[0, 1], [0, 1]]),
    }
    for name, (operation, expected) in cases.items():
        program = jax.jit(operation)
        for _ in range(3):
            with Order() as order:
                found = program(x, xvjax.make_token())
                jax.block_until_ready(found)
                comm.barrier()
            assert len(order.sizes) > 1, name  # more than the barrier
            wanted = expected[rank]
            if wanted is not None:
                equal(found, np.array(wanted, np.float32), name)


def test_dropped_tokens(pair):
    pair.run(tokens_dropped)
