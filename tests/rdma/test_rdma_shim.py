"""The two hosts themselves, where they are built: NICs, exit status, output, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

RXE = Path(__file__).resolve().parents[1] / "shims" / "rxe"


def test_worst_exit_status_and_output(start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with start("sh", "-c", "cat /sys/class/infiniband/rxe1/ports/1/state; exit $((HOST_INDEX * 3))") as hosts:
        assert hosts.wait(120) == 3
    printed = capfd.readouterr().out
    assert "host 0| 4: ACTIVE" in printed
    assert "host 1| 4: ACTIVE" in printed


def test_nothing_is_built_for_those_who_do_not_want_it(tmp_path: Path) -> None:
    command = [sys.executable, str(RXE / "run.py"), "--kept", "--", "false"]
    env = {**os.environ, "RXE_CACHE": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"skipped: the hosts with RDMA NICs are not built in {tmp_path}: ")
    assert "17 CPU minutes" in done.stdout
    assert not list(tmp_path.iterdir())


def test_time_limit(start: Any) -> None:
    with start("sleep", "1000") as hosts:
        begun = time.monotonic()
        assert hosts.wait(4) == 124
        assert time.monotonic() - begun < 60


def test_writable_folders_keep_what_is_written(start: Any, tmp_path: Path) -> None:
    kept, lost = tmp_path / "kept", tmp_path / "lost"
    kept.mkdir()
    lost.mkdir()
    with start("sh", "-c", f"touch {kept}/$HOST_INDEX {lost}/$HOST_INDEX", writable=[kept]) as hosts:
        assert hosts.wait(120) == 0
    assert sorted(file.name for file in kept.iterdir()) == ["0", "1"]
    assert not list(lost.iterdir())


def test_a_host_that_does_not_boot(start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with start("true", writable=[Path("/dev/null/none")]) as hosts:
        assert hosts.wait(120) == 125
    assert "fail cannot mount /dev/null/none" in capfd.readouterr().err


def test_where_they_cannot_be_built_it_says_why(tmp_path: Path) -> None:
    command = [sys.executable, str(RXE / "run.py"), "--", "false"]
    variables = {"PATH": str(tmp_path), "RXE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("skipped: no hosts with RDMA NICs: the hosts are built from Debian's packages")


def sessions() -> dict[int, int]:
    """The session of each process of this machine that is not a zombie."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if fields[0] not in "ZX":
            found[int(stat.parent.name)] = int(fields[3])
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_host_outlives_the_command_line(start: Any, tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, str(RXE / "run.py"), "--", "sh", "-c", "echo up; sleep 1000"]
    before = set(sessions().values())
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as running:
        assert running.stdout
        assert sorted(running.stdout.readline().strip() for _ in range(2)) == ["host 0| up", "host 1| up"]
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        assert len(children) == 3, "two kernels and the guard, each in a session"
        running.send_signal(number)
        assert running.wait(60) == (-9 if number == signal.SIGKILL else 143)
    mine = set(map(int, children))
    assert not mine & before
    deadline = time.monotonic() + 60
    while mine & set(sessions().values()) or any(tmp_path.iterdir()):
        assert time.monotonic() < deadline, (list(tmp_path.iterdir()), sessions())
        time.sleep(0.05)


NICE = """#!/bin/sh
shift 2
[ "$1" != "$BROKEN" ] || { echo "no such luck"; exit 2; }
case "$1 $*" in
apt-get*indextargets*) echo http://deb.invalid/debian ;;
apt-get*download*) : > linux-source-7.2_1_all.deb ;;
esac
"""
"""In place of all that builds: does nothing, or fails."""


@pytest.mark.parametrize(("broken", "status", "told"), [
    ("apt-get", 0, "skipped: no hosts with RDMA NICs: packages cannot be had"),
    ("patch", 125, "the hosts with RDMA NICs cannot be built"),
    ("make", 125, "the hosts with RDMA NICs cannot be built"),
])  # fmt: skip
def test_only_a_machine_that_cannot_build_them_skips(tmp_path: Path, broken: str, status: int, told: str) -> None:
    packages = "for name; do echo $name install ok installed; done"
    for name, text in {"nice": NICE, "dpkg-query": f"#!/bin/sh\n{packages}\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RXE_CACHE": str(tmp_path / "cache"), "BROKEN": broken}
    command = [sys.executable, str(RXE / "run.py"), "--", "false"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    assert told in done.stdout + done.stderr
    assert "no such luck" in done.stdout + done.stderr
    assert not list((tmp_path / "cache").iterdir())
