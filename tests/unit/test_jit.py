"""Several processes share the results of one compiler."""

import contextlib
import fcntl
import os
import subprocess
import sys

import pytest

MODULE = """
from xvcomm import jit
from xvcomm.jit import brief, compiling, kernel, native

def twice(x: int) -> int:
    return 2 * x

def half(x: int) -> int:
    return x // 2

def same(x: int) -> int:
    return x

with compiling():
    with compiling():
        quick = brief("int64(int64)")(twice)
    free = kernel("int64(int64)")(half)
    address = native("int64(int64)", same)
assert quick(4) == 8 and free(4) == 2 and address
functions = [free, *(f for f in jit._alive if hasattr(f, "stats"))]
print("compiled", sum(sum(f.stats.cache_misses.values()) for f in functions))
"""


@pytest.fixture
def start(tmp_path):
    """Starts a process that needs the same kernels as the others, with a lock of their own."""
    (tmp_path / "kernels.py").write_text(MODULE)
    env = os.environ | {"TMPDIR": str(tmp_path), "NUMBA_CACHE_DIR": ""}
    started = []

    def start():
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import kernels"]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _compiled(process, timeout=60):
    out, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0
    return int(out.split()[1])


@contextlib.contextmanager
def _lock(folder):
    with open(folder / f"xvcomm-jit-{os.getuid()}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_one_process_compiles_and_the_others_load(start):
    counts = [_compiled(process) for process in [start() for _ in range(3)]]
    assert sorted(counts) == [0, 0, 2]


def test_what_is_on_disk_is_loaded_while_another_process_compiles(start, tmp_path):
    assert _compiled(start()) == 2
    with _lock(tmp_path):
        assert _compiled(start()) == 0


def test_what_is_not_on_disk_waits_for_the_process_that_compiles(start, tmp_path):
    with _lock(tmp_path):
        process = start()
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=5)
    assert _compiled(process) == 2
