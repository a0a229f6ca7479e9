"""Stream ordering of operations on a GPU, with a mock GPU that records calls."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from xvcomm.adapters.torch import collectives, messages
from xvcomm.adapters.torch.group import ProcessGroup
from xvcomm.adapters.torch.options import Options
from xvcomm.adapters.torch.planes import StreamPlane
from xvcomm.errors import Aborted

CURRENT, SIDE = 1, 2
Notes = list[tuple[Any, ...]]


class Comm:
    """Records the stream of each call."""

    rank, size, device = 0, 2, "cuda"

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.failure: Exception | None = None

    def all_reduce(self, x: Any, op: Any, *, async_op: bool, timeout: float | None) -> Any:
        self.notes.append(("all_reduce", x.stream, "asynchronous" if async_op else "blocking"))
        return Posted(self.notes) if async_op else None

    def irecv(self, x: Any, src: int, tag: int, *, channel: int) -> Any:
        self.notes.append(("irecv", x.stream))
        return Posted(self.notes)

    def barrier(self, *, async_op: bool = False, timeout: float | None, stream: int) -> Any:
        self.notes.append(("barrier", stream, "asynchronous" if async_op else "blocking"))
        return Posted(self.notes) if async_op else None

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure


class Memory(torch.Tensor):
    """The parts of a GPU tensor that the plane uses."""

    is_cpu, is_cuda = False, True
    notes: Notes

    def record_stream(self, stream: Any) -> None:
        self.notes.append(("in use on", stream.cuda_stream))


class Posted:
    """The communicator's Work of an asynchronous operation: records the waiting stream."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.failure: Exception | None = None

    def order(self, stream: int) -> None:
        if self.failure is not None:
            raise self.failure
        self.notes.append(("ordered", stream))

    def synchronize(self, timeout: float | None = None) -> None:
        self.notes.append(("the host waits", timeout))

    def exception(self) -> Exception | None:
        return self.failure


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notes]:
    """The recorded GPU operations, in order."""
    noted: Notes = []

    class Event:
        over = True

        def record(self, stream: Any) -> None:
            noted.append(("record", id(self), stream.cuda_stream))

        def wait(self, stream: Any) -> None:
            noted.append(("wait", id(self), stream.cuda_stream))

        def query(self) -> bool:
            noted.append(("asked", id(self)))
            return self.over

    class Stream:
        def __init__(self, *device: Any, priority: int = 0) -> None:
            self.cuda_stream = self.stream_id = SIDE if priority else CURRENT
            self.device_index, self.device_type = 0, 1

        def wait_stream(self, other: Any) -> None:
            noted.append(("behind", other.cuda_stream, self.cuda_stream))

        def record_event(self) -> Event:
            event = Event()
            event.record(self)
            return event

    current = [CURRENT]

    def use(*, stream_id: int, device_index: int, device_type: int) -> None:
        current[0] = stream_id

    of_torch = {
        "_cuda_getCurrentRawStream": lambda index: current[0], "_cuda_getCurrentStream": lambda index: (current[0], 0, 1),
        "_cuda_getDevice": lambda: 0, "_cuda_setStream": use,
    }  # fmt: skip
    for name, function in of_torch.items():
        monkeypatch.setattr(torch._C, name, function, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    yield noted


@pytest.fixture
def plane(notes: Notes) -> StreamPlane:
    """A plane over the mock GPU."""
    comm: Any = Comm(notes)
    return StreamPlane(comm, torch.device("cuda", 0), bring=False)


def start(plane: StreamPlane, x: torch.Tensor) -> Any:
    """An operation of the communicator."""
    return plane.start(collectives.all_reduce, [x], Options(), "all_reduce")


def run(plane: StreamPlane, x: torch.Tensor) -> Any:
    """An operation of several steps, the first of which is torch's, on the current stream."""

    def job(where: Any) -> None:
        where.comm.notes.append(("a step of torch's", torch._C._cuda_getCurrentRawStream(0)))
        collectives.all_reduce(where, x, Options())

    return plane.run(job, [x], "all_reduce", waits=False)


def memory(notes: Notes) -> Memory:
    x = torch.ones(3).as_subclass(Memory)
    x.notes = notes
    return x


def test_blocking_operations_use_the_current_stream(plane: StreamPlane, notes: Notes) -> None:
    collectives.all_reduce(plane, torch.ones(3), Options())
    assert notes == [("all_reduce", CURRENT, "blocking")]


def test_async_operations_follow_the_current_stream(plane: StreamPlane, notes: Notes) -> None:
    """`wait` then orders the current stream after the operation."""
    work = start(plane, memory(notes))
    assert notes == [("all_reduce", CURRENT, "asynchronous")] and isinstance(work, dist.Work)
    notes.clear()
    assert work.wait()
    del work
    assert notes == [("ordered", CURRENT)], "and nobody need be told that the memory is in use"


def test_multi_step_operations_use_a_side_stream(plane: StreamPlane, notes: Notes) -> None:
    for _ in range(2):
        work = run(plane, memory(notes))
        *steps, (_, ended, _) = notes
        assert steps == [("behind", CURRENT, SIDE), ("a step of torch's", SIDE), ("all_reduce", SIDE, "blocking")]
        assert notes[-1] == ("record", ended, SIDE) and torch._C._cuda_getCurrentRawStream(0) == CURRENT
        notes.clear()
        assert work.wait()
        assert notes == [("wait", ended, CURRENT)]
        del work
        assert len(notes) == 1, "nobody need be told that the memory is in use"
        notes.clear()


def test_an_error_restores_the_current_stream(plane: StreamPlane, notes: Notes) -> None:
    def job(where: Any) -> None:
        raise Aborted("rank 1 aborted")

    with pytest.raises(dist.DistBackendError, match="rank 1 aborted"):
        plane.run(job, [memory(notes)], "all_reduce", waits=False)
    assert torch._C._cuda_getCurrentRawStream(0) == CURRENT


@pytest.mark.parametrize("name", ["synchronize", "block_current_stream"])
def test_synchronize_blocks_the_stream_and_not_the_host(plane: StreamPlane, notes: Notes, name: str) -> None:
    """As with NCCL, for collectives and messages."""
    work = run(plane, memory(notes))
    ended = notes[-1][1]
    notes.clear()
    getattr(work, name)()
    assert notes == [("wait", ended, CURRENT)]
    work = start(plane, memory(notes))
    notes.clear()
    getattr(work, name)()
    assert notes == [("ordered", CURRENT)]
    notes.clear()
    message = plane.message(Posted(notes), [memory(notes)], "recv from rank 1", 1, lambda: notes.append(("then",)))
    getattr(message, name)()
    *order, (what, copied, where) = notes
    assert order == [("ordered", CURRENT), ("then",)] and (what, where) == ("record", CURRENT)
    notes.clear()
    getattr(message, name)()
    assert notes == [("ordered", CURRENT), ("wait", copied, CURRENT)], "who waits next may be on another stream"


def test_wait_with_a_timeout_blocks_the_host(plane: StreamPlane, notes: Notes) -> None:
    torch.cuda.Event.over = False  # type: ignore[attr-defined]
    work = run(plane, memory(notes))
    notes.clear()
    with pytest.raises(dist.DistBackendError, match="Timed out"):
        work.wait(timedelta(milliseconds=10))
    assert [note[0] for note in notes] == ["asked"] * len(notes) and notes
    for operation in (
        start(plane, memory(notes)), plane.message(Posted(notes), [memory(notes)], "recv from rank 1", 1, None)
    ):  # fmt: skip
        notes.clear()
        operation.wait(timedelta(milliseconds=10))
        assert notes == [("the host waits", 0.01), ("ordered", CURRENT)]


def test_memory_is_kept_without_a_wait(plane: StreamPlane, notes: Notes) -> None:
    work = run(plane, memory(notes))
    notes.clear()
    del work
    assert notes == [("in use on", SIDE)]


@pytest.fixture
def group(plane: StreamPlane) -> ProcessGroup:
    """A group over that plane."""
    planes: Any = SimpleNamespace(host=plane, gpu=plane, comms={})
    return ProcessGroup(planes, None, 0, 2, 30.0, "xvcomm")


def test_a_coalesced_operation_is_waited_for(group: ProcessGroup, notes: Notes) -> None:
    """It runs on the communicator's own stream."""
    group._start_coalescing(torch.device("cuda", 0))
    options = dist.AllreduceOptions()
    options.asyncOp = True
    group.allreduce([memory(notes)], options)
    notes.clear()
    group._end_coalescing(torch.device("cuda", 0)).wait()
    ordered, recorded = notes.index(("ordered", SIDE)), [note[0] for note in notes].index("record")
    assert ordered < recorded and notes[-1] == ("wait", notes[recorded][1], CURRENT)


def test_an_async_barrier_blocks_the_host_in_wait_only(group: ProcessGroup, notes: Notes) -> None:
    """Other ranks may wait for what this rank does before `wait`."""
    options = dist.BarrierOptions()
    options.device_ids, options.asyncOp = [0], False
    group.barrier(options)
    options.asyncOp = True
    work = group.barrier(options)
    assert notes == [("barrier", CURRENT, "blocking"), ("barrier", CURRENT, "asynchronous")]
    notes.clear()
    work.wait()
    assert notes[:2] == [("ordered", CURRENT), ("the host waits", None)]


def test_a_barrier_of_a_group_named_nccl_uses_the_gpu(plane: StreamPlane, notes: Notes) -> None:
    """torch passes the CPU device if a group supports both."""
    host: Any = None
    planes: Any = SimpleNamespace(host=host, gpu=plane, comms={})
    options = dist.BarrierOptions()
    options.device, options.asyncOp = torch.device("cpu"), False
    ProcessGroup(planes, None, 0, 2, 30.0, "nccl").barrier(options)
    assert notes == [("barrier", CURRENT, "blocking")]


def test_memory_of_a_copys_source_is_kept(plane: StreamPlane, notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The waiting stream may differ from the one that the memory was allocated for."""
    monkeypatch.setattr(messages, "room", lambda x, device: memory(notes))
    work = messages.receive(plane, [torch.zeros(3, 2)[:, 0]], 1, 0)
    notes.clear()
    work.wait()
    assert notes[:2] == [("ordered", CURRENT), ("in use on", CURRENT)]


def test_a_gpu_message_received_into_host_memory(plane: StreamPlane, notes: Notes) -> None:
    work = plane.message(Posted(notes), [torch.zeros(3)], "recv from rank 1", 1, lambda: None)
    work.wait()
    assert notes[0] == ("ordered", CURRENT) and notes[1][0] == "record"


def test_wait_raises_the_communicators_error(plane: StreamPlane, notes: Notes) -> None:
    steps, operation = run(plane, memory(notes)), start(plane, memory(notes))
    plane.comm.failure = operation._work.failure = Aborted("rank 1 aborted")  # type: ignore[attr-defined]
    for work in (steps, operation):
        with pytest.raises(dist.DistBackendError, match="rank 1 aborted"):
            work.wait()
        assert isinstance(work.exception(), Aborted)
