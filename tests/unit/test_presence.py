"""The file lock by which other processes on the host see that a process is alive."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from xvcomm.engine.session.presence import NOWHERE, Presence
from xvcomm.engine.session.watchdog import Watchdog, WatchedProcess

HOLDER = """
import sys
from xvcomm.engine.session.presence import Presence
print(Presence.take(sys.argv[1]).byte, flush=True)
sys.stdin.read()
"""
FORKER = """
import os, sys
from xvcomm.engine.session.presence import Presence
print(Presence.take(sys.argv[1]).byte, flush=True)
ready, done = os.pipe()
if os.fork() == 0:
    os.write(done, b"x")
    sys.stdin.read()
    os._exit(0)
os.read(ready, 1)
print("forked", flush=True)
os.kill(os.getpid(), 9)
"""


def start(program, folder):
    """Starts a process that runs the program; returns it and the byte that it locks."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, int(process.stdout.readline())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_held_until_the_process_ends(number):
    mine = Presence.take("/dev/shm")
    process, byte = start(HOLDER, "/dev/shm")
    with process:
        assert byte != mine.byte and mine.held(byte)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert mine.held(byte), "a stopped process lives"
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        process.wait()
        assert not mine.held(byte)


def test_a_forked_child_does_not_hold_its_parents():
    mine = Presence.take("/dev/shm")
    process, byte = start(FORKER, "/dev/shm")
    with process:
        assert process.stdout.readline() == "forked\n"
        process.wait()
        assert not mine.held(byte)
        process.stdin.close()  # the child ends


def test_one_lock_per_folder(tmp_path):
    one = Presence.take("/dev/shm")
    assert Presence.take("/dev/shm/") is one and one.held(one.byte)
    assert Presence.take(str(tmp_path)) is not one


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.fcntl", refuse)
    without = Presence.take(str(tmp_path))
    assert without.byte == NOWHERE
    assert without.held(12345), "nobody is said to be dead who may live"


@pytest.mark.parametrize("why", ["forbidden", "another namespace", "descriptor"])
def test_a_watchdog_notices_the_end(monkeypatch, why):
    def forbid(pid):
        raise PermissionError(1, "Operation not permitted")

    if why == "forbidden":
        monkeypatch.setattr(os, "pidfd_open", forbid)
    process, byte = start(HOLDER, "/dev/shm")
    ended, over = [], threading.Event()

    def on_exit(rank):
        ended.append(rank)
        over.set()

    with process:
        pid = None if why == "another namespace" else process.pid
        watchdog = Watchdog([WatchedProcess(3, pid, byte)], Presence.take("/dev/shm"), on_exit, lambda: None)
        try:
            assert not over.wait(0.3)
            process.kill()
            assert over.wait(20) and ended == [3]
        finally:
            watchdog.close()


def test_a_reused_pid():
    process, byte = start(HOLDER, "/dev/shm")
    with process:
        process.kill()
    ended = threading.Event()
    watchdog = Watchdog(
        [WatchedProcess(3, os.getppid(), byte)], Presence.take("/dev/shm"), lambda _: ended.set(), lambda: None
    )
    assert ended.wait(20)
    watchdog.close()
