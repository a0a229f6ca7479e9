"""Checks of operations that are captured in a graph and run from it repeatedly."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from xvcomm.comm.communicator import Communicator
from xvcomm.engine.session.rings import Use
from xvcomm.testing.arrays import SECONDS, Array, DeviceArrays, arrays, on_device
from xvcomm.testing.cases import assert_same_bits
from xvcomm.testing.inside import context
from xvcomm.testing.trials import Trial, warm
from xvcomm.types.deadline import NEVER, Deadline

_MANY = 20
_A_WHILE = 0.3


def _by_cupy(handle: int, enqueue: Callable[[], None]) -> Callable[[], None]:
    cupy = importlib.import_module("cupy")
    stream = cupy.cuda.ExternalStream(handle)
    stream.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
    try:
        enqueue()
    except BaseException:
        with contextlib.suppress(Exception):  # a failed capture cannot be ended without an error
            stream.end_capture()
        raise
    graph = stream.end_capture()
    return lambda: graph.launch(stream)


def _by_hip(handle: int, enqueue: Callable[[], None]) -> Callable[[], None]:
    hip = importlib.import_module("rocm.bindings.hip")

    def checked(answer: tuple[Any, ...]) -> Any:
        assert int(answer[0]) == 0, answer[0]
        return answer[1] if len(answer) > 1 else None

    checked(hip.hipStreamBeginCapture(handle, hip.hipStreamCaptureMode.hipStreamCaptureModeThreadLocal))
    try:
        enqueue()
    except BaseException:
        hip.hipStreamEndCapture(handle)
        raise
    graph = checked(hip.hipStreamEndCapture(handle))
    launchable = checked(hip.hipGraphInstantiate(graph, 0))
    return lambda: checked(hip.hipGraphLaunch(launchable, handle))


CAPTURES: dict[str, Callable[[int, Callable[[], None]], Callable[[], None]]] = {"cuda": _by_cupy, "rocm": _by_hip}
"""By device type: a function that captures what is enqueued on a stream, and returns a function that
launches the graph there.
"""


def check_graphs(comm: Communicator) -> None:
    """Every operation captured in its own graph before any is launched; each launched several times, with eager calls in
    between.
    """
    a = arrays(comm)

    def check(trial: Trial, run: Callable[[], None], what: str) -> None:
        a.fill(trial.target, np.zeros_like(trial.want))
        a.fill(trial.source, trial.values)
        run()
        assert_same_bits(a.get(trial.target), trial.want, f"{trial.name}, {what}")

    ready = warm(comm, a)
    replays = [captured(comm, trial.run) for trial in ready]
    for trial, replay in zip(ready, replays, strict=True):
        for number in range(3):
            check(trial, replay, f"launch {number}")
        check(trial, trial.run, "called after the graph ran")
        check(trial, replay, "launched after it was called")


def check_graph_of_many(comm: Communicator) -> None:
    """A graph of many operations in a row, each on the result of the previous one."""
    a, ones = arrays(comm), np.ones(1000)
    x, y = a.put(ones), a.put(ones)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def several() -> None:
        for _ in range(_MANY):
            comm.all_reduce(x, "avg")
            comm.sendrecv(x, after, y, before)
            a.copy(x, y)

    several()
    replay = captured(comm, several)
    for number in range(3):
        a.fill(x, (comm.rank + number) * ones)
        replay()
        assert_same_bits(a.get(x), ((comm.size - 1) / 2 + number) * ones, f"launch {number} of many operations")


def check_graph_beside_repeated(comm: Communicator) -> None:
    """An exchange started by compiled code, and then by a graph too: rings count the messages of both."""
    a, number = arrays(comm), 0
    x, y = a.put(np.zeros(1000)), a.put(np.zeros(1000))
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def exchange() -> None:
        comm.sendrecv(x, after, y, before)

    def check(run: Callable[[], None]) -> None:
        nonlocal number
        number += 1
        a.fill(x, np.full(1000, 100.0 * number + comm.rank))
        run()
        assert_same_bits(a.get(y), np.full(1000, 100.0 * number + before), f"exchange {number}")

    with on_device(comm):
        for _ in range(5):
            check(exchange)
        replay = captured(comm, exchange)
        for _ in range(3):
            check(replay)
            for _ in range(4):
                check(exchange)
    links, use = context(comm).rings, Use.POINT_TO_POINT
    for end in (links.end(after, use, NEVER, producer=True), links.end(before, use, NEVER, producer=False)):
        assert end.sequence == end.finished()[0], "not all messages were counted"


def check_graph_keeps_its_memory(comm: Communicator) -> None:
    """A graph of a collective still works after later collectives have needed more memory, and its memory is not reused."""
    a, count = arrays(comm), 150_000
    ones, total = np.ones(count, np.float32), np.full(count, comm.size, np.float32)
    x, larger = a.put(ones), a.put(np.ones(4 * count, np.float32))
    with on_device(comm):
        comm.all_reduce(x)
        replay = captured(comm, lambda: comm.all_reduce(x))
        comm.all_reduce(larger)
        others = []
        for number in range(_MANY):
            a.synchronize()
            others.append(a.put(number * ones))
        a.fill(x, ones)
        replay()
        assert_same_bits(a.get(x), total, "launched when memory was given to others")
    for number, other in enumerate(others):
        assert_same_bits(a.get(other), number * ones, f"array {number}, which the graph has nothing to do with")


def check_graph_of_few(comm: Communicator) -> None:
    """So few elements that some ranks only need their native library; captured after compiled code has run it."""
    a, size = arrays(comm), comm.size
    whole = size * (np.arange(size) + 1.0)  # native libraries divide by `size` before they add: here without rounding
    x, y, z = a.put(whole[[comm.rank]]), a.put(np.zeros(size)), a.put(np.zeros(1))
    forms: list[tuple[Callable[[], None], Any, Array]] = [
        (lambda: comm.all_gather(x, out=y), y, whole),
        (lambda: comm.reduce(x, 0, out=None if comm.rank else z), z, np.full(1, 0.0 if comm.rank else sum(whole))),
        (lambda: comm.all_reduce(x, "avg", out=z), z, np.full(1, sum(whole) / size)),
    ]
    with on_device(comm):
        for run, target, want in forms:
            for _ in range(4):
                run()
            replay = captured(comm, run)
            for number in range(3):
                a.fill(target, np.zeros_like(want))
                replay()
                assert_same_bits(a.get(target), want, f"launch {number}")


def check_graph_behind_what_is_over(comm: Communicator) -> None:
    """A capture may wait for an operation that completed before it, although the graph cannot."""
    a, started = arrays(comm), list[Any]()
    x = a.put(np.ones(16))
    with on_device(comm):
        for _ in range(4):
            started.append(comm.all_reduce(x, async_op=True))
            started[-1].wait()
        started.append(comm.all_reduce(x, async_op=True))
        comm.barrier()
        time.sleep(_A_WHILE)

        def wait_and_go_on() -> None:
            started[-1].wait()
            comm.all_reduce(x)

        replay = captured(comm, wait_and_go_on)
        a.fill(x, np.ones(16))
        replay()
    assert_same_bits(a.get(x), np.full(16, float(comm.size)), "the graph's result")


def check_graph_beside_a_waiting_message(comm: Communicator) -> None:
    """A graph that never runs is captured between two receives on separate streams: the second follows the first."""
    a, streams = arrays(comm), [DeviceArrays(context(comm).device) for _ in range(3)]
    assert isinstance(a, DeviceArrays)
    first, graph, second = [stream.handle for stream in streams]
    x = [a.put(np.full(1000, float(number))) for number in range(3)]
    y = [a.put(np.zeros(1000)) for _ in x]
    a.synchronize()

    def message(number: int, handle: int | None) -> None:
        if comm.rank == 0:
            comm.recv(y[number], 1, stream=handle)
        elif comm.rank == 1:
            comm.send(x[number], 0, stream=handle)

    with on_device(comm):
        message(0, first)
        streams[0].synchronize()
        comm.barrier()
        if comm.rank == 0:
            message(1, first)
            assert graph is not None
            CAPTURES[a.kind](graph, lambda: comm.recv(y[0], 1, stream=graph))
            message(2, second)
        else:
            time.sleep(_A_WHILE)
            message(1, first)
            message(2, first)
        for stream in streams:
            stream.synchronize()
        comm.barrier()
    if comm.rank == 0:
        assert [float(a.get(part)[0]) for part in y[1:]] == [1.0, 2.0]


def check_graph_of_another_stream(comm: Communicator) -> None:
    """Captured from an unused stream, as `torch.cuda.graph` does; its memory must have been allocated before."""
    _graph_of_another_stream(comm, 480)
    _graph_of_another_stream(comm, 100_000)


def _graph_of_another_stream(comm: Communicator, count: int) -> None:
    a, other = arrays(comm), DeviceArrays(context(comm).device)
    assert isinstance(a, DeviceArrays) and a.handle is not None and other.handle is not None
    ones = np.ones((comm.size, count), np.float16)
    x, y = other.put(ones), other.put(ones[0])

    def enqueue(stream: int | None) -> None:
        comm.all_reduce(x, stream=stream)
        comm.reduce_scatter(x, "avg", out=y, stream=stream)

    with on_device(comm):
        other.synchronize()
        for _ in range(3):
            enqueue(a.handle)
        a.synchronize()
        replay = CAPTURES[a.kind](other.handle, lambda: enqueue(other.handle))
        for number in range(3):
            other.fill(x, number * ones)
            replay()
            assert_same_bits(other.get(y), number * comm.size * ones[0], f"launch {number}")


def captured(comm: Communicator, enqueue: Callable[[], None]) -> Callable[[], None]:
    """A function that launches a graph of what is enqueued."""
    a = arrays(comm)
    assert isinstance(a, DeviceArrays) and a.handle is not None
    a.synchronize()
    # the tracker records events on xvcomm's own streams, which must not be captured then
    context(comm).tracker.drain(Deadline.after(SECONDS))
    return CAPTURES[a.kind](a.handle, enqueue)


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    check_graphs, check_graph_of_many, check_graph_beside_repeated, check_graph_keeps_its_memory,
    check_graph_of_another_stream, check_graph_beside_a_waiting_message, check_graph_of_few, check_graph_behind_what_is_over,
)  # fmt: skip
