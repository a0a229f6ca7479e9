"""The store in a folder: its file names, its removal, and unusable folders."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from xvcomm.errors import ConfigError, DeadlineExceeded, StoreError
from xvcomm.rendezvous.store import FileStore
from xvcomm.types.deadline import Deadline


def test_the_last_rank_removes_the_folder(tmp_path: Path) -> None:
    stores = [FileStore(tmp_path / "job", ranks=2) for _ in range(2)]
    stores[0].close()
    stores[0].close()
    stores[1].set("k", b"1")
    stores[1].close()
    assert not (tmp_path / "job").exists()


def test_keys_become_plain_file_names(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "job")
    for key in ("..", "/etc/passwd", "a/b", "x" * 1000, "x" * 1001, "é\n"):
        store.set(key, key.encode())
    for key in ("..", "/etc/passwd", "a/b", "x" * 1000, "x" * 1001, "é\n"):
        assert store.get(key, Deadline.after(0)) == key.encode()
    assert len(list((tmp_path / "job").iterdir())) == 6
    assert (tmp_path / "job").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    with pytest.raises(StoreError, match="every rank"):
        FileStore(tmp_path / "plain")
    store = FileStore(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StoreError, match="set 'k'"):
        store.set("k", b"1")
    with pytest.raises(StoreError, match="add to 'n'"):
        store.add("n", 1)


def test_adding_to_a_text_is_an_error(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.set("k", b"text")
    with pytest.raises(StoreError, match="not an integer"):
        store.add("k", 1)


def test_a_lock_that_another_holds_ends_at_the_deadline(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "job", ranks=1)
    assert store.add("n", 1) == 1
    with (tmp_path / "job" / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"lock.*stopped"):
            store.add("n", 1, Deadline.after(0.2))
        assert time.monotonic() - began < 10
    assert store.add("n", 1, Deadline.after(10)) == 2
    store.close()


@pytest.mark.parametrize(("mode", "fits"), [(0o700, True), (0o775, True), (0o1777, True), (0o777, False)])
def test_a_folder_that_every_user_can_change_is_refused(tmp_path: Path, mode: int, fits: bool) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job").chmod(mode)
    if fits:
        FileStore(tmp_path / "job").close()
    else:
        with pytest.raises(ConfigError, match=r"every user.*mode 777.*chmod 700"):
            FileStore(tmp_path / "job")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job").mkdir(mode=0o777)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "own").mkdir()
    if os.geteuid() == 0:
        os.chown(tmp_path / "job", 12345, -1)
        os.chown(tmp_path / "link", 12345, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    for name in ("job", "link"):
        with pytest.raises(ConfigError, match="belongs to another user"):
            FileStore(tmp_path / name)


def test_a_folder_that_a_job_left_on_other_hosts_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "members").write_text("another/host 1 1\nanother/host 2 2\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"2 processes of another job.*rm -r"):
            FileStore(tmp_path, ranks=2).enter(2, Deadline.after(10))


def test_running_ranks_keep_the_folder(tmp_path: Path) -> None:
    stores = [FileStore(tmp_path / "job", ranks=2) for _ in range(2)]
    stores[0].enter(2, Deadline.after(10))
    stores[0].set("k", b"1")
    stores[1].enter(2, Deadline.after(10))
    assert stores[1].get("k", Deadline.after(10)) == b"1"
    for store in stores:
        store.close()
    assert not (tmp_path / "job").exists()
