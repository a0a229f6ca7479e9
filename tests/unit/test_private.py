"""Files in a private folder are only read if this user wrote them and no other user can change them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from xvcomm.cli.doctor import examine
from xvcomm.jit.cache import KernelCache
from xvcomm.system import notice
from xvcomm.system.private import NotPrivate, PrivateFolder

NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def test_written_files_are_read(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path / "deep" / "folder")
    assert folder.make() and folder.read("name") is None
    folder.write("name", b"content")
    folder.write("name", b"more")
    folder.write("name", b"less", once=True)
    assert folder.read("name") == b"more" and os.listdir(folder.path) == ["name"]
    assert (folder.path.stat().st_mode & 0o777, (folder.path / "name").stat().st_mode & 0o777) == (0o700, 0o600)


def _link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


CHANGES: dict[str, Callable[[Path], None]] = {
    "symbolic link": _link,
    "write to it": lambda path: path.chmod(path.stat().st_mode | 0o020),
    "mode 777": lambda path: path.chmod(0o777),
    "another user": lambda path: os.chown(path, NOBODY, -1),
}


@pytest.mark.parametrize("place", ["folder", "folder/name"])
@pytest.mark.parametrize("reason", CHANGES)
def test_files_that_another_user_can_write_are_refused(tmp_path: Path, place: str, reason: str) -> None:
    if reason == "another user" and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    folder = PrivateFolder(tmp_path / "folder")
    folder.make()
    folder.write("name", b"content")
    CHANGES[reason](tmp_path / place)
    with pytest.raises(NotPrivate, match=reason) as error:
        folder.read("name")
    assert error.value.filename == str(tmp_path / place)


def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "name")
    with pytest.raises(NotPrivate, match="not a regular file"):
        PrivateFolder(tmp_path).read("name")


@pytest.mark.parametrize("place", ["cache", "cache/kernel"])
def test_kernels_that_others_could_change_are_not_loaded(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are compiled in memory instead, and that is said once."""
    monkeypatch.setattr(notice, "speaks", lambda: True)  # another process of this tree may be the one that speaks
    KernelCache(tmp_path / "cache").write("kernel", b"image")
    assert KernelCache(tmp_path / "cache").read("kernel") == b"image"
    (tmp_path / place).chmod(0o777)
    with caplog.at_level(logging.WARNING):
        kept = KernelCache(tmp_path / "cache")
        for _ in range(2):
            assert kept.read("kernel") is None
    (said,) = caplog.messages
    assert "other users can write to it (mode 777" in said and "XVCOMM_KERNEL_CACHE" in said


def test_a_folder_of_root_is_read(tmp_path: Path) -> None:
    """An image holds compiled kernels for all users."""
    kept = KernelCache(tmp_path)
    kept.write("kernel", b"image")
    tmp_path.chmod(0o555)
    (tmp_path / "kernel").chmod(0o444)
    assert KernelCache(tmp_path).read("kernel") == b"image"


# The interpreter may lie where only root reads: of root's rights this user keeps the one to read everything.
PROGRAM = """
import ctypes, os, sys, tempfile
libc = ctypes.CDLL(None)
libc.prctl(8, 1, 0, 0, 0)
os.setgroups([])
os.setresgid({user}, {user}, {user})
os.setresuid({user}, {user}, {user})
read = 1 << 2
assert libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(read, read, 0, 0, 0, 0)) == 0
{before}
from xvcomm.trace import contract
from xvcomm.jit.cache import kernel_cache
print("kept", kernel_cache(None))
if "doctor" in sys.argv:
    from xvcomm.cli import main
    sys.argv[1:] = ["doctor", "--json"]
    main()
"""
NO_TEMPORARY = 'tempfile._candidate_tempdir_list = lambda: ["/nonexistent"]'


def _as_nobody(root: Path, home: str, before: str = "pass", *args: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("XVCOMM_", "NUMBA_", "XDG_")) and name != "TMPDIR"
    } | {"HOME": home, "PYTHONPATH": str(root), "TMPDIR": "/nonexistent"}
    code = PROGRAM.format(before=before, user=NOBODY)
    return subprocess.run(
        [sys.executable, "-c", code, *args], env=environment, cwd="/", capture_output=True, text=True, timeout=110
    )


@AS_ROOT
def test_a_user_without_a_writable_folder(root: Path) -> None:
    """Kernels are compiled in memory, and one process says so; the doctor too, with the remedy."""
    done = _as_nobody(root, "/nonexistent", NO_TEMPORARY, "doctor")
    assert "kept in memory" in done.stdout, done.stderr
    assert "compiled kernels cannot be stored" in done.stdout and "no writable temporary folder" in done.stdout
    assert "set XVCOMM_KERNEL_CACHE" in done.stdout


def test_the_doctor_names_the_folder(tmp_path: Path) -> None:
    report = examine({"XVCOMM_KERNEL_CACHE": str(tmp_path / "cache")})
    assert report.machine["compiled kernels"] == str(tmp_path / "cache")
    assert not [problem for problem in report.problems if "kernels" in problem.what]
    (tmp_path / "file").write_text("")
    report = examine({"XVCOMM_KERNEL_CACHE": str(tmp_path / "file")})
    (problem,) = [problem for problem in report.problems if "kernels" in problem.what]
    assert "Not a directory" in problem.what and "XVCOMM_KERNEL_CACHE" in problem.remedy and not problem.fatal


@AS_ROOT
def test_a_user_without_a_home_folder_uses_one_beside_temporary_files(root: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "temporary").mkdir()
    (tmp_path / "temporary").chmod(0o1777)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    done = _as_nobody(root, "/nonexistent", f"tempfile.tempdir = {str(tmp_path / 'temporary')!r}")
    assert done.stdout.split() == ["kept", str(tmp_path / "temporary" / f"xvcomm-{NOBODY}")], done.stderr
