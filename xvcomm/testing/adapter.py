"""Checks that arrays of any framework are accepted, keep their type, and give bitwise equal results beside those of any other.

Called on every rank of a communicator, with the framework of each rank: `world.run(check_collectives, ["torch", "jax"])` gives
rank 0 torch's arrays, rank 1 JAX's, rank 2 torch's again. Names are those of `frameworks.framework`; authors of an adapter name
a function of their own, `"mypackage.testing:framework"`. Dtypes are those that all of them support.
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xvcomm.comm.communicator import Communicator
from xvcomm.errors import ArrayError
from xvcomm.testing import frameworks
from xvcomm.testing.arrays import Array
from xvcomm.testing.cases import Reducing, assert_equal, assert_same_bits, distinct, uneven
from xvcomm.testing.frameworks import Framework
from xvcomm.testing.signals import Signals, await_that
from xvcomm.types.dtype import BY_NAME

_LARGE = 1 << 19
"""Elements of a message that does not fit a ring."""


def missing(comm: Communicator, names: Sequence[str]) -> str:
    """Why a rank's framework cannot create arrays there, or an empty text; the same on all ranks."""
    name = _name(comm, names)
    why = frameworks.missing(comm, name)
    return "; ".join(filter(None, comm.all_gather_object(why and f"{name}: {why}")))


def _name(comm: Communicator, names: Sequence[str]) -> str:
    return names[comm.rank % len(names)]


def _shared(comm: Communicator, names: Sequence[str]) -> tuple[Framework, list[str]]:
    """This rank's framework, and the dtypes that the frameworks of all ranks support."""
    f = frameworks.framework(comm, _name(comm, names))
    everybodys = comm.all_gather_object(f.dtypes)
    return f, [dtype for dtype in f.dtypes if all(dtype in theirs for theirs in everybodys)]


def check_collectives(comm: Communicator, names: Sequence[str]) -> None:
    """Every collective with every dtype."""
    f, dtypes = _shared(comm, names)
    assert dtypes, f"{names} have no element type in common"
    for dtype in dtypes:
        _check_reducing(comm, f, dtype)
        _check_moving(comm, f, dtype)
        _check_uneven(comm, f, dtype)


def _check_reducing(comm: Communicator, f: Framework, dtype: str) -> None:
    rows = 6 * comm.size
    case = Reducing.of(comm, dtype, "sum", (rows, 5))
    mine = case.inputs[comm.rank]
    own = slice(6 * comm.rank, 6 * comm.rank + 6)

    x = f.make(mine)
    y = comm.all_reduce(x)
    assert_equal(f.read(y), case.result, f"all_reduce of {dtype}")
    assert (y is x) == f.mutable and type(y) is type(x)
    if not f.mutable:
        assert_equal(f.read(x), mine, f"immutable input of {dtype}")

    x, out = f.make(mine), f.make(np.zeros_like(mine))
    y = comm.all_reduce(x, out=out)
    assert_equal(f.read(y), case.result, f"all_reduce of {dtype} into out")
    assert (y is out) == f.mutable and type(y) is type(x)
    assert_equal(f.read(x), mine, f"input of all_reduce of {dtype}")

    y = comm.reduce(f.make(mine), comm.size - 1)
    assert_equal(f.read(y), case.result if comm.rank == comm.size - 1 else mine, f"reduce of {dtype}")
    y = comm.reduce_scatter(f.make(mine), async_op=True).wait()
    assert_equal(f.read(y), case.result[own], f"reduce_scatter of {dtype}")
    out = f.make(np.zeros_like(mine[own]))
    y = comm.reduce_scatter(f.make(mine), out=out)
    assert_equal(f.read(y), case.result[own], f"reduce_scatter of {dtype} into out")
    assert (y is out) == f.mutable and type(y) is type(out)


def _check_moving(comm: Communicator, f: Framework, dtype: str) -> None:
    everything = distinct(BY_NAME[dtype], (2 * comm.size, 7), seed=1)
    own = slice(2 * comm.rank, 2 * comm.rank + 2)
    last = comm.size - 1

    shown = everything if comm.rank == last else np.zeros_like(everything)
    x = f.make(shown)
    y = comm.broadcast(x, last)
    assert_same_bits(f.read(y), everything, f"broadcast of {dtype}")
    assert type(y) is type(x)
    assert_same_bits(f.read(comm.all_gather(f.make(everything[own]))), everything, f"all_gather of {dtype}")
    out = f.make(np.zeros_like(everything))
    y = comm.all_gather(f.make(everything[own]), out=out, async_op=True).wait()
    assert_same_bits(f.read(y), everything, f"all_gather of {dtype} into out")
    assert (y is out) == f.mutable and type(y) is type(out)
    y = comm.gather(f.make(everything[own]))
    if comm.rank == 0:
        assert_same_bits(f.read(y), everything, f"gather of {dtype}")
    assert_same_bits(f.read(comm.scatter(f.make(shown), last)), everything[own], f"scatter of {dtype}")
    out = f.make(np.zeros_like(everything[own]))
    y = comm.scatter(f.make(shown) if comm.rank == last else None, last, out=out)
    assert_same_bits(f.read(y), everything[own], f"scatter of {dtype} into out")
    y = comm.all_to_all(f.make(np.repeat(everything[own], comm.size, axis=0)))
    want = np.concatenate([np.repeat(everything[2 * r : 2 * r + 2], comm.size, axis=0)[own] for r in range(comm.size)])
    assert_same_bits(f.read(y), want, f"all_to_all of {dtype}")


def _check_uneven(comm: Communicator, f: Framework, dtype: str) -> None:
    counts = uneven(3 * comm.size, comm.size)
    ends = np.cumsum((0, *counts))
    own = slice(int(ends[comm.rank]), int(ends[comm.rank + 1]))
    everything = distinct(BY_NAME[dtype], (sum(counts), 2), seed=2)
    y = comm.all_gather(f.make(everything[own]), counts=counts)
    assert_same_bits(f.read(y), everything, f"uneven all_gather of {dtype}")
    case = Reducing.of(comm, dtype, "max" if BY_NAME[dtype].kind != "c" else "sum", (sum(counts), 2))
    y = comm.reduce_scatter(f.make(case.inputs[comm.rank]), case.how, counts=counts)
    assert_equal(f.read(y), case.result[own], f"uneven reduce_scatter of {dtype}")
    mine = np.repeat(everything[:1], comm.size * (comm.rank + 1), axis=0)
    send = (comm.rank + 1,) * comm.size
    y = comm.all_to_all(f.make(mine), send_counts=send, recv_counts=[r + 1 for r in range(comm.size)])
    want = np.repeat(everything[:1], sum(range(1, comm.size + 1)), axis=0)
    assert_same_bits(f.read(y), want, f"uneven all_to_all of {dtype}")


def check_same_bits(comm: Communicator, names: Sequence[str]) -> None:
    """Rounded sums are bitwise equal for all frameworks: on all ranks, and in a second run."""
    f, dtypes = _shared(comm, names)
    rng = np.random.default_rng(comm.rank)
    for dtype in ("float64", "float32", "bfloat16", "float16"):
        if dtype in dtypes:
            mine = rng.standard_normal(5003).astype(BY_NAME[dtype].numpy)
            found = [_digest(f.read(comm.all_reduce(f.make(mine), "avg"))) for _ in range(2)]
            assert len({*found, *comm.all_gather_object(found[0])}) == 1, f"all_reduce of {dtype}: bits differ"


def _digest(x: Array) -> str:
    return hashlib.sha256(x.tobytes()).hexdigest()


def check_messages(comm: Communicator, names: Sequence[str]) -> None:
    """Every form of send and receive with every dtype, to the next rank and from the previous one."""
    f, dtypes = _shared(comm, names)
    for tag, dtype in enumerate(dtypes):
        mine, theirs = (distinct(BY_NAME[dtype], (3, 5), seed=rank) for rank in (comm.rank, _before(comm)))
        for what, exchange in _EXCHANGES.items():
            empty = f.make(np.zeros_like(mine))
            y = exchange(comm, f.make(mine), empty, tag)
            assert_same_bits(f.read(y), theirs, f"{what} of {dtype}")
            assert (y is empty) == f.mutable and type(y) is type(empty), what


def _before(comm: Communicator) -> int:
    return (comm.rank - 1) % comm.size


def _after(comm: Communicator) -> int:
    return (comm.rank + 1) % comm.size


def _in_background(comm: Communicator, x: Any, y: Any, tag: int) -> Any:
    coming = comm.irecv(y, _before(comm), tag)
    comm.isend(x, _after(comm), tag).wait()
    return coming.wait()


def _in_a_group(comm: Communicator, x: Any, y: Any, tag: int) -> Any:
    with comm.group():
        comm.isend(x, _after(comm), tag)
        coming = comm.irecv(y, _before(comm), tag)
    return coming.result()


def _one_by_one(comm: Communicator, x: Any, y: Any, tag: int) -> Any:
    comm.send(x, _after(comm), tag, channel=5)  # fits into the ring
    found = comm.probe(_before(comm), channel=5)
    return comm.recv(y, found.src, found.tag, channel=5)


_EXCHANGES: dict[str, Callable[[Communicator, Any, Any, int], Any]] = {
    "sendrecv": lambda comm, x, y, tag: comm.sendrecv(x, _after(comm), y, _before(comm), tag, tag),
    "isend and irecv": _in_background,
    "group": _in_a_group,
    "send, probe and recv": _one_by_one,
}


def check_empty(comm: Communicator, names: Sequence[str]) -> None:
    """Arrays without elements in every kind of operation."""
    f, dtypes = _shared(comm, names)
    for dtype in dtypes[:: max(1, len(dtypes) // 4)]:
        nothing = np.zeros((0, 3), BY_NAME[dtype].numpy)
        results = {
            "all_reduce": comm.all_reduce(f.make(nothing)), "broadcast": comm.broadcast(f.make(nothing)),
            "reduce_scatter": comm.reduce_scatter(f.make(nothing)), "all_gather": comm.all_gather(f.make(nothing)),
            "all_to_all": comm.all_to_all(f.make(nothing)),
            "sendrecv": comm.sendrecv(f.make(nothing), _after(comm), f.make(nothing), _before(comm)),
        }  # fmt: skip
        for what, y in results.items():
            assert_same_bits(f.read(y), nothing, f"{what} of no {dtype}")


def check_refusals(comm: Communicator, names: Sequence[str]) -> None:
    """Arrays that are not contiguous, or too small as outputs, are refused before any data moves."""
    f, dtypes = _shared(comm, names)
    matrix = np.zeros((4, 3), BY_NAME[dtypes[0]].numpy)
    calls: dict[str, Callable[[], Any]] = {
        "out too small": lambda: comm.all_reduce(f.make(matrix), out=f.make(matrix[:2])),
        "rows that do not divide": lambda: comm.reduce_scatter(f.make(np.zeros((comm.size * 2 + 1, 2), matrix.dtype))),
    }
    if f.strided is not None:
        strided = f.strided(matrix)
        calls |= {
            "not contiguous": lambda: comm.all_reduce(strided),
            "out not contiguous": lambda: comm.all_reduce(f.make(matrix), out=strided),
            "send not contiguous": lambda: comm.send(strided, _after(comm)),
            "recv not contiguous": lambda: comm.recv(strided, _before(comm)),
        }
    for what, call in calls.items():
        try:
            call()
        except ArrayError:
            continue
        raise AssertionError(f"{what}: was not refused")
    y = comm.all_reduce(f.make(np.ones(4, matrix.dtype)))
    assert_equal(f.read(y), np.full(4, comm.size, matrix.dtype), "all_reduce after refusals")


def check_keep_alive(comm: Communicator, names: Sequence[str]) -> None:
    """A message in progress keeps its array alive until it is complete, and no longer."""
    f, dtypes = _shared(comm, names)
    signals = Signals(comm)
    kind = BY_NAME["int32" if "int32" in dtypes else dtypes[0]]
    mine, theirs = (distinct(kind, _LARGE, seed=rank) for rank in (comm.rank, _before(comm)))
    x = f.make(mine)
    watched = weakref.ref(x)
    work = comm.isend(x, _after(comm))
    del x
    litter = [f.make(np.zeros_like(mine)) for _ in range(3)]  # reuses freed memory
    assert watched() is not None, "the array of a message under way has died"
    signals.tell("forgotten")
    signals.hear("forgotten", range(comm.size))
    y = comm.recv(f.make(np.zeros_like(mine)), _before(comm))
    assert_same_bits(f.read(y), theirs, "a message of an array that nobody kept")
    work.synchronize()
    del work, litter

    def died() -> bool:
        return watched() is None or (gc.collect() >= 0 and watched() is None)

    await_that(died)


Check = Callable[[Communicator, Sequence[str]], None]

MEETING: tuple[Check, ...] = (check_collectives, check_same_bits, check_messages, check_empty)
"""For every pair of frameworks; all but the collectives need two ranks."""

CHECKS: tuple[Check, ...] = (*MEETING, check_refusals, check_keep_alive)
"""For every framework."""
