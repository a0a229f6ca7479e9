"""The figures of `xvcomm trace`, on snapshots whose answers are known, and the command."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from xvcomm.cli import app
from xvcomm.trace.format import Share, State
from xvcomm.trace.snapshot import Grades, Group, Snapshot
from xvcomm.trace.summary import Device, Lateness, Latest, Rail, Times, summarize
from xvcomm.types.opcode import OpCode

_made = runpy.run_path(str(Path(__file__).with_name("snapshots.py")))
record, snapshot = _made["record"], _made["snapshot"]
SEND, RECV, ALL_REDUCE = OpCode.SEND, OpCode.RECV, OpCode.ALL_REDUCE
MILLISECOND = 1_000_000


def test_operations_are_summed_by_their_way() -> None:
    lengths = [10, 30, 20, 40, 100, 50, 60, 70, 80, 90]
    records = [
        record(ALL_REDUCE, 1000 * i, 1000 * i + length, i, nbytes=200, way="nccl") for i, length in enumerate(lengths)
    ]
    found = summarize(snapshot({
        0: [*records, record(SEND, 20_000, None, peer=1, way="tcp", nbytes=7)],
        1: [record(RECV, 20_000, 20_500, peer=0, nbytes=7), record(RECV, 20_000, 20_001, peer=0, state=State.FAILED)],
    }, 30_000))  # fmt: skip
    reduce, receive, send = found.operations
    assert (reduce.op, reduce.way, reduce.done, reduce.running, reduce.failed) == ("all_reduce", "nccl", 10, 0, 0)
    assert (reduce.nbytes, reduce.seconds) == (2000, 550e-9)
    assert reduce.times == Times(50e-9, 90e-9, 100e-9)
    assert reduce.bandwidth == pytest.approx(2000 / 550e-9)
    assert (receive.op, receive.way, receive.done, receive.failed, receive.nbytes) == ("recv", "shm", 1, 1, 7)
    assert (send.op, send.way, send.done, send.running, send.nbytes, send.times) == ("send", "tcp", 0, 1, 0, Times())
    assert (found.job, found.ranks, found.size, found.seconds) == ("job-1", 2, 2, 30e-6)


def test_who_comes_last() -> None:
    """Rank 2 comes 300 and 500 ns after the first; rank 0 once 40 ns; its clock is ahead by 1000 ns."""
    group = Group(5, "0/dp", (0, 2))
    found = summarize(snapshot(
        {
            0: [
                record(ALL_REDUCE, 2000, 3000, 0), record(ALL_REDUCE, 4000, 5000, 1), record(ALL_REDUCE, 6040, 7000, 2),
                record(ALL_REDUCE, 8000, 8100, 0, communicator=5),
            ],
            1: [record(ALL_REDUCE, 1100, 2000, 0), record(ALL_REDUCE, 3000, 4000, 1), record(ALL_REDUCE, 5000, 6000, 2)],
            2: [
                record(ALL_REDUCE, 1300, 2000, 0), record(ALL_REDUCE, 3500, 4000, 1), record(ALL_REDUCE, 5010, 6000, 2),
                record(ALL_REDUCE, 7000, 7100, 0, communicator=5),
            ],
        },
        20_000, ahead={0: 1000}, groups={0: (group,)},
    ))  # fmt: skip
    zero, one, two = found.lateness
    assert zero == Lateness(0, "node-a", "host", 4, 1, Times(0, 40e-9, 40e-9), 60e-9)
    assert one == Lateness(1, "node-a", "host", 3, 0, Times(0, 100e-9, 100e-9), 0)
    assert two == Lateness(2, "node-a", "host", 4, 2, Times(10e-9, 500e-9, 500e-9), 1400e-9)
    assert found.latest == (
        Latest("all_reduce", 1, "0", 2, 0, 500e-9, "train.py:7"), Latest("all_reduce", 0, "0", 2, 0, 300e-9, "train.py:7"),
        Latest("all_reduce", 2, "0", 0, 1, 40e-9, "train.py:7"),
    )  # fmt: skip


def test_collectives_to_which_not_all_have_come_do_not_count() -> None:
    """The recorder of rank 1 has dropped number 0; rank 0 has not come to number 2."""
    found = summarize(snapshot({
        0: [record(ALL_REDUCE, 0, 10, 0), record(ALL_REDUCE, 20, 30, 1)],
        1: [record(ALL_REDUCE, 25, 30, 1), record(ALL_REDUCE, 40, None, 2)],
    }))  # fmt: skip
    assert [(row.rank, row.collectives, row.last) for row in found.lateness] == [(0, 1, 0), (1, 1, 1)]
    assert summarize(snapshot({0: [record(ALL_REDUCE, 0, 10, 0)]})).lateness == ()


@given(late=st.lists(st.tuples(*[st.integers(0, 50)] * 4), min_size=1, max_size=30))
def test_lateness_is_what_was_put_in(late: list[tuple[int, ...]]) -> None:
    found = summarize(snapshot({
        rank: [record(ALL_REDUCE, 1000 * i + row[rank], 1000 * i + 500, i) for i, row in enumerate(late)]
        for rank in range(4)
    }, 100_000))  # fmt: skip
    behind = [[row[rank] - min(row) for row in late] for rank in range(4)]
    for row in found.lateness:
        mine = sorted(behind[row.rank])
        assert row.collectives == len(late) and row.late.longest == mine[-1] / 1e9
        assert sum(value / 1e9 <= row.late.p90 for value in mine) >= 0.9 * len(mine)
        assert sum(value / 1e9 <= row.late.median for value in mine) >= 0.5 * len(mine)
        assert row.last == sum(
            row.rank == max(range(4), key=step.__getitem__) and step.count(max(step)) == 1 for step in late
        )
    assert sum(row.awaited for row in found.lateness) == pytest.approx(
        sum(3 * (sorted(step)[-1] - sorted(step)[-2]) for step in late) / 1e9
    )


def test_bytes_of_connections_count_once_over_time() -> None:
    """Two operations overlap for 20 ns of 50; another rank of the host has the same connection later."""
    first, second = "10.0.0.1 to 10.0.0.3 (tcp)", "10.0.1.1 to 10.0.1.3 (tcp)"
    found = summarize(snapshot({
        0: [
            record(SEND, 100, 140, peer=2, shares=[Share(first, 600, 0), Share(second, 300, 0)]),
            record(RECV, 120, 150, peer=2, shares=[Share(first, 0, 50)]),
        ],
        1: [record(SEND, 200, 210, peer=2, shares=[Share(first, 1, 0)])],
        2: [record(RECV, 100, 140, peer=0, shares=[Share("10.0.0.3 to 10.0.0.1 (tcp)", 0, 600)])],
    }, hosts="aab"))  # fmt: skip
    assert found.rails == (
        Rail("node-a", first, 601, 50, 60e-9), Rail("node-a", second, 300, 0, 40e-9),
        Rail("node-b", "10.0.0.3 to 10.0.0.1 (tcp)", 0, 600, 40e-9),
    )  # fmt: skip


def test_a_snapshot_without_operations() -> None:
    found = summarize(snapshot({0: []}))
    assert (found.operations, found.lateness, found.latest, found.rails, found.seconds) == ((), (), (), (), 0.0)


def with_grades(found: Snapshot, rank: int, *grades: Grades) -> Snapshot:
    """The same, with what RDMA devices have reached of a rank's GPU."""
    state = msgspec.structs.replace(found.ranks[rank], grades=grades)
    return msgspec.structs.replace(found, ranks=found.ranks | {rank: state})


def test_grades_of_rdma_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They survive a dump, and are printed also if the ranks have done nothing yet."""
    monkeypatch.setenv("COLUMNS", "200")
    grades = Grades("mlx5_0", "direct", "bytes"), Grades("mlx5_1", "exported", "")
    found = with_grades(snapshot({0: [], 1: []}, hosts="ab"), 1, *grades)
    assert summarize(found).devices == (
        Device(1, "node-b", "host", "mlx5_0", "direct", "bytes"), Device(1, "node-b", "host", "mlx5_1", "exported", ""),
    )  # fmt: skip
    found.save(tmp_path / "rank-1.xvdump")
    done = CliRunner().invoke(app, ["trace", str(tmp_path)])
    assert done.exit_code == 0, done.output
    words = [tuple(line.replace("│", " ").split()) for line in done.output.splitlines()]
    assert ("1", "node-b", "host", "mlx5_0", "direct", "bytes") in words
    assert ("1", "node-b", "host", "mlx5_1", "exported", "none") in words
    assert "No operations were recorded." in done.output and "Operations" not in done.output


def test_without_gpus_no_grades_are_told(taken: Snapshot, tmp_path: Path) -> None:
    taken.save(tmp_path / "rank-0.xvdump")
    assert "RDMA" not in CliRunner().invoke(app, ["trace", str(tmp_path)]).output


@pytest.fixture
def taken() -> Snapshot:
    """Two ranks on two hosts; rank 1 is late by 3 ms."""
    rail = Share("10.0.0.1 to 10.0.0.2 (tcp)", 2_000_000, 0)
    made: Snapshot = snapshot({
        0: [record(ALL_REDUCE, 0, 5 * MILLISECOND, 12, nbytes=2_000_000, way="tcp", shares=[rail])],
        1: [record(ALL_REDUCE, 3 * MILLISECOND, 5 * MILLISECOND, 12, nbytes=2_000_000, way="tcp")],
    }, 6 * MILLISECOND, hosts="ab")  # fmt: skip
    return made


def test_the_command_prints_tables_and_writes_the_timeline(
    taken: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    taken.save(tmp_path / "rank-0.xvdump")
    out = tmp_path / "trace.json"
    done = CliRunner().invoke(app, ["trace", str(tmp_path), "--json", str(out)])
    assert done.exit_code == 0, done.output
    words = [tuple(line.replace("│", " ").split()) for line in done.output.splitlines()]
    assert ("all_reduce", "tcp", "2", "3.815", "MiB", "7", "ms", "2", "ms", "5", "ms", "5", "ms", "0.571") in words
    assert ("1", "node-b", "host", "1", "1", "(100", "%)", "3", "ms", "3", "ms", "3", "ms", "3", "ms") in words
    assert ("all_reduce", "#12", "0", "rank", "0", "rank", "1", "3", "ms", "train.py:7") in words
    assert ("node-a", "10.0.0.1", "to", "10.0.0.2", "(tcp)", "1.907", "MiB", "0", "B", "5", "ms", "0.4") in words
    assert len(json.loads(out.read_text())["traceEvents"]) > 5


def test_the_command_prints_json(taken: Snapshot, tmp_path: Path) -> None:
    taken.save(tmp_path / "a.xvdump")
    done = CliRunner().invoke(app, ["trace", str(tmp_path / "a.xvdump"), "--format", "json"])
    found = json.loads(done.output)
    assert found["lateness"][1]["late"] == {"median": 0.003, "p90": 0.003, "longest": 0.003}
    assert found["operations"][0]["nbytes"] == 4_000_000


def test_a_timeline_that_cannot_be_written(taken: Snapshot, tmp_path: Path) -> None:
    taken.save(tmp_path / "a.xvdump")
    done = CliRunner().invoke(app, ["trace", str(tmp_path), "--json", str(tmp_path / "missing" / "out.json")])
    assert str(done.exception).endswith("out.json: No such file or directory")


def test_dumps_of_two_jobs_are_refused(taken: Snapshot, tmp_path: Path) -> None:
    taken.save(tmp_path / "a.xvdump")
    Snapshot("job-2", 5, taken.infos, {}).save(tmp_path / "b.xvdump")
    done = CliRunner().invoke(app, ["trace", str(tmp_path / "a.xvdump"), str(tmp_path / "b.xvdump")])
    assert "several jobs: job-1, job-2" in str(done.exception)
    assert CliRunner().invoke(app, ["trace", str(tmp_path)]).exit_code == 0
    missing = str(CliRunner().invoke(app, ["trace", str(tmp_path / "missing")]).exception)
    assert "no job of this user" in missing or "missing' is no job" in missing
