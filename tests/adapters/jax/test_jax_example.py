"""The data-parallel example on real ranks gives the losses of one process."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "jax_data_parallel.py"


@pytest.mark.parametrize("islands", [pytest.param("cuda:1,rocm:1", marks=pytest.mark.slow), "cuda:2,rocm:1"])
def test_losses_are_those_of_one_process(python: str, tmp_path: Path, islands: str) -> None:
    """Over two islands, of equal and of unequal size; the losses decrease."""
    run = [python, "-m", "xvcomm", "run", "--islands", islands, "--"]
    command = [*run, str(EXAMPLE), "--check", "--steps", "41"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XVCOMM_")}
    environment |= {"XVCOMM_DEVICE": "host", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(found) for found in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3 and losses[0] > 5.3 > 4.6 > losses[-1]
    worst = re.search(r"worst difference from one process: (\S+), relative", done.stdout)
    assert worst and float(worst[1]) <= 1e-5
