"""Several processes share compiled kernels."""

import contextlib
import fcntl
import os
import subprocess
import sys

import pytest

MODULE = """
from xvcomm.jit import compile as jit
from xvcomm.jit.compile import brief, compiling, kernel, native

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
    """Starts a process that needs the same kernels as the others, with a cache folder of its own."""
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "kernels.py").write_text(MODULE)
    env = os.environ | {"XVCOMM_KERNEL_CACHE": str(tmp_path / "cache")}
    started = []

    def start(before="pass"):
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {before}; import kernels"
        command = [sys.executable, "-c", code]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
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
    with open(folder / "cache" / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_one_process_compiles_and_the_others_load(start):
    counts = [_compiled(process) for process in [start() for _ in range(3)]]
    assert sorted(counts) == [0, 0, 2]


def test_cached_kernels_are_loaded_while_another_process_compiles(start, tmp_path):
    assert _compiled(start()) == 2
    with _lock(tmp_path):
        assert _compiled(start()) == 0


def test_missing_kernels_wait_for_the_process_that_compiles(start, tmp_path):
    with _lock(tmp_path):
        process = start()
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=5)
    assert _compiled(process) == 2


def test_a_process_that_holds_the_lock_and_does_nothing_is_not_waited_for(start, tmp_path):
    """One wait in all: the second block of kernels does not wait again."""
    with _lock(tmp_path):
        process = start("from xvcomm.jit import compile as jit; jit.TURN_SECONDS = 0.5")
        assert _compiled(process) == 2


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_a_foreign_file_in_place_of_the_lock_is_not_changed(start, tmp_path, what):
    place = tmp_path / "cache" / "lock"
    if what == "link":
        place.symlink_to(tmp_path / "elsewhere")
    elif what == "pipe":
        os.mkfifo(place)
    else:
        place.mkdir()
    assert _compiled(start()) == 2
    assert _compiled(start()) == 0
    assert not (tmp_path / "elsewhere").exists()


SOON = "from xvcomm.jit import progress; from xvcomm.system import notice; notice.PLACE, progress.FIRST_SECONDS = {place!r}, 0.0"


def _said(process):
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    return said


def test_a_start_that_compiles_for_long_says_so_and_one_that_loads_does_not(start, tmp_path):
    soon = SOON.format(place=str(tmp_path / "kernels.py"))
    assert "compiling kernels, once per machine and user: 1 of about" in _said(start(soon))
    assert _said(start(soon)) == ""


@pytest.mark.parametrize("how", ["another process speaks", "logging"])
def test_a_start_that_compiles_is_silent_where(start, tmp_path, how):
    place = tmp_path / "kernels.py"
    quiet = "import logging; logging.getLogger('xvcomm').setLevel(logging.ERROR); " if how == "logging" else ""
    with open(place) as speaker:
        fcntl.flock(speaker, fcntl.LOCK_EX if not quiet else fcntl.LOCK_UN)
        assert _said(start(quiet + SOON.format(place=str(place)))) == ""


def test_functions_without_a_source_file_are_compiled_at_every_start(start, tmp_path):
    """And the user is told once."""
    place = str(tmp_path / "kernels.py")
    code = f"from xvcomm.system import notice; notice.PLACE = {place!r}; exec(open({place!r}).read()); sys.exit(0)"
    for _ in range(2):
        out, said = start(code).communicate(timeout=60)
        assert out == "compiled 2\n"
        assert (
            said.count("are not kept, because xvcomm's source files cannot be read: __main__ has no source file") == 1
        )
