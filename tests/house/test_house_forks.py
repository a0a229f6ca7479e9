"""The interpreter of the fixture `python` is to its caller what Python is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

TELL = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ["GIVEN"], __name__, sys.stdin.read())
sys.stderr.write("told")
sys.exit(7)
"""
WAIT = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
LAST = """
import atexit, threading, time
atexit.register(print, "last")
threading.Thread(target=lambda: (time.sleep(0.1), print("first"))).start()
"""


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("way", ["program", "-m", "-c"])
def test_a_program_runs_as_in_an_interpreter_of_its_own(python: str, tmp_path: Path, way: str) -> None:
    (tmp_path / "told.py").write_text(TELL)
    command = {"program": ["told.py"], "-m": ["-m", "told"], "-c": ["-c", TELL]}[way]
    options = {
        "cwd": tmp_path,
        "env": os.environ | {"GIVEN": "set"},
        "input": "read",
        "capture_output": True,
        "text": True,
    }
    found = [subprocess.run([path, "-u", *command, "a", "b"], **options) for path in (sys.executable, python)]
    told = [(done.returncode, done.stdout, done.stderr) for done in found]
    assert told[0] == told[1] == (7, f"['a', 'b'] {tmp_path} set __main__ read\n", "told")


def test_what_it_starts_is_forked_too(python: str) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; print(sys.executable)'])"
    assert subprocess.check_output([python, "-c", code], text=True).strip() == python


@pytest.mark.parametrize("way", ["-u", "PYTHONUNBUFFERED"])
def test_unbuffered(python: str, way: str) -> None:
    """What a program has written, a process that it forks does not write once more."""
    code = "import os, sys; sys.stdout.write('once '); os.fork() or sys.exit(); os.wait()"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    variables |= {way: "1"} if way != "-u" else {}
    command = [python, *(["-u"] if way == "-u" else []), "-c", code]
    assert subprocess.check_output(command, env=variables, text=True) == "once "


def test_an_error_that_nobody_handles(python: str) -> None:
    done = subprocess.run([python, "-c", "raise KeyError('why')"], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr.endswith("KeyError: 'why'\n")


def test_threads_and_exit_handlers_come_to_their_end(python: str) -> None:
    assert subprocess.check_output([python, "-c", LAST], text=True) == "first\nlast\n"


def test_options_of_python(python: str) -> None:
    assert (
        subprocess.check_output([python, "-W", "error", "-c", "import sys; print(sys.warnoptions)"]) == b"['error']\n"
    )


def test_a_path_without_the_programs_folder(python: str) -> None:
    code = "import sys; print('' in sys.path)"
    assert [subprocess.check_output([python, *options, "-c", code]) for options in ([], ["-P"], ["-P", "-u"])] == [
        b"True\n", b"False\n", b"False\n",
    ]  # fmt: skip


def test_a_program_of_mpirun_has_an_interpreter_of_its_own(python: str) -> None:
    command = [python, "-c", "import sys; print(sys.executable)"]
    told = subprocess.check_output(command, env=os.environ | {"PMIX_RANK": "0"}, text=True)
    assert told.strip() == sys.executable


def test_namespaces_are_those_of_the_caller(python: str) -> None:
    """A program that a test starts on a simulated host runs there."""
    if subprocess.run(["unshare", "-num", "true"], capture_output=True).returncode:
        pytest.skip("this user may make no namespaces")
    code = "import os; print(*(os.readlink(f'/proc/self/ns/{name}') for name in ('net', 'uts', 'mnt')))"
    told = 'readlink /proc/self/ns/net /proc/self/ns/uts /proc/self/ns/mnt; exec "$@"'
    command = ["unshare", "-num", "sh", "-c", told, "sh", python, "-c", code]
    *caller, program = subprocess.check_output(command, text=True).splitlines()
    assert program.split() == caller
    assert not set(caller) & {os.readlink(f"/proc/self/ns/{name}") for name in ("net", "uts", "mnt")}


def test_limits_are_those_of_the_caller(python: str) -> None:
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    lower = 'ulimit -Sn 77; ulimit -Hn 88; exec "$@"'
    assert subprocess.check_output(["sh", "-c", lower, "sh", python, "-c", code]) == b"(77, 88)\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_for_the_interpreter_ends_the_program(python: str, number: signal.Signals) -> None:
    with subprocess.Popen(
        [python, "-c", WAIT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as started:
        assert started.stdout is not None
        program = Path("/proc") / started.stdout.readline().strip()
        started.send_signal(number)
    assert started.returncode == -number
    until(lambda: not program.exists())


def test_a_program_that_is_killed(python: str) -> None:
    assert subprocess.run([python, "-c", "import os; os.kill(os.getpid(), 9)"]).returncode == -signal.SIGKILL
