"""Which stream waits for which when operations run on a GPU: the plane's own part of it, with a GPU that only takes notes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from xvcomm.adapters.torch import collectives
from xvcomm.adapters.torch.options import Options
from xvcomm.adapters.torch.planes import StreamPlane
from xvcomm.errors import Aborted

CURRENT, SIDE = 1, 2
Notes = list[tuple[Any, ...]]


class Comm:
    """Notes on which stream it is called."""

    rank, size, device = 0, 2, "cuda"

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.failure: Exception | None = None

    def all_reduce(self, x: Any, op: Any, *, timeout: float | None) -> None:
        self.notes.append(("all_reduce", x.stream))

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure


class Memory(torch.Tensor):
    """A tensor in a GPU's memory as far as is asked here."""

    is_cuda = True
    notes: Notes

    def record_stream(self, stream: Any) -> None:
        self.notes.append(("in use on", stream.cuda_stream))


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notes]:
    """What is done on the GPU, in order."""
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
            self.cuda_stream = SIDE if priority else CURRENT

    monkeypatch.setattr(torch._C, "_CudaEventBase", Event)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: CURRENT, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    yield noted


@pytest.fixture
def plane(notes: Notes) -> StreamPlane:
    """Of a GPU that takes notes."""
    comm: Any = Comm(notes)
    return StreamPlane(comm, torch.device("cuda", 0), bring=False)


def start(plane: StreamPlane, x: torch.Tensor) -> Any:
    return plane.start(collectives.all_reduce, [x], Options(), "all_reduce")


def memory(notes: Notes) -> Memory:
    x = torch.ones(3).as_subclass(Memory)
    x.notes = notes
    return x


def test_what_waits_goes_on_the_current_stream(plane: StreamPlane, notes: Notes) -> None:
    collectives.all_reduce(plane, torch.ones(3), Options())
    assert notes == [("all_reduce", CURRENT)]


def test_what_does_not_wait_goes_beside_it(plane: StreamPlane, notes: Notes) -> None:
    """Behind what the current stream holds; `wait` then orders that behind the operation."""
    work = start(plane, memory(notes))
    (_, begun, _), *_, (_, ended, _) = notes
    assert notes == [("record", begun, CURRENT), ("wait", begun, SIDE), ("all_reduce", SIDE), ("record", ended, SIDE)]
    assert isinstance(work, dist.Work) and begun != ended
    notes.clear()
    assert work.wait()
    del work
    assert notes == [("wait", ended, CURRENT)], "and nobody need be told that the memory is in use"


class Posted:
    """The communicator's Work for a message: notes who waits for it."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    def wait(self) -> None:
        self.notes.append(("ordered", CURRENT))

    def synchronize(self, timeout: float | None = None) -> None:
        self.notes.append(("the host waits", timeout))


@pytest.mark.parametrize("name", ["synchronize", "block_current_stream"])
def test_synchronize_lets_the_stream_wait_and_not_the_host(plane: StreamPlane, notes: Notes, name: str) -> None:
    """As NCCL's, of collectives and of messages."""
    work = start(plane, memory(notes))
    ended = notes[-1][1]
    notes.clear()
    getattr(work, name)()
    assert notes == [("wait", ended, CURRENT)]
    del work
    assert len(notes) == 1, "and nobody need be told that the memory is in use"
    notes.clear()
    message = plane.message(Posted(notes), [memory(notes)], "recv from rank 1", 1, lambda: notes.append(("then",)))
    getattr(message, name)()
    assert notes == [("ordered", CURRENT), ("then",)]


def test_a_timeout_lets_the_host_wait(plane: StreamPlane, notes: Notes) -> None:
    torch.cuda.Event.over = False  # type: ignore[attr-defined]
    work = start(plane, memory(notes))
    notes.clear()
    with pytest.raises(dist.DistBackendError, match="Timed out"):
        work.wait(timedelta(milliseconds=10))
    assert [note[0] for note in notes] == ["asked"] * len(notes) and notes
    message = plane.message(Posted(notes), [memory(notes)], "recv from rank 1", 1, None)
    notes.clear()
    message.wait(timedelta(milliseconds=10))
    assert notes == [("the host waits", 0.01), ("ordered", CURRENT)]


def test_memory_stays_in_use_if_nobody_waits(plane: StreamPlane, notes: Notes) -> None:
    work = start(plane, memory(notes))
    notes.clear()
    del work
    assert notes == [("in use on", SIDE)]


def test_events_are_used_again_only_when_nobody_can_ask_for_them(plane: StreamPlane, notes: Notes) -> None:
    first, second = start(plane, memory(notes)), start(plane, memory(notes))
    ended = [note[1] for note in notes if note[0] == "record" and note[2] == SIDE]
    assert len(set(ended)) == 2
    second.wait()
    del second
    notes.clear()
    third = start(plane, memory(notes))
    assert notes[-1] == ("record", ended[1], SIDE)
    assert first.wait() and third.wait()


def test_wait_raises_what_has_finished_the_communicator(plane: StreamPlane, notes: Notes) -> None:
    work = start(plane, memory(notes))
    plane.comm.failure = Aborted("rank 1 aborted")  # type: ignore[attr-defined]
    with pytest.raises(dist.DistBackendError, match="rank 1 aborted"):
        work.wait()
    assert isinstance(work.exception(), Aborted)
