"""The check after every test detects what was left behind, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CLEAN = {
    "nothing": "pass",
    "cycle": "a = [socket.socket()]; a.append(a)",
    "waited": 'subprocess.run(["true"], check=True)',
    "ending": 'subprocess.run("sleep 0.5 &", shell=True, check=True)',
}
LEAKING = {
    "shm": ('Path("/dev/shm", "xvcomm-" + os.environ["XVCOMM_JOB"] + "-{unique}").touch()', "/dev/shm/xvcomm-test"),
    "child": ('KEPT.append(subprocess.Popen(["sleep", "601"]))', "sleep 601"),
    "orphan": ('subprocess.run("sleep 602 & echo $! > orphan", shell=True, check=True)', "sleep 602"),
    "zombie": ('KEPT.append(subprocess.Popen(["true"]))', "(ended, not waited for)"),
    "socket": ("KEPT.append(socket.socket())", "socket:["),
}
HEAD = "import os, socket, subprocess\nfrom pathlib import Path\nKEPT = []\n"


@pytest.fixture(scope="module")
def inner(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a test for each case has run under the check; `report` contains pytest's output."""
    folder = tmp_path_factory.mktemp("inner")
    shutil.copy(root / "tests" / "conftest.py", folder)
    bodies = CLEAN | {case: body.format(unique=folder.name) for case, (body, _) in LEAKING.items()}
    tests = [f"def test_{case}():\n    {body}\n" for case, body in bodies.items()]
    (folder / "test_cases.py").write_text(HEAD + "\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-rA", folder]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    finally:
        for left in Path("/dev/shm").glob(f"xvcomm-*-{folder.name}"):
            left.unlink()
    (folder / "report").write_text(done.stdout)
    return folder


@pytest.mark.parametrize("case", CLEAN)
def test_clean_test_passes(inner: Path, case: str) -> None:
    report = (inner / "report").read_text()
    assert f"PASSED test_cases.py::test_{case}\n" in report
    assert f"ERROR test_cases.py::test_{case} " not in report


@pytest.mark.parametrize("case", LEAKING)
def test_leak_is_found(inner: Path, case: str) -> None:
    errors = (inner / "report").read_text().split("_ ERROR at teardown of test_")[1:]
    found = [error for error in errors if error.startswith(f"{case} ")]
    assert len(found) == 1
    assert "left behind by the test:" in found[0]
    assert LEAKING[case][1] in found[0]


def test_leaked_process_is_ended(inner: Path) -> None:
    command_line = Path("/proc") / (inner / "orphan").read_text().strip() / "cmdline"
    assert not command_line.exists() or b"602" not in command_line.read_bytes()


MAPPED = """
import os, subprocess, sys
from pathlib import Path
import pytest

FILE = Path("/dev/shm", "xvcomm-" + os.environ["XVCOMM_JOB"] + "-mapped")
KEEPER = "import mmap, sys; sys.stdin.read(1); f = open(sys.argv[1], 'xb+'); f.truncate(8); m = mmap.mmap(f.fileno(), 8);"

@pytest.fixture(scope="module")
def keeper():
    command = [sys.executable, "-c", KEEPER + "print('mapped', flush=True); sys.stdin.read()", str(FILE)]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
    FILE.unlink()

def test_mapped(keeper):
    keeper.stdin.write("x")
    keeper.stdin.flush()
    assert keeper.stdout.readline() == "mapped\\n"
"""


def test_what_ranks_of_a_fixture_map_is_not_waited_for(root: Path, tmp_path: Path) -> None:
    """The check ends at once, however long it waits for what is left behind."""
    check = (root / "tests" / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(check.replace("GRACE_SECONDS = 2.0", "GRACE_SECONDS = 1000.0"))
    (tmp_path / "test_mapped.py").write_text(MAPPED)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", tmp_path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
