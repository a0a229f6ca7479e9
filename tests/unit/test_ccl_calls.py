"""NCCL and RCCL calls from compiled code: the arguments, and how a call is prevented or aborted."""

from __future__ import annotations

import ctypes
import itertools
import runpy
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import pytest

from xvcomm.abc.collective import CollectiveForm, CollectiveStalled, CollectiveStopped
from xvcomm.backends.ccl.collective import CclCollective
from xvcomm.engine.inflight.log import ROOM, LaunchLog, LoggedOperations
from xvcomm.engine.launch import EnqueuedOperation, EnqueuedStep, Launch, Place
from xvcomm.errors import Aborted
from xvcomm.memory.ring import Message, Reason
from xvcomm.memory.segment import Segment
from xvcomm.schedule.steps import Buf
from xvcomm.trace.contract import ContractCheck
from xvcomm.trace.operation import Operation
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import BY_NAME, DType, ReduceOp, Reduction
from xvcomm.types.opcode import OpCode

_shared = runpy.run_path(str(Path(__file__).with_name("test_ccl.py")))
a_library, joined, until = _shared["a_library"], _shared["joined"], _shared["until"]
CAPTURING = _shared["CAPTURING_STREAM"]
SOON, PLAIN, SUM, F32 = _shared["SOON"], _shared["PLAIN"], _shared["SUM"], _shared["F32"]
Native = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 7)


class Caller:
    """Lets compiled code post collectives on a contract of one rank, and enqueue them on a stream."""

    def __init__(self) -> None:
        self._contract = ContractCheck(Segment.create("/dev/shm", "ccl", ContractCheck.size(1)), (0,), 0, _nobody(), 0)
        self.log, self.ended, self.seals = LaunchLog({}), list[Operation](), list[int]()
        logs = SimpleNamespace(get=lambda handle: self.log.address)
        self.launch_gate: Any = SimpleNamespace(lock=threading.Lock(), open=True, logs=logs)
        self._context: Any = SimpleNamespace(
            place=self._contract.place, sequence=0,
            lifecycle=SimpleNamespace(word=self._contract.abort_word, departed=set()),
            end_all=lambda operations, state=0: self.ended.extend(operations), fail=_fail,
            tracker=SimpleNamespace(seal=self.seals.append, rings={}, events=lambda handle: self.log.events),
        )  # fmt: skip

    def prepare(
        self, comm: CclCollective, op: OpCode, how: Reduction = SUM, dtype: DType = F32, stream: int = 99,
        counts: tuple[int, ...] = (), recv_counts: tuple[int, ...] = (), root: int = 0,
    ) -> Callable[..., None]:  # fmt: skip
        """A call on two arrays with a deadline; by default ten elements per member."""
        even = (10,) * comm._members
        ready = comm.enqueued(CollectiveForm(op, counts or even, recv_counts or even, dtype, how, root))
        assert ready is not None
        steps = [EnqueuedStep(ready, (Place(Buf.IN, 0), Place(Buf.OUT, 0)))]
        operation = EnqueuedOperation(op, Message(int(op), 0, 0, 0))
        made = Launch(self._context, self.launch_gate, [operation], steps)

        def call(src: int, dst: int, seconds: float = SOON) -> None:
            assert made.run(stream, Deadline.after(seconds).at, 0, src, dst), "refused"

        return call

    def taken(self) -> list[int]:
        """Remove and return the numbers of the collectives that must be polled."""
        taken = self.log.take()
        return [operation.sequence for operation in taken.operations()] if taken is not None else []

    def close(self) -> None:
        self._contract.close()


def _fail(error: BaseException, operation: Operation) -> None:
    raise error


def _nobody() -> Any:
    """A recorder that keeps no records."""
    words = (ctypes.c_int64 * 3)()
    return SimpleNamespace(words=words, handle=ctypes.addressof(words), newest_at=lambda communicator: 0)


@pytest.fixture
def caller() -> Iterator[Caller]:
    made = Caller()
    yield made
    made.close()


def address(function: Any) -> int:
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


def test_compiled_code_uses_the_librarys_numbers(caller: Caller) -> None:
    seen: list[tuple[int, ...]] = []
    function = Native(lambda *words: seen.append(words) or 0)
    library = a_library(address=address(function))
    comm = joined(library, members=2)
    f32, u8 = PLAIN.index("float32"), PLAIN.index("uint8")
    for op in (OpCode.ALL_REDUCE, OpCode.REDUCE_SCATTER, OpCode.BROADCAST, OpCode.ALL_GATHER):
        caller.prepare(comm, op)(16, 32)
    caller.prepare(comm, OpCode.ALL_REDUCE, dtype=BY_NAME["complex64"])(16, 32)
    assert [words[:7] for words in seen[:3]] == [
        (16, 32, 10, f32, 0, 7, 99), (16, 32, 10, f32, 0, 7, 99), (16, 32, 40, u8, 0, 7, 99)
    ]  # fmt: skip
    assert seen[3][:6] == (16, 32, 40, u8, 7, 99) and seen[4][2:4] == (20, f32)
    assert [made.args[0] for made in library.address.call_args_list] == [
        "ncclAllReduce", "ncclReduceScatter", "ncclBroadcast", "ncclAllGather", "ncclAllReduce"
    ]  # fmt: skip
    assert caller.taken() == [0, 1, 2, 3, 4]
    comm.close()


def test_captured_calls_are_complete_for_the_host(caller: Caller) -> None:
    function = Native(lambda *words: 0)
    comm = joined(a_library(address=address(function)))
    caller.prepare(comm, OpCode.ALL_REDUCE, stream=CAPTURING)(16, 32)
    assert [operation.sequence for operation in caller.ended] == [0] and caller.taken() == []
    caller.prepare(comm, OpCode.ALL_REDUCE)(16, 32)
    assert caller.taken() == [1] and len(caller.ended) == 1
    comm.close()


@pytest.mark.parametrize("op", [OpCode.ALL_REDUCE, OpCode.REDUCE, OpCode.REDUCE_SCATTER])
def test_calls_with_further_steps_are_not_compiled(op: OpCode) -> None:
    comm = joined(a_library(address=0), members=2)
    average, factor = Reduction(ReduceOp.AVG), Reduction(ReduceOp.PREMUL_SUM, 2.0)
    plain = CollectiveForm(op, (10, 10), (), F32, SUM, 0)
    assert comm.enqueued(plain._replace(dtype=BY_NAME["int32"], reduction=average)) is None
    assert comm.enqueued(plain._replace(reduction=factor)) is None
    assert comm.enqueued(plain._replace(dtype=BY_NAME["uint16"])) is None
    assert comm.enqueued(plain._replace(counts=(0, 0))) is None
    assert comm.enqueued(plain) is not None
    comm.close()
    assert comm.enqueued(plain) is None


class Recording:
    """The library's functions as compiled code calls them; each records its name and arguments."""

    WORDS = MappingProxyType({
        "ncclGroupStart": 0, "ncclGroupEnd": 0, "ncclSend": 6, "ncclRecv": 6, "ncclBroadcast": 7, "ncclReduce": 8,
    })  # fmt: skip

    def __init__(self, **codes: int) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self._functions = {name: self._function(name, codes.get(name, 0)) for name in self.WORDS}

    def _function(self, name: str, code: int) -> Any:
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * self.WORDS[name])
        return prototype(lambda *words: self.seen.append((name, *words)) or code)

    def address(self, name: str) -> int:
        return address(self._functions[name])


GROUP = ("ncclGroupStart",), ("ncclGroupEnd",)


@pytest.mark.parametrize(
    ("op", "counts", "recv_counts", "calls"),
    [
        (OpCode.ALL_TO_ALL, (1, 2, 3), (1, 5, 0), [
            ("ncclSend", 1000, 4, "u8", 0, 7, 99), ("ncclRecv", 2000, 4, "u8", 0, 7, 99),
            ("ncclSend", 1004, 8, "u8", 1, 7, 99), ("ncclRecv", 2004, 20, "u8", 1, 7, 99),
            ("ncclSend", 1012, 12, "u8", 2, 7, 99),
        ]),
        (OpCode.GATHER, (1, 0, 3), (), [
            ("ncclSend", 1000, 4, "u8", 0, 7, 99), ("ncclRecv", 2000, 4, "u8", 0, 7, 99),
            ("ncclRecv", 2004, 12, "u8", 2, 7, 99),
        ]),
        (OpCode.SCATTER, (1, 2, 0), (), [
            ("ncclSend", 1000, 4, "u8", 0, 7, 99), ("ncclRecv", 2000, 4, "u8", 0, 7, 99),
            ("ncclSend", 1004, 8, "u8", 1, 7, 99),
        ]),
        (OpCode.ALL_GATHER, (1, 0, 3), (), [
            ("ncclBroadcast", 1000, 2000, 4, "u8", 0, 7, 99), ("ncclBroadcast", 2004, 2004, 12, "u8", 2, 7, 99),
        ]),
        (OpCode.REDUCE_SCATTER, (1, 0, 3), (), [
            ("ncclReduce", 1000, 2000, 1, "f32", 0, 0, 7, 99), ("ncclReduce", 1004, 0, 3, "f32", 0, 2, 7, 99),
        ]),
    ],
    ids=str,
)  # fmt: skip
def test_several_calls_are_a_group_without_the_empty_ones(
    caller: Caller, op: OpCode, counts: tuple[int, ...], recv_counts: tuple[int, ...], calls: list[tuple[Any, ...]]
) -> None:
    numbers, library = {"u8": PLAIN.index("uint8"), "f32": PLAIN.index("float32")}, Recording()
    comm = joined(a_library(address=library.address), members=3)
    caller.prepare(comm, op, counts=counts, recv_counts=recv_counts)(1000, 2000)
    wanted = [tuple(numbers.get(word, word) for word in made) for made in calls]
    assert library.seen == [GROUP[0], *wanted, GROUP[1]]
    comm.close()


def test_one_call_is_no_group(caller: Caller) -> None:
    library = Recording()
    comm = joined(a_library(address=library.address), members=3)
    caller.prepare(comm, OpCode.REDUCE)(1000, 2000)
    caller.prepare(comm, OpCode.SCATTER, root=2)(1000, 2000)
    assert [made[:2] for made in library.seen] == [("ncclReduce", 1000), ("ncclRecv", 2000)]
    comm.close()


@pytest.mark.parametrize("failing", ["ncclGroupStart", "ncclSend", "ncclGroupEnd"])
def test_a_group_is_closed_whatever_fails_in_it(caller: Caller, failing: str) -> None:
    library = Recording(**{failing: 3})
    comm = joined(a_library(address=library.address), members=2)
    with pytest.raises(Aborted, match="ncclInternalError"):
        caller.prepare(comm, OpCode.ALL_TO_ALL)(1000, 2000)
    assert library.seen[-1] == GROUP[1] and caller.taken() == []
    assert len(library.seen) == {"ncclGroupStart": 2, "ncclSend": 3, "ncclGroupEnd": 6}[failing]
    comm.close()


def test_a_full_launch_log_refuses_collectives(caller: Caller) -> None:
    seen: list[int] = []
    function = Native(lambda *words: seen.append(1) or 0)
    comm = joined(a_library(address=address(function)))
    call = caller.prepare(comm, OpCode.ALL_REDUCE)
    for _ in range(ROOM):
        call(16, 32, 30.0)
    assert caller.seals == [99], "full"
    with pytest.raises(AssertionError, match="refused"):
        call(16, 32)
    assert len(seen) == ROOM and caller.seals == [99, 99]
    taken = caller.log.take()
    assert taken is not None and taken.collective and len(taken.records) == ROOM
    assert 10.0 < taken.deadline - time.monotonic() <= 30.0
    call(16, 32)
    assert caller.taken() == [ROOM] and not caller.log
    comm.close()


def test_two_that_both_find_the_last_entry_free_are_both_logged(caller: Caller) -> None:
    """Collectives and messages have separate locks, and the library releases the GIL meanwhile."""
    other: list[Callable[..., None]] = []
    function = Native(lambda *words: (other and other.pop()(16, 32)) or 0)
    comm = joined(a_library(address=address(function)))
    call = caller.prepare(comm, OpCode.ALL_REDUCE)
    for _ in range(ROOM - 1):
        call(16, 32)
    assert caller.seals == []
    caller.launch_gate = SimpleNamespace(lock=threading.Lock(), open=True, logs=caller.launch_gate.logs)
    other.append(caller.prepare(comm, OpCode.ALL_REDUCE))
    call(16, 32)
    assert caller.seals == [99, 99] and len(caller.taken()) == ROOM + 1
    comm.close()


def test_what_is_logged_on_a_stream_that_may_be_gone_is_sealed_with_an_event_behind_it(caller: Caller) -> None:
    """Also if other operations are removed while the event is recorded."""
    handles, recorded, left = itertools.count(7), list[int](), list[LoggedOperations | None]()
    leaving = False

    def record(argument: int, event: int, stream: int) -> int:
        nonlocal leaving
        assert (argument, stream) == (5, 99)
        recorded.append(event)
        if leaving:
            leaving = False
            left.append(caller.log.take())
        return 0

    function, recorder = Native(lambda *words: 0), ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(record)
    take = lambda: SimpleNamespace(handle=next(handles), captured=0)  # noqa: E731
    caller.log = LaunchLog({}, cast(Any, SimpleNamespace(record=address(recorder), argument=5, take=take)))
    comm = joined(a_library(address=address(function)))
    call = caller.prepare(comm, OpCode.ALL_REDUCE)
    call(16, 32)
    call(16, 32)
    leaving = True
    call(16, 32)
    left.append(caller.log.take())
    assert recorded == [7, 7, 7, 8]
    assert [(p.event.handle, len(p.records)) for p in left if p is not None and p.event is not None] == [(7, 2), (8, 1)]
    comm.close()


def test_event_errors_are_explained_by_the_device(caller: Caller) -> None:
    """Its error codes have other meanings in the library."""
    told: list[int] = []

    def failed(code: int) -> None:
        told.append(code)
        raise Aborted("the device's error")

    function, recorder = (
        Native(lambda *words: 0),
        ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(lambda *words: 3),
    )
    take = lambda: SimpleNamespace(handle=7, captured=0)  # noqa: E731
    stream = SimpleNamespace(record=address(recorder), argument=5, take=take, failed=failed)
    caller.log = LaunchLog({}, cast(Any, stream))
    comm = joined(a_library(address=address(function)))
    with pytest.raises(Aborted, match="the device's error"):
        caller.prepare(comm, OpCode.ALL_REDUCE)(16, 32)
    assert told == [3] and caller.taken() == []
    comm.close()


def test_compiled_code_does_not_call_a_stopped_library(caller: Caller) -> None:
    codes = iter((0, 3))
    seen: list[int] = []
    function = Native(lambda *words: seen.append(1) or next(codes))
    comm = joined(a_library(address=address(function)))
    call = caller.prepare(comm, OpCode.ALL_REDUCE)
    call(16, 32)
    assert caller.taken() == [0]
    with pytest.raises(Aborted, match="ncclInternalError"):
        call(16, 32)
    comm.abort(Reason.LEFT.word(2))
    with pytest.raises(CollectiveStopped) as caught:
        call(16, 32)
    assert caught.value.word == Reason.LEFT.word(2) and len(seen) == 2
    assert caller.taken() == []
    comm.close()


def test_a_blocking_compiled_call_is_broken_off_without_the_interpreter_lock(caller: Caller) -> None:
    inside, aborted = threading.Event(), threading.Event()

    def enter(*words: int) -> int:
        inside.set()
        assert aborted.wait(SOON)
        return 3

    function = Native(enter)
    library = a_library(address=address(function), abort=lambda comm: aborted.set())
    comm = joined(library)
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(caller.prepare(comm, OpCode.ALL_REDUCE), 16, 32, 0.1)
        assert inside.wait(SOON)
        until(lambda: comm.error() or under_way.done())
        with pytest.raises(CollectiveStalled):
            under_way.result(SOON)
    assert Reason.parse(comm.error())[0] is Reason.DEADLINE
    comm.close()
