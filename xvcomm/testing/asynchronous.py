"""Checks of asynchronous devices: what is ordered, what waits, and what does not.

Other ranks may be on host memory, where calls block. They take part without being checked.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from xvcomm.backends.gpu.vendor import Runtime
from xvcomm.comm.communicator import Communicator
from xvcomm.engine.inflight.work import Work
from xvcomm.testing.arrays import Arrays, DeviceArrays, arrays
from xvcomm.testing.cases import assert_same_bits, distinct
from xvcomm.testing.gate import Gate
from xvcomm.testing.inside import context
from xvcomm.testing.signals import Signals, await_that
from xvcomm.testing.trials import warm
from xvcomm.types.dtype import BY_NAME


def check_host_goes_on(comm: Communicator) -> None:
    """Every call returns although a required rank has not called yet; the result is available when it has."""
    a, signals = arrays(comm), Signals(comm)
    for trial in warm(comm, a):
        for late in (0, comm.size - 1):
            a.fill(trial.source, trial.values)
            with signals.late(f"{trial.name} of {late}", late):
                trial.run()
            assert_same_bits(a.get(trial.target), trial.want, f"{trial.name}, rank {late} late")


def check_after_what_the_stream_holds(comm: Communicator) -> None:
    """An operation reads what earlier work on its stream writes, however late that runs."""
    a, signals = arrays(comm), Signals(comm)
    ready = warm(comm, a)
    if not isinstance(a, DeviceArrays):
        for trial in ready:
            a.fill(trial.source, trial.values)
            trial.run()
            assert_same_bits(a.get(trial.target), trial.want, trial.name)
        return
    with Gate.on(a) as gate:
        for trial in ready:
            a.fill(trial.source, np.zeros_like(trial.values))
            gate.close(trial.source)
            trial.run()
            signals.meet(trial.name)  # work that waits for nothing has run by now
            gate.open(trial.values)
            assert_same_bits(a.get(trial.target), trial.want, f"{trial.name} behind other work")


def check_before_what_the_stream_gets(comm: Communicator) -> None:
    """Later work on the stream sees an operation's result, and may overwrite its input."""
    a, signals = arrays(comm), Signals(comm)
    late = comm.size - 1
    for trial in warm(comm, a):
        junk, seen = a.put(np.full_like(trial.values, 7)), a.put(np.zeros_like(trial.want))
        a.fill(trial.source, trial.values)
        with signals.late(trial.name, late):
            trial.run()
            a.copy(seen, trial.target)
            a.copy(trial.source, junk)
        assert_same_bits(a.get(seen), trial.want, f"what came behind {trial.name}")


def check_wait_orders_only(comm: Communicator) -> None:
    """`Work.wait` returns before the operation is complete, `synchronize` afterwards."""
    a, signals = arrays(comm), Signals(comm)
    late, here, ones = comm.size - 1, comm.rank, np.ones(1000, np.float32)
    x = a.put(ones)
    calls: dict[str, tuple[Callable[[], Work], int]] = {
        "all_reduce": (lambda: comm.all_reduce(x, async_op=True), comm.size),
        "all_gather": (lambda: comm.all_gather(x, async_op=True), 1),
    }
    if here in (0, late):
        calls["message"] = (lambda: comm.isend(x, 0) if here == late else comm.irecv(x, late)), 1
    for what, (call, factor) in calls.items():
        call().synchronize()
        a.fill(x, ones)
        with signals.late(what, late):
            work = call()
            result = work.wait()
            assert here == late or not (a.asynchronous and work.done()), (
                f"{what} was done though rank {late} had not come"
            )
        assert work.synchronize() is result
        assert work.done() and work.exception() is None
        found = a.get(result)
        assert (found == factor).all(), f"{what} that was waited for gave {found}"
    signals.tell("message")


def check_streams_pass(comm: Communicator) -> None:
    """A waiting operation on one stream blocks no other stream: neither the arrays' own, nor that of other arrays."""
    a, signals = arrays(comm), Signals(comm)
    other = DeviceArrays(a.device) if isinstance(a, DeviceArrays) else a
    late, ones = comm.size - 1, np.ones(1000)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for each in (a, other):
        comm.sendrecv(each.put(ones), after, each.put(ones), before)
        comm.all_reduce(each.put(ones), async_op=True).synchronize()
    x, y, z, outgoing = a.put(ones), a.put(ones), other.put(ones), other.put(3 * ones)
    with signals.late("all_reduce", late):
        work = comm.all_reduce(x, async_op=True)
        if a.asynchronous:
            assert_same_bits(a.get(y), ones, "an array beside an operation under way")
    assert_same_bits(a.get(work.wait()), comm.size * ones, "the operation under way")
    receiving = comm.recv(y, before) if a.asynchronous else comm.irecv(y, before)
    assert_same_bits(other.get(comm.all_reduce(z)), comm.size * ones, "all_reduce beside a receive that waits")
    comm.barrier()
    sending = comm.isend(outgoing, after)
    if isinstance(receiving, Work):
        receiving.wait()
    assert_same_bits(a.get(y), 3 * ones, "what was received late")
    sending.synchronize()


def check_streams_told(comm: Communicator) -> None:
    """`stream=` sets the stream that an operation is ordered on; if the stream is unknown, the host waits."""
    a, signals = arrays(comm), Signals(comm)
    late, ones = comm.size - 1, np.ones(1000)
    x, handle = a.put(ones), None
    elsewhere: Arrays = a
    if isinstance(a, DeviceArrays):
        elsewhere, handle, x.handle = DeviceArrays(a.device), a.handle, None
    a.synchronize()
    comm.all_reduce(x)
    assert_same_bits(elsewhere.get(x), comm.size * ones, "all_reduce on no stream that anybody knows")
    a.fill(x, ones)
    a.synchronize()
    with signals.late("all_reduce", late):
        comm.all_reduce(x, stream=handle)
    assert_same_bits(a.get(x), comm.size * ones, "all_reduce with stream=")


def check_streams_in_order(comm: Communicator) -> None:
    """Operations on several streams match those of other ranks in the order of the calls, even if an earlier one is delayed."""
    a, signals = arrays(comm), Signals(comm)
    other = DeviceArrays(a.device) if isinstance(a, DeviceArrays) else a
    ones = np.ones(10, np.float32)
    with Gate.on(a) if isinstance(a, DeviceArrays) else contextlib.nullcontext() as gate:
        for turn in range(_TURNS):
            x, y, held = a.put(ones), other.put(ones), a.put(np.zeros(1, np.uint8))
            if gate is not None:
                gate.close(held)
            work = comm.all_reduce(x, async_op=True)
            other.synchronize()
            result = comm.reduce(y, 0)
            signals.meet(f"turn {turn}")
            if gate is not None:
                gate.open(np.ones(1, np.uint8))
            assert_same_bits(a.get(work.wait()), comm.size * ones, f"all_reduce that was held up, turn {turn}")
            want = comm.size * ones if comm.rank == 0 else ones
            assert_same_bits(other.get(result), want, f"reduce behind it on another stream, turn {turn}")


def check_many_under_way(comm: Communicator, many: int = 80) -> None:
    """More operations ahead of a late rank than are polled at once, blocking and asynchronous."""
    a, signals = arrays(comm), Signals(comm)
    xs = [a.put(np.full(100, i)) for i in range(many)]
    ys = [
        a.put(np.full(100, i)) for i in range(many if comm.size == 2 else many // 5)
    ]  # a device accepts 1024 launches ahead
    comm.all_reduce(a.put(np.ones(100, int)))
    with signals.late("all", comm.size - 1):
        works = [comm.all_reduce(x, async_op=True) for x in xs]
        for y in ys:
            comm.all_reduce(y)
    for i in reversed(range(many)):
        want = np.full(100, i * comm.size)
        assert_same_bits(a.get(works[i].wait()), want, f"asynchronous all_reduce {i}")
        if i < len(ys):
            assert_same_bits(a.get(ys[i]), want, f"all_reduce {i}")
    for work in works:
        work.synchronize()


def check_arrays_die(comm: Communicator) -> None:
    """An asynchronous operation keeps its arrays alive until it is complete, and no longer."""
    a, signals = arrays(comm), Signals(comm)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    parts = [distinct(BY_NAME["int32"], 1000, seed=rank) for rank in range(comm.size)]
    mine, theirs, everything = parts[comm.rank], parts[before], np.concatenate(parts)

    whole = a.put(np.zeros_like(everything))

    def prepare() -> list[Any]:
        return [a.put(mine), a.put(mine), a.put(np.zeros_like(mine))]

    def start(x: Any, y: Any, z: Any) -> list[Work]:
        comm.isend(x, after)
        comm.all_gather(y, out=whole, async_op=True)
        behind = comm.barrier(async_op=True)
        assert behind is not None
        return [behind, comm.irecv(z, before)]

    def check(behind: Work, receiving: Work) -> None:
        behind.synchronize()
        assert_same_bits(a.get(whole), everything, "all_gather of an array that nobody kept")
        assert_same_bits(a.get(receiving.wait()), theirs, "a message of an array that nobody kept")

    check(*start(*prepare()))
    if not isinstance(a, DeviceArrays):
        check(*start(*prepare()))
        return
    with Gate.on(a) as gate:
        held, doomed = a.put(np.zeros(1, np.uint8)), prepare()
        watched = [weakref.ref(x) for x in doomed]
        gate.close(held)
        works = start(*doomed)
        doomed.clear()
        gc.collect()
        assert all(x() is not None for x in watched), "an array died before the operation was over"
        signals.meet("collected")
        gate.open(np.ones(1, np.uint8))
        check(*works)
    works.clear()

    def died() -> bool:
        gc.collect()
        return all(x() is None for x in watched)

    await_that(died)


_TURNS = 4
"""Calls until compiled code starts a repeated operation, and one more."""

_COSTLY = ("allocate", "free", "register", "unregister", "stream", "compile", "load")
"""Functions that may wait for the whole device, or take longer than a small message."""


def check_steady_state(comm: Communicator) -> None:
    """Once every operation has run, none allocates, pins, creates streams or waits for the device."""
    a = arrays(comm)
    ready = warm(comm, a)

    def all_of_them(times: int) -> None:
        for trial in ready * times:
            a.fill(trial.source, trial.values)
            result = trial.call()
            for work in result if isinstance(result, list) else ():
                work.synchronize()
        comm.barrier()

    all_of_them(2)
    runtime = getattr(context(comm).device, "runtime", None)
    with contextlib.ExitStack() as stack:
        calls = {
            name: stack.enter_context(mock.patch.object(runtime, name, wraps=getattr(runtime, name)))
            for name in (_COSTLY if isinstance(runtime, Runtime) else ())
        }
        all_of_them(5)
    made = {name: call.call_count for name, call in calls.items() if call.call_count}
    assert not made, f"calls of the vendor's runtime in the steady state: {made}"


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    check_host_goes_on, check_after_what_the_stream_holds, check_before_what_the_stream_gets, check_wait_orders_only,
    check_streams_pass, check_streams_told, check_streams_in_order, check_many_under_way, check_arrays_die, check_steady_state,
)  # fmt: skip
