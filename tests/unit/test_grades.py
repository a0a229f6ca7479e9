"""Grades of RDMA devices in a rank's region of the flight recorders, where other processes read them."""

from __future__ import annotations

import pytest

from xvcomm.trace import grades, journal
from xvcomm.trace.callsite import find_call_site
from xvcomm.trace.format import GROUPS, GROUPS_AT, HEADER_BYTES, NICS, region_bytes
from xvcomm.trace.recorder import Recorder
from xvcomm.trace.snapshot import Grades, Group
from xvcomm.types.opcode import OpCode

FOUND = (Grades("mlx5_0", "direct", "bytes"), Grades("mlx5_1", "", "exported"), Grades("rxe0", "", ""))


@pytest.fixture
def memory() -> memoryview:
    return memoryview(bytearray(region_bytes(8)))


def test_what_a_rank_notes_is_read_beside_its_communicators_and_operations(memory: memoryview) -> None:
    recorder = Recorder(memory)
    assert journal.state(memory).grades == ()
    recorder.note_grades(FOUND)
    for ident in range(1, GROUPS + 5):
        recorder.note_group(Group(ident, "dp", (0, 1)))
    for number in range(20):
        recorder.begin(1, number, OpCode.BARRIER, 1, 0, -1, -1, find_call_site(1))
    state = journal.state(memory)
    assert state.grades == FOUND
    assert len(state.groups) == GROUPS and [record.sequence for record in state.records] == list(range(12, 20))
    recorder.close()
    recorder.note_grades(FOUND)


def test_more_devices_than_places(memory: memoryview) -> None:
    many = [Grades(f"mlx5_{number}", "direct", "direct") for number in range(NICS + 3)]
    grades.write(memory, many)
    assert grades.read(memory) == tuple(many[:NICS])
    assert not any(memory[GROUPS_AT:])


def test_a_place_that_is_being_written_is_left_out(memory: memoryview) -> None:
    grades.write(memory, FOUND)
    memory[HEADER_BYTES] = 0
    assert grades.read(memory) == FOUND[1:]
