"""The flight recorder: what it keeps, what it drops, and what other processes can read."""

from __future__ import annotations

import _thread
import ctypes
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xvcomm
from xvcomm.engine.inflight.work import OrderedWorker
from xvcomm.trace import callsite
from xvcomm.trace.callsite import called_at, find_call_site
from xvcomm.trace.format import Life, Record, State, read_history, read_life, region_bytes
from xvcomm.trace.recorder import Recorder, hooks
from xvcomm.types.dtype import BY_NAME
from xvcomm.types.opcode import OpCode

FLOAT32 = BY_NAME["float32"].code


@pytest.fixture
def memory() -> memoryview:
    """Room for 16 records."""
    return memoryview(bytearray(region_bytes(16)))


@pytest.fixture
def hooked() -> Iterator[list[Record]]:
    """Records passed to the hooks."""
    seen: list[Record] = []
    hooks.append(seen.append)
    yield seen
    hooks.remove(seen.append)


def begin(recorder: Recorder, communicator: int, sequence: int, op: int, dtype: int, nbytes: int, *end: int) -> int:
    """Begin an operation, called from where this is called; `end` is peer and tag, if it has them."""
    peer, tag = end or (-1, -1)
    return recorder.begin(communicator, sequence, op, dtype, nbytes, peer, tag, find_call_site(1))


def test_an_operation_from_start_to_end(memory: memoryview) -> None:
    recorder, before = Recorder(memory), time.time_ns()
    assert read_history(memory) == []
    number = begin(recorder, 3, 12, OpCode.ALL_REDUCE, FLOAT32, 16384)
    (found,) = read_history(memory, 1)
    assert (found.communicator, found.sequence, found.op, found.nbytes) == (3, 12, OpCode.ALL_REDUCE, 16384)
    assert (found.peer, found.tag, found.state, found.ended) == (-1, -1, State.POSTED, 0)
    assert before <= found.posted <= time.time_ns()
    assert found.call_site.startswith("test_trace.py:")
    assert found.describe() == f"all_reduce #12 of 4096 x float32 at {found.call_site} (in progress)"
    recorder.end(number)
    (ended,) = read_history(memory, 1)
    assert ended.state == State.DONE and ended.ended >= ended.posted
    assert ended.describe().endswith("(done)")


def test_words_for_a_message_that_failed(memory: memoryview) -> None:
    recorder = Recorder(memory)
    recorder.end(begin(recorder, 0, 5, OpCode.SEND, 99, 10, 2, 1 << 61), State.FAILED)
    (found,) = read_history(memory, 1)
    assert found.tag == 1 << 61
    assert found.describe() == f"send #5 with rank 2 of 10 bytes at {found.call_site} (failed)"


def test_only_the_newest_are_kept(memory: memoryview) -> None:
    recorder = Recorder(memory)
    numbers = [begin(recorder, 0, i, OpCode.BARRIER, FLOAT32, i) for i in range(40)]
    assert [r.sequence for r in read_history(memory)] == list(range(24, 40))
    recorder.end(numbers[3])
    assert all(r.state == State.POSTED for r in read_history(memory)), "an end was written into another's record"
    recorder.end(numbers[24])
    assert [r.sequence for r in read_history(memory) if r.state == State.DONE] == [24]


def test_the_newest_come_with_older_ones_that_have_not_ended(memory: memoryview) -> None:
    """As many at the most as were asked for: then the newest of these."""
    recorder = Recorder(memory)
    numbers = [begin(recorder, 0, i, OpCode.RECV, FLOAT32, i) for i in range(20)]
    for number in numbers[8:]:
        recorder.end(number)
    recorder.end(numbers[5])
    assert [r.sequence for r in read_history(memory, 2)] == [6, 7, 18, 19]
    assert [r.sequence for r in read_history(memory, 4)] == [4, 6, 7, 16, 17, 18, 19]
    assert [r.sequence for r in read_history(memory, 14)] == [4, *range(6, 20)]
    assert [r.sequence for r in read_history(memory, 99)] == list(range(4, 20))


def test_life(memory: memoryview) -> None:
    assert read_life(memory) is Life.JOINING
    Recorder(memory).live(Life.CLOSED)
    assert read_life(memory) is Life.CLOSED


def test_hooks_get_what_ended(memory: memoryview, hooked: list[Record]) -> None:
    recorder = Recorder(memory)
    first, second = (begin(recorder, 0, i, OpCode.SEND, FLOAT32, 4) for i in (1, 2))
    assert hooked == []
    recorder.end(second)
    recorder.end(first, State.FAILED)
    assert [(r.sequence, r.state) for r in hooked] == [(2, State.DONE), (1, State.FAILED)]


def test_threads_write_records_of_their_own() -> None:
    memory = memoryview(bytearray(region_bytes(4096)))
    recorder = Recorder(memory)

    def work(thread: int) -> None:
        for i in range(500):
            recorder.end(begin(recorder, thread, i, OpCode.SEND, FLOAT32, thread))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    records = read_history(memory)
    assert sorted((r.communicator, r.sequence) for r in records) == [(t, i) for t in range(8) for i in range(500)]
    assert all(r.state == State.DONE and r.nbytes == r.communicator for r in records)


def test_call_sites_of_a_loop_and_of_two_lines(memory: memoryview) -> None:
    recorder = Recorder(memory)
    for i in range(3):
        begin(recorder, 0, i, OpCode.SEND, FLOAT32, 0)
    begin(recorder, 0, 3, OpCode.SEND, FLOAT32, 0)
    call_sites = [r.call_site for r in read_history(memory)]
    assert call_sites[0] == call_sites[1] == call_sites[2] != call_sites[3]


def test_more_call_sites_than_are_kept(memory: memoryview) -> None:
    recorder, lines = Recorder(memory), 5000
    code = compile("\n".join(["begin(recorder, 0, 1, 1, 1, 1)"] * lines), "many.py", "exec")
    exec(code, {"begin": begin, "recorder": recorder})
    assert [r.call_site for r in read_history(memory)] == [f"many.py:{line}" for line in range(lines - 15, lines + 1)]


def test_a_long_call_site_keeps_its_end(memory: memoryview) -> None:
    recorder = Recorder(memory)
    exec(compile("begin(recorder, 0, 1, 1, 1, 1)", "long" * 20 + ".py", "exec"), {"begin": begin, "recorder": recorder})
    (found,) = read_history(memory, 1)
    assert found.call_site == ("long" * 20 + ".py:1")[-48:]


def test_close_releases_memory(memory: memoryview) -> None:
    recorder = Recorder(memory)
    number = begin(recorder, 0, 1, OpCode.SEND, FLOAT32, 4)
    recorder.close()
    recorder.close()
    with pytest.raises(ValueError, match="released"):
        len(memory)
    recorder.end(number)
    assert begin(recorder, 0, 2, OpCode.SEND, FLOAT32, 4) == number + 1


def test_history_during_close_is_empty(memory: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, told = Recorder(memory), list[Record]()
    monkeypatch.setattr("xvcomm.trace.recorder.hooks", [told.append])
    number = begin(recorder, 0, 1, OpCode.SEND, FLOAT32, 4)
    recorder.tell(number)
    memory.release()
    recorder.tell(number)
    assert len(told) == 1 and recorder.history() == []


def test_history_is_in_order_while_operations_go_on(memory: memoryview) -> None:
    recorder, stop = Recorder(memory), threading.Event()

    def go_on() -> None:
        for sequence in itertools.count():
            begin(recorder, 0, sequence, OpCode.SEND, FLOAT32, 4)
            if stop.is_set():
                return

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        found = [[record.sequence for record in recorder.history()] for _ in range(1000)]
    finally:
        stop.set()
        thread.join()
    assert all(sequences == sorted(sequences) for sequences in found) and found[-1]
    recorder.close()


def test_communicator_history() -> None:
    with xvcomm.init() as comm:
        comm.all_reduce(np.ones(4096, np.float32))
        with pytest.raises(xvcomm.ArgumentError):
            comm.broadcast(np.ones(3), 1)
        comm.barrier()
        told = [record.describe() for record in comm.history()]
    assert [text.partition(" ")[0] for text in told] == ["all_reduce", "barrier"]
    assert "of 4096 x float32 at test_trace.py:" in told[0] and told[0].endswith("(done)")
    assert comm.history() == []


def test_worker_threads_record_the_callers_call_site() -> None:
    def call_site() -> str:
        return ctypes.string_at(find_call_site(0)).decode()

    worker = OrderedWorker("working for others")
    outer, own = find_call_site(0), find_call_site(0)
    try:
        nested = worker.submit(lambda: (called_at(own, lambda: find_call_site(0)), find_call_site(0)), outer)
        assert nested.result(20) == (own, outer)
        assert worker.submit(call_site, 0).result(20).startswith("test_trace.py:")  # unknown: the thread's own
        with pytest.raises(ZeroDivisionError):
            worker.submit(lambda: 1 // 0, outer).result(20)
        assert worker.submit(call_site, 0).result(20) != ctypes.string_at(outer).decode()
        assert outer != own
    finally:
        worker.close(5)


def test_the_call_site_where_no_python_called_is_the_function() -> None:
    found: list[bytes] = []
    over = threading.Event()
    namespace: dict[str, Any] = {"find_call_site": find_call_site, "ctypes": ctypes, "found": found, "over": over}
    source = "def reached():\n found.append(ctypes.string_at(find_call_site(0)))\n over.set()\n"
    exec(compile(source, str(Path(callsite.__file__).parent / "reached.py"), "exec"), namespace)
    _thread.start_new_thread(namespace["reached"], ())  # as C++ calls it: no frame below
    assert over.wait(20)
    assert found == [b"reached(), called by C++"]


def test_a_dump_is_read_without_numba(memory: memoryview, tmp_path: Path) -> None:
    recorder = Recorder(memory)
    recorder.live(Life.RUNNING)
    recorder.end(begin(recorder, 3, 12, OpCode.ALL_REDUCE, FLOAT32, 16384))
    (tmp_path / "dump").write_bytes(memory)
    program = (
        "import sys\nfrom pathlib import Path\nfrom xvcomm.trace import format\n"
        "memory = memoryview(Path(sys.argv[1]).read_bytes())\n"
        "print(format.read_life(memory).name, *(record.describe() for record in format.read_history(memory)))\n"
        "assert 'numba' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "dump")]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert shown.startswith("RUNNING all_reduce #12 of 4096 x float32 at test_trace.py:") and shown.endswith(
        " (done)\n"
    )
