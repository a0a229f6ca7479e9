"""What one process compiled, the next one finds on disk: for every kind of element type."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
from xvcomm.backends.host.reducers import kit, scaler
from xvcomm.dtype import BY_NAME, ReduceOp
dtype = BY_NAME[{name!r}]
kit(dtype, ReduceOp.SUM)
scaler(dtype)
"""


@pytest.mark.parametrize("name", ["complex64", "float16", "bfloat16", "float8_e5m2fnuz"])
def test_nothing_is_compiled_twice(name: str, root: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    sizes = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", CODE.format(name=name)], env=environment, check=True, timeout=100)
        sizes.append(sorted((file.name, file.stat().st_mtime_ns) for file in tmp_path.rglob("*.nbc")))
    assert sizes[0]
    assert sizes[0] == sizes[1]
