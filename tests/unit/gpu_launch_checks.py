"""Launches of messages on GPUs, over hip-python on tests/shims/hip; test_gpu_runtime runs each check in its own process."""

from __future__ import annotations

import ctypes
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest

from xvcomm.abc.launch import ITEM, MessageForm
from xvcomm.backends.gpu.engine import STREAMS
from xvcomm.backends.gpu.kernels import ROW
from xvcomm.backends.gpu.vendor import VendorError
from xvcomm.jit.record import python_type
from xvcomm.types.dtype import BY_NAME

_shared = runpy.run_path(str(Path(__file__).with_name("gpu_checks.py")))
device, stream, message, ring = (_shared[name] for name in ("device", "stream", "message", "ring"))
up, down, bytes_of, counted = (_shared[name] for name in ("up", "down", "bytes_of", "counted"))
captured = _shared["captured"]
SMALL, BIG = _shared["SMALL"], _shared["BIG"]
CHECKS: dict[str, Callable[[], None]] = {}
_Item = python_type(ITEM)


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Register a function as a check."""
    CHECKS[function.__name__] = function
    return function


@check
def a_message_behind_another_is_one_call_of_compiled_code() -> None:
    """The first message on a stream uses the general path; later ones of any array and tag use compiled code."""
    gpu, count = device(), 6
    data = [bytes_of(n, SMALL if n % 2 else BIG) for n in range(count)]
    with ring() as (producer, consumer):
        sent, got = [up(gpu, x) for x in data], [gpu.empty(x.nbytes) for x in data]
        sending, receiving, third = (stream(gpu) for _ in range(3))
        launches = counted(gpu.runtime, "launch")
        for n in range(count):
            gpu.put(producer, sent[n].address, message(data[n].nbytes, n), sending)
            gpu.get(consumer, got[n].address, message(data[n].nbytes, n), receiving if n != 3 else third)
        for one in (sending, receiving, third):
            one.synchronize()
        assert len(launches) == 4, "the first of each end, and those of a stream behind another"
        for n in range(count):
            assert (down(gpu, got[n]) == data[n]).all(), f"message {n}"


@check
def a_number_known_for_a_users_stream_is_none_of_ours() -> None:
    """The driver may reuse the handle of a stream that the user has destroyed."""
    gpu = device()
    make = gpu.runtime.stream
    users = make()
    gpu.adopt(users)
    kept = gpu.streams(STREAMS)
    given = [users]
    with patch.object(gpu.runtime, "stream", lambda: given.pop() if given else make()):
        kept += gpu.streams(1)
    assert not given and users not in [own.queue[0] for own in kept] and all(own.lasting for own in kept)


@check
def what_hip_says_of_an_event() -> None:
    """A capture that begins during the query is no error; unknown codes are reported."""
    runtime = device().runtime
    event, codes = runtime.event(), iter((907, 99))
    says = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: next(codes))
    assert runtime.reached(event), "it was recorded nowhere"
    runtime._query = *runtime._query[:2], ctypes.cast(says, ctypes.c_void_p).value
    assert not runtime.reached(event)
    with pytest.raises(VendorError, match=r"hipEventQuery: unknown error \(99\)"):
        runtime.reached(event)


@check
def messages_are_ready_for_compiled_code_only_where_nothing_else_has_changed() -> None:
    """Only after one of the same shape, ring and stream, on the ring's device, and while launches have the same room."""
    gpu, data = device(), bytes_of(3)
    with ring() as (producer, consumer):
        forms = [MessageForm(producer, message(data.nbytes))]
        assert gpu.enqueued_messages(forms) is None, "the ring is not pinned yet"
        sent, got = up(gpu, data), [gpu.empty(data.nbytes) for _ in range(6)]
        receiving = stream(gpu)
        one, other = gpu.adopt(gpu.runtime.stream()), gpu.adopt(gpu.runtime.stream())
        handles = one.handle, other.handle
        gpu.put(producer, sent.address, message(data.nbytes, 0), one)
        found = gpu.enqueued_messages(forms)
        assert found is not None
        is_ready = ctypes.PYFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(found.ready)
        launch = ctypes.PYFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)(found.function)

        def ready(handle: int = handles[0]) -> bool:
            return is_ready(found.argument, handle, 0) != 0

        assert not ready(), "not before one of its shape was launched behind another"
        gpu.put(producer, sent.address, message(data.nbytes, 1), one)
        assert ready() and not ready(handles[1])
        items = _Item(sent.address, 0, 2)
        assert launch(found.argument, ctypes.addressof(items), 0, handles[0], 0) == 0 and producer.sequence == 3
        gpu.runtime.use(1)
        assert not ready(), "another device is the thread's"
        gpu.runtime.use(0)
        assert ready()
        gpu.put(producer, sent.address, message(data.nbytes, 3), other)
        assert not ready(), "the ring's newest message is on another stream"
        for tag in (4, 5):
            gpu.put(producer, sent.address, message(data.nbytes, tag), one)
        assert ready()
        gpu._engine.room.take(7, gpu._engine.known(producer), 64)  # type: ignore[arg-type]
        assert not ready(), "others have taken blocks"
        for tag, memory in enumerate(got):
            gpu.get(consumer, memory.address, message(data.nbytes, tag), receiving)
        receiving.synchronize()
        assert all((down(gpu, memory) == data).all() for memory in got)


@check
def messages_behind_a_graph_are_one_call_of_compiled_code() -> None:
    """Again, from the second one behind the capture on; they are numbered behind those that the graph has sent."""
    gpu, data, receiving = device(), bytes_of(5), stream(device())
    with ring() as (producer, consumer):
        sent, got, handle = up(gpu, data), gpu.empty(data.nbytes), gpu.runtime.stream()
        user = gpu.adopt(handle)
        gpu.put(producer, sent.address, message(data.nbytes), user)
        found = gpu.enqueued_messages([MessageForm(producer, message(data.nbytes))])
        assert found is not None
        with captured(handle) as launches:
            gpu.put(producer, sent.address, message(data.nbytes), user)
        ready = ctypes.PYFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(found.ready)
        launch = ctypes.PYFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)(found.function)

        def through() -> None:
            user.enqueued()
            user.synchronize()

        assert launches[0]() == launches[0]() == 0
        for _ in range(3):
            gpu.get(consumer, got.address, message(data.nbytes), receiving)
        receiving.synchronize()
        through()
        gpu.put(producer, sent.address, message(data.nbytes), user)
        assert not ready(found.argument, handle, 0)
        gpu.put(producer, sent.address, message(data.nbytes), user)
        assert ready(found.argument, handle, 0) and producer.sequence == 5
        assert launches[0]() == 0
        for _ in range(3):
            gpu.get(consumer, got.address, message(data.nbytes), receiving)
        receiving.synchronize()
        through()
        item = _Item(sent.address)
        assert launch(found.argument, ctypes.addressof(item), 0, handle, 0) == 0 and producer.sequence == 7
        gpu.get(consumer, got.address, message(data.nbytes), receiving)
        receiving.synchronize()
        assert consumer.sequence == 7 and (down(gpu, got) == data).all()


@check
def a_launch_shows_no_addresses_of_earlier_ones() -> None:
    """Freed memory may belong to another owner, and a driver would treat it as an argument."""
    gpu, data = device(), bytes_of(4)
    with ring() as (producer, consumer):
        on, sent, got = stream(gpu), up(gpu, data), gpu.empty(data.nbytes)
        on.together()
        gpu.put(producer, sent.address, message(data.nbytes, 0), on)
        gpu.get(consumer, got.address, message(data.nbytes, 0), on)
        on.synchronize()
        arguments = gpu._kernels._local.arguments.buffer
        assert any(arguments.raw[ROW.itemsize :]), "two messages were not one launch"
        gpu.scale(got.address, got.address, data.nbytes, BY_NAME["uint8"], 1.0, 0, on)
        assert not any(arguments.raw[ROW.itemsize :]) and any(arguments.raw)
        on.synchronize()


@check
def many_that_wait_leave_room_for_others() -> None:
    """Each of any number of waiting launches gets blocks, and all together few enough to run concurrently."""
    engine = device()._engine
    done = [False]
    waiting = Mock(end=SimpleNamespace(sequence=1), finished=lambda: (int(done[0]), True))
    given = []
    for number in range(100):
        given.append(engine.room.left(number))
        engine.room.take(number, waiting, given[-1])  # type: ignore[arg-type]
    assert given[0] == 64 and min(given) == 1 and sum(given) < 128 + len(given)
    assert engine.room.left(0) == 1 == engine.room.left(1000)
    done[0] = True
    assert engine.room.left(1000) == 64


if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
