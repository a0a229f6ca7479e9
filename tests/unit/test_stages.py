"""How far operations are that have not ended: what events, rings and the host tell."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

from xvcomm.engine.session.journal import Journal
from xvcomm.engine.session.supervision import Supervision
from xvcomm.trace.callsite import find_call_site
from xvcomm.trace.format import Record, Stage, State, read_history, region_bytes
from xvcomm.trace.operation import NO_PEER
from xvcomm.trace.recorder import Recorder
from xvcomm.trace.report import report
from xvcomm.trace.snapshot import Group
from xvcomm.trace.stages import Progress, Stretch, stages
from xvcomm.trace.verdict import judge
from xvcomm.trace.waits import Waits
from xvcomm.types.opcode import OpCode

_made = runpy.run_path(str(Path(__file__).with_name("snapshots.py")))
written, snapshot = _made["record"], _made["snapshot"]
STREAM, OTHER = (7, 0), (8, 0)


def of_device(*stretches: Stretch, **more: Any) -> dict[int, Stage]:
    return stages([Progress(stretches, **more)])


def test_an_operation_behind_an_event_that_is_not_reached_is_enqueued() -> None:
    found = of_device(Stretch(STREAM, [3], [], 4), Stretch(STREAM, [4, 6], [], 7), Stretch(OTHER, [5], [], 8))
    assert found == {3: Stage.RUNNING, 4: Stage.ENQUEUED, 6: Stage.ENQUEUED, 5: Stage.RUNNING}


def test_operations_that_share_an_event_are_not_told_apart() -> None:
    assert of_device(Stretch(STREAM, [3, 4], [], 5)) == {3: Stage.TOGETHER, 4: Stage.TOGETHER}


def test_messages_that_have_passed_their_ring_are_over() -> None:
    assert of_device(Stretch(STREAM, [4], [3], 5)) == {3: Stage.OVER, 4: Stage.RUNNING}


def test_streams_are_shared_by_communicators() -> None:
    """The event of one was recorded behind an operation of the other: it does not tell which of both runs."""
    one, other = Progress([Stretch(STREAM, [3], [], 5)]), Progress([Stretch(STREAM, [4, 5], [], None)])
    assert stages([one, other]) == {3: Stage.TOGETHER, 4: Stage.TOGETHER, 5: Stage.ENQUEUED}
    later = Progress([Stretch(STREAM, [6], [], None)], {STREAM: 5})
    assert stages([one, later]) == {3: Stage.OVER, 6: Stage.RUNNING}, "5 was enqueued behind the event of 3"


def test_an_operation_that_is_enqueued_later_than_it_begins_is_not_over() -> None:
    """Another thread's, which began after it and ended, was enqueued before it."""
    assert of_device(Stretch(STREAM, [3], [], 5), reached={STREAM: 4}) == {3: Stage.RUNNING}


def test_what_the_host_has_is_told_as_it_knows_it() -> None:
    found = stages([Progress(others={3: Stage.HELD}), Progress([Stretch(STREAM, [4], [], None)])])
    assert found == {3: Stage.HELD, 4: Stage.RUNNING}


def test_stages_are_noted_of_operations_that_have_not_ended() -> None:
    """Also those that are found among many newer ones; an end stays, and a new operation in the same place has none."""
    memory = memoryview(bytearray(region_bytes(16)))
    recorder = Recorder(memory)
    first, second, third = (recorder.begin(1, n, OpCode.SEND, 4, 4, 2, 0, find_call_site(0)) for n in range(3))
    recorder.end(second)
    recorder.note_stages({first: Stage.RUNNING, second: Stage.RUNNING, third: Stage.ENQUEUED, 99: Stage.HELD})
    found = read_history(memory)
    assert [(r.state, r.stage) for r in found] == [
        (State.POSTED, Stage.RUNNING), (State.DONE, Stage.UNKNOWN), (State.POSTED, Stage.ENQUEUED)
    ]  # fmt: skip
    assert found[2].describe().endswith("(in progress: enqueued behind earlier work of its stream)")
    recorder.end(third, State.FAILED)
    for _ in range(8):
        recorder.end(recorder.begin(1, 3, OpCode.SEND, 4, 4, 2, 0, find_call_site(0)))
    assert next((r.sequence, r.stage) for r in read_history(memory, 2)) == (0, Stage.RUNNING)
    assert read_history(memory)[2].state == State.FAILED
    for _ in range(8):
        recorder.begin(1, 9, OpCode.SEND, 4, 4, 2, 0, find_call_site(0))
    assert all(r.stage is Stage.UNKNOWN for r in read_history(memory))


def told(*records: Record) -> str:
    waits = Waits(snapshot({0: records, 1: ()}))
    return report(waits.snapshot, judge(waits), waits)


def test_the_report_tells_the_stage() -> None:
    sends = replace(written(OpCode.SEND, 1, None, peer=1), stage=Stage.HELD)
    assert "by shm, held back by the host (deferred queue); " in told(sends)


def test_the_verdict_tells_the_stage() -> None:
    held = replace(written(OpCode.RECV, 2, None, peer=0), stage=Stage.HELD)
    groups = dict.fromkeys((0, 1), (Group(held.communicator, "0", (0, 1)),))
    waits = Waits(snapshot({0: [written(OpCode.ALL_REDUCE, 1, None)], 1: [held]}, groups=groups))
    verdict = judge(waits)
    assert verdict.text.startswith("Rank 1 never called all_reduce #0 ") and verdict.cycle
    assert "since 0.0 s (held back by the host (deferred queue)), train.py:7, and waits for rank 0." in verdict.text


def test_an_operation_that_is_over_is_not_waited_in() -> None:
    over = replace(written(OpCode.ALL_REDUCE, 1, None, peer=NO_PEER), stage=Stage.OVER)
    text = told(over)
    assert "No rank waits for another one." in text and "Waiting ranks" not in text
    assert "which is not reported yet:\n  rank 0 (host on node-a): all_reduce #0" in text


def test_nothing_is_noted_before_there_is_a_recorder() -> None:
    """A rank's watchdog begins before its flight recorder."""
    Supervision(Journal()).note_stages()
