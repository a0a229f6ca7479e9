"""What ranks were doing, in files: complete or refused, and put together."""

from pathlib import Path

import msgspec
import pytest

from xvcomm.errors import ArgumentError
from xvcomm.trace.format import Life, Record, Share
from xvcomm.trace.snapshot import Group, RankState, Snapshot, load, load_folder, merge
from xvcomm.types.topology import RankInfo

INFOS = tuple(RankInfo(rank, f"h{rank}", f"node{rank}", 100 + rank, "host", "host") for rank in range(2))
RECORD = Record(3, 77, 2, 4, 4096, -1, -1, 1, 10, 0, "train.py:7", "shm", (Share("a to b (tcp)", 5, 6),))


def one(rank: int, taken: int, job: str = "job-1", **state: object) -> Snapshot:
    return Snapshot(job, taken, INFOS, {rank: RankState(**state)})  # type: ignore[arg-type]


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    saved = one(
        0, 5, life=Life.CLOSED, ending="killed", stopped=True, ahead=-7, stack="File ...", records=(RECORD,),
        groups=(Group(77, "0/dp", (1, 0)),),
    )  # fmt: skip
    saved.save(tmp_path / "rank-0.xvdump")
    assert load(tmp_path / "rank-0.xvdump") == saved
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.xvdump"]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.xvdump"
    one(0, 5, records=(RECORD,)).save(path)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(ArgumentError, match=r"rank-0\.xvdump is no dump"):
            load(path)
    path.write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(one(0, 5), version=99)))
    with pytest.raises(ArgumentError, match="version 99"):
        load(path)


def test_a_folder_is_read_as_the_job_that_wrote_last(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="XVCOMM_TRACE_DIR"):
        load_folder(tmp_path)
    for name, dump in {"a": one(0, 9, "old"), "b": one(0, 10), "c": one(1, 12, stopped=True)}.items():
        dump.save(tmp_path / f"{name}.xvdump")
    found = load_folder(tmp_path)
    assert (found.job, found.taken, found.infos) == ("job-1", 12, INFOS)
    assert {rank: state.stopped for rank, state in found.ranks.items()} == {0: False, 1: True}


def test_of_each_rank_the_newest_counts() -> None:
    found = merge([one(1, 30), one(0, 20, stack="new"), one(0, 10, stack="old")])
    assert list(found.ranks) == [0, 1] and found.ranks[0].stack == "new" and found.taken == 30
