"""`import xvcomm` is quick, imports no framework, and has no side effects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FRAMEWORKS = ("torch", "jax", "jaxlib", "cupy", "mpi4py", "hip")
IMPORT_SECONDS = 0.5


def python(root: Path, code: str, cwd: Path | None = None) -> Any:
    """Run `code` in a new interpreter that imports xvcomm from the repository; parses its output as JSON."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd or root, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def core_modules(root: Path) -> list[str]:
    """Dotted names of every module of `xvcomm/`; the links to backends and adapters are not followed."""
    files = [Path(top, name) for top, _, names in os.walk(root / "xvcomm") for name in names if name.endswith(".py")]
    parts = [file.relative_to(root).with_suffix("").parts for file in files if file.name != "__main__.py"]
    return sorted(".".join(p[:-1] if p[-1] == "__init__" else p) for p in parts)


def test_import_is_quick(root: Path) -> None:
    code = "import time; t = time.perf_counter(); import xvcomm; print(time.perf_counter() - t)"
    seconds = [python(root, code) for _ in range(4)][1:]
    assert min(seconds) <= IMPORT_SECONDS, f"import xvcomm took {seconds} seconds"


def test_import_brings_no_framework_and_no_compiler(root: Path) -> None:
    loaded = python(root, "import json, sys, xvcomm; print(json.dumps(sorted(sys.modules)))")
    assert set(loaded).isdisjoint({*FRAMEWORKS, "numba", "llvmlite", "matplotlib", "typer", "rich"})


@pytest.mark.parametrize(
    ("words", "module", "others"),
    [
        (["--help"], "certify", set()),
        (["run", "-n", "1", "--", "true"], "run", {"numpy", "xvcomm.cli.certify"}),
        (["trace", "nowhere"], "trace", {"xvcomm.cli.certify"}),
    ],
    ids=["help", "run", "trace"],
)
def test_the_command_brings_no_compiler(root: Path, words: list[str], module: str, others: set[str]) -> None:
    """A launcher would compile kernels that it never uses; and each job waits for what its launcher imports."""
    code = f"""
import contextlib, io, json, sys
from xvcomm.cli import main
sys.argv[1:] = {words!r}
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
print(json.dumps(sorted(sys.modules)))
"""
    loaded = set(python(root, code))
    assert f"xvcomm.cli.{module}" in loaded
    assert loaded.isdisjoint({*FRAMEWORKS, "numba", "llvmlite", "matplotlib", *others})


def test_no_core_module_brings_a_framework(root: Path) -> None:
    modules = core_modules(root)
    assert "xvcomm.schedule.steps" in modules
    code = f"""
import importlib, json, sys
guilty = {{}}
for name in {modules!r}:
    importlib.import_module(name)
    for framework in {FRAMEWORKS!r}:
        if framework in sys.modules:
            guilty.setdefault(framework, name)
print(json.dumps(guilty))
"""
    assert python(root, code) == {}


def test_import_has_no_side_effects(root: Path, tmp_path: Path) -> None:
    code = """
import glob, json, os, signal, sys, threading, warnings
import numpy
def state():
    return {
        "threads": len(threading.enumerate()),
        "files": sorted(os.readlink(fd) for fd in glob.glob("/proc/self/fd/*") if os.path.exists(fd)),
        "shared memory": sorted(glob.glob(f"/dev/shm/xvcomm-*{os.getpid()}*")),
        "environment": dict(os.environ),
        "folder": os.listdir("."),
        "signals": [str(signal.getsignal(s)) for s in sorted(signal.valid_signals())],
        "hooks": [str(sys.excepthook), str(threading.excepthook), str(sys.unraisablehook)],
        "warnings": len(warnings.filters),
        "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
    }
before = state()
import xvcomm
after = state()
print(json.dumps({key: [before[key], after[key]] for key in before if before[key] != after[key]}))
"""
    assert python(root, code, cwd=tmp_path) == {}
