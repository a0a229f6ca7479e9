"""The stack of the main thread, taken by a signal: also of a process whose interpreter is blocked."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from xvcomm.system.stacks import StackFile, collect, first, handled, request, send, written_by

HOLD = """
from xvcomm.system.stacks import StackFile
file = StackFile.take()
def holds_the_interpreter():
    sum(range(10**12))
print("begun", flush=True)
holds_the_interpreter()
"""


@pytest.fixture
def file() -> StackFile:
    return StackFile.take()


def test_a_signal_writes_the_stack(file: StackFile) -> None:
    me = os.getpid()
    assert written_by(me) == "" and handled(me)
    for _ in range(2):  # the second text replaces the first
        time.sleep(0.6)
        assert request(me) and request(me)  # the second one is answered by the first one's text
        assert written_by(me).count("test_a_signal_writes_the_stack") == 1


def test_an_older_text_is_not_taken_for_the_answer(file: StackFile) -> None:
    """Another reader has asked, and was held up before it has emptied the file."""
    me = os.getpid()
    time.sleep(0.6)
    assert request(me) and collect([me], 0.1, time.time())[me]
    os.utime(file.fd, (time.time() - 2, time.time() - 2))
    assert written_by(me) and collect([me], 0.1, time.time()) == {me: ""}


def test_a_stack_is_complete_when_another_one_follows() -> None:
    head, frame = "Stack (most recent call first):\n", '  File "job.py", line 1 in step\n'
    assert first("") == first(head + frame) == first(frame + head + frame) == ""
    assert first(head + frame + head) == first(frame + head + frame + head + frame[:9]) == head + frame
    assert first(frame + head + frame, complete=False) == head + frame and first(frame, complete=False) == ""


def test_what_there_is_at_the_deadline_of_a_stack_that_is_not_complete(file: StackFile) -> None:
    text = 'Stack (most recent call first):\n  File "job.py", line 1 in step\n'
    os.ftruncate(file.fd, 0)
    os.write(file.fd, text.encode())
    assert written_by(os.getpid()) == ""
    assert collect([os.getpid()], 0.05, time.time()) == {os.getpid(): text}


def test_there_is_one_for_a_process(file: StackFile) -> None:
    assert StackFile.take() is file


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None], ids=["ignored", "handled"])
def test_what_the_program_does_with_a_signal_is_left_alone(handler: Any) -> None:
    number = signal.SIGRTMIN + 9
    before = signal.signal(number, handler)
    try:
        with pytest.raises(OSError, match="handles or ignores"):
            StackFile.take(number, "test")
    finally:
        signal.signal(number, before)


def test_a_process_that_holds_the_interpreter_lock() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            time.sleep(0.6)
            assert request(process.pid)
            until = time.monotonic() + 10
            while not (text := written_by(process.pid)) and time.monotonic() < until:
                time.sleep(0.01)
            assert "in holds_the_interpreter" in text
        finally:
            process.kill()


def test_a_child_does_not_write_to_its_parent(file: StackFile) -> None:
    os.ftruncate(file.fd, 0)
    pid = os.fork()
    if pid == 0:
        send(os.getpid())
        os._exit(int("test_a_child" not in written_by(os.getpid())))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert written_by(os.getpid()) == ""


def test_processes_without_stacks_are_left_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not request(process.pid) and written_by(process.pid) == ""
        assert process.poll() is None
        process.kill()
    assert not request(process.pid)
