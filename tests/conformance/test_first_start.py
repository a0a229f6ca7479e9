"""The progress message of kernel compilation states about the right number of kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from xvcomm.jit.progress import ABOUT

RANK = """
import numpy as np
import xvcomm
from xvcomm.jit import compile as jit

with xvcomm.init() as comm:
    comm.all_reduce(np.ones(1000, np.float32))
    comm.barrier()
    print("ready", jit.progress.ready, flush=True)
"""


def test_a_rank_needs_about_as_many_kernels_as_progress_says(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "xvcomm", "run", "-n", "2", "--", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    ready = [int(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(ready) == 2, done.stderr
    assert all(abs(count - ABOUT) <= 8 for count in ready)
