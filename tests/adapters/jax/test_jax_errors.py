"""Invalid input, ranks that disagree or die, programs that are run in another process: errors with a class and a remedy."""

from __future__ import annotations

import pickle
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxchecks import equal, separate, started

from xvcomm.adapters import jax as xvjax
from xvcomm.errors import (
    Aborted,
    ArgumentError,
    ArrayError,
    ClosedError,
    DTypeError,
    MismatchError,
    NotPicklable,
    PeerLost,
    XvcommError,
)

SOON = 60.0


@separate
def bad_arrays(comm):
    reduce = partial(xvjax.all_reduce, comm=comm)
    with pytest.raises(DTypeError, match=r"1099511627776 does not fit.*jax_enable_x64"):
        reduce(1 << 40)
    for wide in (np.ones(3), np.arange(3), np.float64(1), np.ones(3, np.uint64), np.ones(3, np.complex128)):
        with pytest.raises(DTypeError, match=r"64 bits are off.*jax_enable_x64"):
            reduce(wide)
    with pytest.raises(DTypeError, match="64 bits are off"):
        xvjax.recv(jax.ShapeDtypeStruct((3,), np.float64), 1 - comm.rank, comm=comm)
    with pytest.raises(ArrayError, match=r"list is not an array.*each leaf"):
        reduce([jnp.ones(3)])
    with pytest.raises(ArrayError, match="NoneType is not an array"):
        reduce(None)
    with pytest.raises(DTypeError, match="key_data"):
        reduce(jax.random.key(0))
    with pytest.raises(DTypeError, match="int4 is not supported"):
        reduce(jnp.ones(4, jnp.int4))
    with pytest.raises(DTypeError, match=r"bitwise|band is defined on integers"):
        reduce(jnp.ones(3), "band")
    with pytest.raises(DTypeError, match="unknown reduction 'mean'"):
        reduce(jnp.ones(3), "mean")
    with pytest.raises(ArrayError, match="a scalar has no rows"):
        xvjax.reduce_scatter(jnp.ones(()), comm=comm)
    with pytest.raises(ArrayError, match=r"3 rows are not a multiple of 2 ranks; pass counts="):
        xvjax.reduce_scatter(jnp.ones(3), comm=comm)


@separate
def bad_arguments(comm):
    x, other = jnp.ones(4), 1 - comm.rank
    with pytest.raises(ArgumentError, match="root 2: ranks of this communicator go from 0 to 1"):
        xvjax.broadcast(x, 2, comm=comm)
    with pytest.raises(ArgumentError, match="is this rank itself"):
        xvjax.send(x, comm.rank, comm=comm)
    with pytest.raises(ArgumentError, match=r"dst is a tracer.*static_argnames"):
        jax.jit(lambda x, dst: xvjax.send(x, dst, comm=comm))(x, other)
    with pytest.raises(ArgumentError, match=r"root=0.5: expected an integer"):
        xvjax.gather(x, 0.5, comm=comm)
    with pytest.raises(ArgumentError, match="tag -1"):
        xvjax.send(x, other, -1, comm=comm)
    with pytest.raises(ArgumentError, match="channel 99: must be an integer from 0 to 31"):
        xvjax.recv(x, other, channel=99, comm=comm)
    with pytest.raises(ArgumentError, match=r"add up to 3 rows, but the array has 4"):
        xvjax.scatter(x, counts=[1, 2], comm=comm)
    with pytest.raises(ArgumentError, match=r"expected 2 numbers of rows"):
        xvjax.all_gather(x, counts=[4], comm=comm)
    with pytest.raises(ArgumentError, match="both send_counts and recv_counts"):
        xvjax.all_to_all(x, send_counts=[2, 2], comm=comm)
    with pytest.raises(ArgumentError, match=r"expected the result of make_token\(\)"):
        xvjax.all_reduce(x, comm=comm, token=jnp.ones(3))
    with pytest.raises(ArgumentError, match="replicated= is for sums"):
        xvjax.all_reduce(x, "max", comm=comm, replicated=True)
    with pytest.raises(ArgumentError, match="no communicator: pass comm="):
        xvjax.all_reduce(x)
    with pytest.raises(ArgumentError, match="static_argnames"):
        xvjax.all_reduce(x, comm=jnp.ones(3))
    kept = []
    jax.jit(lambda x: kept.append(x) or x)(x)
    with pytest.raises(ArrayError, match="tracer that was kept outside of the function"):
        xvjax.all_reduce(kept[0], comm=comm)
    with pytest.raises(ArrayError, match=r"tracer.*xvcomm\.adapters\.jax"):
        jax.jit(lambda x: comm.all_reduce(x))(x)
    equal(xvjax.all_reduce(x, comm=comm), np.full(4, 2, np.float32))  # nothing of this reached the other rank


def test_bad_arrays(pair):
    pair.run(bad_arrays)


def test_invalid_arguments(pair):
    pair.run(bad_arguments)


def mismatch(comm, form):
    """Rank 1 passes another shape; both ranks raise with both descriptions, and JAX stays usable."""
    sub, x = comm.split(0), jnp.ones(4 + comm.rank, jnp.float32)
    call = partial(xvjax.all_reduce, comm=sub)
    started = time.monotonic()
    if form == "eager":
        with pytest.raises(MismatchError) as caught:
            call(x)
        error = caught.value
    else:
        operation = call if form == "jit" else lambda x: call(x, token=xvjax.make_token())[0]
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="MismatchError") as outer:
            jax.jit(operation)(x).block_until_ready()
        error = xvjax.cause(outer.value)
        with pytest.raises(MismatchError), xvjax.named_errors():
            jax.jit(operation)(x).block_until_ready()
    assert isinstance(error, MismatchError)
    assert "4 x float32" in str(error) and "5 x float32" in str(error), error
    assert "raised in all_reduce" in str(error) and "at test_jax_errors.py:" in str(error), error
    assert time.monotonic() - started < SOON
    sub.close()
    equal(jax.jit(lambda x: x + 1)(jnp.zeros(2)), np.ones(2, np.float32))
    equal(xvjax.all_reduce(jnp.ones(2), comm=comm), np.full(2, comm.size, np.float32))
    jax.effects_barrier()


@pytest.mark.parametrize("form", ["eager", "jit", "token"])
def test_different_operations_on_the_ranks(pair, form):
    pair.run(mismatch, form)


def mismatched_message(comm, good):
    """Rank 0 sends from a program what rank 1 does not expect; both ranks are told both call sites."""
    sub = comm.split(0)
    program = jax.jit(lambda x: xvjax.send(x, 1, 7, comm=sub))
    with pytest.raises(MismatchError) as caught, xvjax.named_errors():
        for turn in range(good + 1):
            if comm.rank:
                sub.recv(np.zeros(4 if turn < good else 5, np.float32), 0, 7)
            else:
                jax.block_until_ready(program(jnp.ones(4, jnp.float32)))
        sub.barrier()
    sub.close()
    return str(caught.value)


@pytest.mark.parametrize("good", [0, 2])
def test_mismatched_messages(pair, good):
    for text in pair.run(mismatched_message, good):
        assert "sent 4 x float32, tag 7" in text and "expected 5 x float32, tag 7" in text
        assert "at test_jax_errors.py:" in text


@separate
def weak(comm, form):
    """Ranks that pass Python numbers of different types."""
    wrap = jax.jit if form == "jit" else lambda f: f
    reduce = wrap(lambda x: xvjax.all_reduce(x, comm=comm))
    equal(reduce(1.5), np.float32(3))
    equal(wrap(lambda: xvjax.all_reduce(jnp.full(3, 1.0), comm=comm))(), np.full(3, 2, np.float32))
    equal(wrap(lambda: xvjax.all_reduce(jnp.full(2, 1) * 2.0, comm=comm))(), np.full(2, 4, np.float32))
    with pytest.raises(MismatchError, match=r"1 x int32.*1 x float32|1 x float32.*1 x int32"), xvjax.named_errors():
        reduce(1.0 if comm.rank else 1).block_until_ready()


@pytest.mark.parametrize("form", ["eager", "jit"])
def test_numbers_of_different_kinds(world, form):
    world.run(weak, form)


def from_any(comm, form, what):
    """Rank 0 receives from any rank a message that is missing, or that does not match."""
    sub, status = comm.split(0), xvjax.Status()
    wrap = jax.jit if form == "jit" else lambda f: f
    started = time.monotonic()
    try:
        with xvjax.named_errors():
            if sub.rank == 0:
                take = partial(xvjax.recv, src=xvjax.ANY_SOURCE, tag=3, comm=sub, status=status)
                if what == "late":
                    sub.timeout = 1.0
                wrap(take)(jnp.zeros(2)).block_until_ready()
            elif what != "late":
                if what == "shape":
                    xvjax.send(jnp.ones(3), 0, 3, comm=sub)
                elif what == "tag":
                    xvjax.send(jnp.ones(2), 0, 4, comm=sub)
                elif what == "left":
                    sub.close()
                    return "", -1
            sub.barrier()
    except XvcommError as error:
        assert time.monotonic() - started < SOON
        return f"{type(error).__name__} {error}", status.source
    finally:
        sub.close()


@pytest.mark.parametrize("form", ["eager", "jit"])
@pytest.mark.parametrize(
    ("what", "expected"),
    [("shape", "MismatchError"), ("tag", "MismatchError"), ("left", "PeerLost"), ("late", "DeadlineExceeded")],
)
def test_receiving_from_any_rank(pair, form, what, expected):
    (first, told), (second, _) = pair.run(from_any, form, what)
    assert first.startswith(expected) and "at test_jax_errors.py:" in first and told == -1, first
    assert second.startswith(expected) or expected != "MismatchError", second


@separate
def wild_arguments(comm):
    x = jnp.ones(2)
    with pytest.raises(ArgumentError, match=r"expected xvcomm\.adapters\.jax\.Status"):
        xvjax.recv(x, None, comm=comm, status=xvjax.Status)
    alone = comm.split(comm.rank)
    with pytest.raises(ArgumentError, match="no other rank"):
        xvjax.recv(x, None, comm=alone)
    alone.close()
    with pytest.raises(ArgumentError, match=r"recv \(from any tag 0.*has no derivative.*recv of one rank and tag"):
        jax.grad(lambda like: xvjax.recv(like, xvjax.ANY_SOURCE, comm=comm).sum())(x)


def test_arguments_of_receives_from_any_rank(pair):
    pair.run(wild_arguments)


def closed(comm):
    sub, x = comm.split(0), jnp.ones(3)
    program = jax.jit(lambda x: xvjax.all_reduce(x, comm=sub))
    equal(program(x), np.full(3, 2, np.float32))
    sub.close()
    with pytest.raises(ClosedError), xvjax.named_errors():
        program(x).block_until_ready()
    with pytest.raises(ClosedError):
        xvjax.all_reduce(x, comm=sub)
    other = comm.split(0)
    if comm.rank == 0:
        other.abort("enough")
    with pytest.raises(Aborted, match="enough"), xvjax.named_errors():
        for _ in range(100):
            jax.jit(lambda x: xvjax.all_reduce(x, comm=other))(x).block_until_ready()
    other.close()
    with pytest.raises(ValueError, match="not mine"), xvjax.named_errors():
        raise ValueError("not mine")


def test_closed_and_aborted(pair):
    pair.run(closed)


def waiting(comm, form):
    """The last rank is killed while the others wait for it in a program."""
    if comm.rank == comm.size - 1:
        time.sleep(60)
    program = jax.jit(lambda x: xvjax.all_reduce(x, comm=comm))
    try:
        with xvjax.named_errors():
            (program if form == "jit" else partial(xvjax.all_reduce, comm=comm))(jnp.ones(3)).block_until_ready()
    except XvcommError as error:
        # JAX goes on: what does not communicate still runs.
        equal(jax.jit(lambda x: x + 1)(jnp.zeros(2)), np.ones(2, np.float32))
        return type(error).__name__, error.peer
    return None


@pytest.mark.parametrize(("islands", "form"), [("a:2", "jit"), ("a,b", "jit"), ("a,b", "eager")])
def test_a_rank_is_killed_during_an_operation(islands, form):
    with started(islands) as ranks:
        for rank in range(2):
            ranks.submit(rank, waiting, form)
        time.sleep(1.5)
        ranks.kill(1)
        since = time.monotonic()
        assert ranks.collect()[0] == (PeerLost.__name__, 1)
        assert time.monotonic() - since < SOON


@separate
def exported(comm):
    from jax import export

    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    checks = [export.DisabledSafetyCheck.custom_call("xvcomm_all_reduce")]
    for operation in (
        partial(xvjax.all_reduce, comm=comm),
        lambda x: xvjax.all_reduce(x, comm=comm, token=xvjax.make_token())[0],
    ):
        with pytest.raises(ArgumentError, match=r"cannot be exported.*compile ahead of time"):
            export.export(jax.jit(operation), disabled_checks=checks)(shape)
    with pytest.raises(NotPicklable, match=r"is bound to its process.*xvcomm\.init"):
        pickle.dumps(comm)


def test_export(pair):
    pair.run(exported)


def serialized(comm):
    """Compiled programs as bytes. Those with JAX effects raise at once; others work in the same process."""
    from jax.experimental import serialize_executable

    program = jax.jit(lambda x: xvjax.all_reduce(x, comm=comm)).lower(jnp.ones(4)).compile()
    with pytest.raises(ArgumentError, match=r"cannot be pickled.*trace and compile"):
        serialize_executable.serialize(program)
    program = jax.jit(lambda x: xvjax.all_reduce(x, token=xvjax.make_token(), comm=comm)).lower(jnp.ones(4)).compile()
    parts = serialize_executable.serialize(program)
    equal(serialize_executable.deserialize_and_load(*parts)(jnp.ones(4))[0], np.ones(4, np.float32))
    return pickle.dumps(parts)


def loaded(comm, data, used):
    """Load the same bytes in another process."""
    from jax.experimental import serialize_executable

    if used:
        xvjax.all_reduce(jnp.ones(3), comm=comm)
        jax.jit(lambda x: xvjax.all_reduce(x, comm=comm))(jnp.ones(3)).block_until_ready()
    with pytest.raises(Exception, match=r"xvcomm_all_reduce|cannot be exported or pickled") as caught:
        serialize_executable.deserialize_and_load(*pickle.loads(data))(jnp.ones(4))[0].block_until_ready()
    return str(caught.value)


def test_pickled_programs():
    with started("a") as one:
        data = one.run(serialized)[0]
    with started("b") as other:
        assert "xvcomm_all_reduce" in other.run(loaded, data, False)[0]
        message = other.run(loaded, data, True)[0]
    assert "ArgumentError: this program was compiled in another process (for all_reduce (sum) of float32[4]" in message
