"""Sums over operations: none is lost, however small the flight recorder is and however many kinds there are."""

from __future__ import annotations

import threading
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from xvcomm.trace.callsite import find_call_site
from xvcomm.trace.counters import BOUNDS, NO_COMMUNICATOR, Counters
from xvcomm.trace.format import DONE, FAILED, read_record, region_bytes
from xvcomm.trace.operation import ANY_PEER, NO_PEER
from xvcomm.trace.recorder import Recorder
from xvcomm.types.opcode import OpCode

RECV, ALL_REDUCE = int(OpCode.RECV), int(OpCode.ALL_REDUCE)


def recorder(kept: int = 16) -> tuple[Recorder, Counters, memoryview]:
    memory, counters = memoryview(bytearray(region_bytes(kept))), Counters()
    made = Recorder(memory)
    made.count(counters)
    return made, counters, memory


def begin(made: Recorder, communicator: int, op: int, peer: int = NO_PEER, nbytes: int = 8) -> int:
    return made.begin(communicator, 0, op, 4, nbytes, peer, -1, find_call_site(0))


KINDS = st.tuples(
    st.sampled_from([0, 5, 0x7FFFFFFF]), st.sampled_from([int(op) for op in OpCode]),
    st.sampled_from([NO_PEER, ANY_PEER, 0, 9999]),
)  # fmt: skip


@settings(max_examples=50)
@given(calls=st.lists(st.tuples(KINDS, st.integers(0, 1 << 40), st.sampled_from([DONE, FAILED]))))
def test_operations_are_counted_by_their_kind(calls: list[tuple[tuple[int, int, int], int, int]]) -> None:
    """More of them than the flight recorder keeps."""
    made, counters, _ = recorder()
    begun, sums, failed = Counter[object](), Counter[object](), Counter[object]()
    for kind, nbytes, state in calls:
        made.end(begin(made, *kind, nbytes), state)
        begun[kind] += 1
        sums[kind] += nbytes
        failed[kind] += state == FAILED
    found = {(count.communicator, count.op, count.peer): count for count in counters.read()}
    assert {kind: count.begun for kind, count in found.items()} == begun
    for kind, count in found.items():
        assert (count.nbytes, count.failed) == (sums[kind], failed[kind])
        assert sum(count.lengths) == begun[kind] - failed[kind]


def test_lengths_are_those_of_the_records() -> None:
    made, counters, memory = recorder(64)
    for i in range(50):
        number = begin(made, 1, ALL_REDUCE)
        if i % 10 == 0:
            threading.Event().wait(0.002)
        made.end(number)
    (count,) = counters.read()
    lengths = [r.ended - r.posted for r in (read_record(memory, i) for i in range(50))]
    assert count.nanoseconds == sum(lengths)
    upper = [sum(length <= bound for length in lengths) for bound in BOUNDS]
    assert [sum(count.lengths[: i + 1]) for i in range(len(BOUNDS))] == upper and upper[0] < 50


def test_kinds_without_room_are_counted_by_operation() -> None:
    made, counters, _ = recorder()
    for peer in range(10_000):
        made.end(begin(made, 1, RECV, peer))
    found = counters.read()
    rest = [count for count in found if count.communicator == NO_COMMUNICATOR]
    assert sum(count.begun for count in found) == sum(sum(count.lengths) for count in found) == 10_000
    assert [(count.op, count.peer) for count in rest] == [(RECV, ANY_PEER)] and len(found) > 3000


def test_rows_of_closed_communicators_are_free_again() -> None:
    """However many there are one after the other, none is counted without its name."""
    made, counters, _ = recorder()
    lasting = [begin(made, 1, RECV, peer) for peer in range(100)]
    made.end_all(lasting[-16:])
    taken = Counter[tuple[int, int]]()
    for communicator in range(2, 200):
        for peer in range(300):
            made.end(begin(made, communicator, RECV, peer))
        taken.update((count.communicator, count.begun) for count in counters.take([communicator]))
    assert taken == Counter({(communicator, 1): 300 for communicator in range(2, 200)})
    assert {(count.communicator, count.begun) for count in counters.read()} == {(1, 1)}
    assert len(counters.read()) == 100


def test_operations_that_end_after_others_gave_their_rows_back() -> None:
    """Their rows are looked for behind those, and must be found by what reads them."""
    made, counters, _ = recorder(16_384)
    numbers = []
    for peer in range(1500):
        made.end(begin(made, 2, RECV, peer))
        numbers.append(begin(made, 1, RECV, peer))
    counters.take([2])
    made.end_all(numbers)
    found = [count for count in counters.read() if count.communicator == 1]
    assert sum(count.begun for count in found) == sum(sum(count.lengths) for count in found) == 1500


def test_counting_begins_and_ends() -> None:
    made, counters, _ = recorder()
    number = begin(made, 1, ALL_REDUCE)
    made.count(None)
    made.end(number)
    begin(made, 1, ALL_REDUCE)
    (count,) = counters.read()
    assert count.begun == 1 and sum(count.lengths) == 0


def test_threads_lose_no_count() -> None:
    made, counters, _ = recorder()

    def work(op: int) -> None:
        for _ in range(5000):
            made.end(begin(made, 1, op))

    threads = [threading.Thread(target=work, args=[op]) for op in (RECV, ALL_REDUCE, RECV, ALL_REDUCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {count.op: count.begun for count in counters.read()} == {RECV: 10_000, ALL_REDUCE: 10_000}
