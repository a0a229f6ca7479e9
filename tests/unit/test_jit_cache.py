"""Kernels compiled by one process are loaded from disk by the next, unless a source file that they depend on has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CODE = """
from xvcomm.backends.host.reducers import kit, scaler
from xvcomm.types.dtype import BY_NAME, ReduceOp
dtype = BY_NAME[{name!r}]
kit(dtype, ReduceOp.SUM)
scaler(dtype)
"""


@pytest.mark.parametrize("name", ["complex64", "float16", "bfloat16", "float8_e5m2fnuz"])
def test_nothing_is_compiled_twice(name: str, root: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "XVCOMM_KERNEL_CACHE": str(tmp_path), "PYTHONPATH": str(root)}
    sizes = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", CODE.format(name=name)], env=environment, check=True, timeout=100)
        sizes.append(sorted((file.name, file.stat().st_mtime_ns) for file in tmp_path.iterdir() if file.name != "lock"))
    assert sizes[0]
    assert sizes[0] == sizes[1]


INLINED = """
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

OFFSET = 100

@register_jitable
def increased(x):
    return x + 1

@intrinsic
def scaled(typingctx, x):
    def generate(context, builder, signature, args):
        return builder.mul(args[0], ir.Constant(ir.IntType(64), 10))
    return types.int64(types.int64), generate
"""
KERNELS = """
import sys
from mine import inlined
from mine.inlined import increased, scaled
from xvcomm.jit import compile as jit

def by_function(x):
    return increased(x)

def by_constant(x):
    return x + inlined.OFFSET

def by_intrinsic(x):
    return scaled(x)

with jit.compiling():
    kernels = [jit.kernel("int64(int64)")(f) for f in (by_function, by_constant, by_intrinsic)]
for kernel in kernels:
    print(kernel(1), sum(kernel.stats.cache_misses.values()))
print("scipy.linalg" in sys.modules, 0)
"""
EDITS = {
    "function": ("x + 1", "x + 2", 0, 3),
    "constant": ("100", "200", 1, 201),
    "intrinsic": ("64), 10", "64), 20", 2, 20),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Callable[..., list[list[str]]]:
    """Runs the kernels with a text of what they inline; returns for each its result and how often it was compiled."""
    folder = tmp_path_factory.mktemp("cached")
    (folder / "mine").mkdir()
    (folder / "mine" / "__init__.py").write_text("")
    (folder / "mine" / "kernels.py").write_text(KERNELS)

    def run(inlined: str, seed: int = 0) -> list[list[str]]:
        (folder / "mine" / "inlined.py").write_text(inlined)
        environment = {
            **os.environ, "PYTHONPATH": f"{root}:{folder}", "XVCOMM_KERNEL_CACHE": str(folder / "cache"),
            "PYTHONHASHSEED": str(seed),
            "PYTHONDONTWRITEBYTECODE": "1",  # else Python itself would take an edit within a second for none
        }  # fmt: skip
        command = [sys.executable, "-c", "import mine.kernels"]
        done = subprocess.run(
            command, env=environment, cwd=folder, check=True, timeout=100, capture_output=True, text=True
        )
        return [line.split() for line in done.stdout.splitlines()]

    run(INLINED)
    return run


def test_processes_with_other_hashes_find_the_same_files(results: Callable[..., list[list[str]]]) -> None:
    for seed in (1, 2):
        assert results(INLINED, seed)[:3] == [["2", "0"], ["101", "0"], ["10", "0"]]


@pytest.mark.parametrize("what", EDITS)
def test_a_change_of_what_is_inlined_from_another_file(what: str, results: Callable[..., list[list[str]]]) -> None:
    """Every kernel of the importing module is compiled again."""
    old, new, index, value = EDITS[what]
    assert INLINED.count(old) == 1
    expected = [["2", "1"], ["101", "1"], ["10", "1"]]
    expected[index] = [str(value), "1"]
    assert results(INLINED.replace(old, new))[:3] == expected


def test_loading_alone_imports_nothing_of_what_only_the_compiler_needs(results: Callable[..., list[list[str]]]) -> None:
    """numba imports scipy.linalg, where it is installed, before it compiles: a third of a second of each rank's start."""
    pytest.importorskip("scipy")
    assert results(INLINED)[3] == ["False", "0"]
