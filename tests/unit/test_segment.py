"""Segments of shared memory: which names from the store are accepted, and which files are mapped and deleted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from xvcomm.errors import ResourceError
from xvcomm.memory.segment import PAGE, Segment, sweep, unusable

NAME = "xvcomm-job-1-0123456789ab"


@pytest.mark.parametrize(
    "name", ["../precious", "/etc/passwd", "", ".", "precious", f"../{NAME}", f"{NAME}/../precious"]
)
def test_only_names_of_xvcomm_segments(tmp_path: Path, name: str) -> None:
    (tmp_path / "shm").mkdir()
    (tmp_path / "precious").write_bytes(bytes(PAGE))
    (tmp_path / NAME).write_bytes(bytes(PAGE))
    with pytest.raises(ResourceError, match="no name that xvcomm gives"):
        Segment.attach(str(tmp_path / "shm"), name)
    assert (tmp_path / "precious").exists()


def _link(path: Path, made: Segment) -> None:
    path.symlink_to(path.parent / made.name)


def _pipe(path: Path, made: Segment) -> None:
    os.mkfifo(path, 0o600)


def _unsealed(path: Path, made: Segment) -> None:
    path.write_bytes(bytes(PAGE))
    path.chmod(0o600)


def _empty(path: Path, made: Segment) -> None:
    path.touch(0o600)


def _cut(path: Path, made: Segment) -> None:
    path.write_bytes((path.parent / made.name).read_bytes()[:-PAGE])
    path.chmod(0o600)


def _open_to_all(path: Path, made: Segment) -> None:
    path.write_bytes((path.parent / made.name).read_bytes())
    path.chmod(0o666)


def _of_another_user(path: Path, made: Segment) -> None:
    if os.geteuid():
        pytest.skip("needs root")
    path.write_bytes((path.parent / made.name).read_bytes())
    path.chmod(0o600)
    os.chown(path, 12345, -1)


@pytest.mark.parametrize("make", [_link, _pipe, _unsealed, _empty, _cut, _open_to_all, _of_another_user])
def test_only_segments_are_mapped(tmp_path: Path, make: object) -> None:
    assert callable(make)
    made = Segment.create(str(tmp_path), "job", 2 * PAGE)
    make(tmp_path / NAME, made)
    with pytest.raises(ResourceError):
        Segment.attach(str(tmp_path), NAME)
    assert os.path.lexists(tmp_path / NAME)
    made.close()


def test_a_segment_that_is_too_small(tmp_path: Path) -> None:
    made = Segment.create(str(tmp_path), "job", PAGE)
    with pytest.raises(ResourceError, match="at least"):
        Segment.attach(str(tmp_path), made.name, 4 * PAGE)
    Segment.attach(str(tmp_path), made.name, PAGE).close()
    made.close()


def test_unlink_keeps_another_file_with_the_same_name(tmp_path: Path) -> None:
    made = Segment.create(str(tmp_path), "job", PAGE)
    path = tmp_path / made.name
    path.rename(tmp_path / "away")
    path.write_text("another one's")
    made.unlink()
    assert path.exists()
    made.close()


def test_sweep_stays_in_its_folder(tmp_path: Path) -> None:
    inside = tmp_path / "shm"
    inside.mkdir()
    (inside / "xvcomm-x").mkdir()
    outside = tmp_path / "precious-file"
    outside.write_text("kept")
    mine, other = (Segment.create(str(inside), job, PAGE) for job in ("mine", "other"))
    (inside / "xvcomm-mine-notes").write_text("no segment")
    opened = inside / "xvcomm-mine-1-0123456789ab"
    opened.write_text("others may read it, so xvcomm did not make it")
    opened.chmod(0o644)
    for job in ("x/../../precious", "mine"):
        sweep(str(inside), job)
    assert outside.exists()
    assert sorted(path.name for path in inside.iterdir()) == sorted(
        ["xvcomm-x", other.name, "xvcomm-mine-notes", opened.name]
    )
    mine.close()
    other.close()


def test_what_is_wrong_with_a_folder(tmp_path: Path) -> None:
    assert unusable(str(tmp_path)) == ""
    assert unusable(str(tmp_path / "none")) == "it cannot be used (No such file or directory)"
    (tmp_path / "file").touch()
    assert unusable(str(tmp_path / "file")) == "it is no folder"
