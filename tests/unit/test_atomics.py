"""Raw memory access and waiting in compiled code."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from xvcomm.jit.atomics import hand_over
from xvcomm.jit.compile import compiling, kernel


def _copy(dst: int, src: int, count: int) -> None:
    hand_over(dst, src, count)


with compiling():
    copy = kernel("void(int64, int64, int64)")(_copy)


@pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (0, 3), (33, 62)])
def test_every_byte_is_copied_and_none_beside_them(offsets: tuple[int, int]) -> None:
    source = np.random.default_rng(0).integers(0, 255, 4200, np.uint8)
    into, out = offsets
    for count in [*range(200), 2047, 2048, 4096, 4097]:
        target = np.full(4200, 255, np.uint8)
        copy(target.ctypes.data + into, source.ctypes.data + out, count)
        assert (target[into : into + count] == source[out : out + count]).all()
        assert (target[:into] == 255).all() and (target[into + count :] == 255).all()


WAITING = """
import os, sys, time
import numpy as np
from xvcomm.jit.atomics import PENDING, await_word
from xvcomm.jit.compile import compiling, kernel

def _wait(word, abort):
    return await_word(word, 1, abort, 0, 20_000_000)

with compiling():
    wait = kernel("int64(int64, int64)")(_wait)
words = np.zeros(2, np.int64)
print("ready", flush=True)
sys.stdin.readline()
os.sched_setaffinity(0, {int(sys.argv[1])})
began = time.monotonic()
assert wait(words.ctypes.data, words.ctypes.data + 8) == PENDING
print(time.monotonic() - began)
"""


def test_waiting_returns_on_a_busy_core() -> None:
    """A yield takes milliseconds there: 400 that counted as no time held up deadlines for seconds."""
    core = min(os.sched_getaffinity(0))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    waiting = subprocess.Popen([sys.executable, "-c", WAITING, str(core)], text=True, **pipes)
    started = [waiting]
    try:
        assert waiting.stdout is not None and waiting.stdout.readline() == "ready\n"
        begin = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
        busy = [subprocess.Popen([sys.executable, "-c", begin], stdout=subprocess.PIPE, text=True) for _ in range(4)]
        started += busy
        for process in busy:
            assert process.stdout is not None and process.stdout.readline()
        printed, told = waiting.communicate("\n", timeout=100)
        assert waiting.returncode == 0, told
        assert float(printed) < 1
    finally:
        for process in started:
            process.kill()
            process.communicate()
