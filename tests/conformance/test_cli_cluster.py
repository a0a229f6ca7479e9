"""`xvcomm doctor --cluster` on the ranks of a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

pytestmark = pytest.mark.usefixtures("python")
ENV = {name: value for name, value in os.environ.items() if not name.startswith("XVCOMM_")}


def cluster(
    ranks: int, shell: str = "", *options: str, env: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """Call it on ranks, each after some words of shell."""
    python = os.environ["TEST_PYTHON"]
    doctor = f"{shell} exec {python} -m xvcomm doctor --cluster {' '.join(options)}"
    command = [python, "-m", "xvcomm", "run", "-n", str(ranks), "--no-prefix", "--", "sh", "-c", doctor]
    variables = {**ENV, "XVCOMM_DEVICE": "host", "COLUMNS": "120", **env}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(("ranks", "told"), [(1, "1 rank"), (2, "2 ranks")])
def test_no_differences(ranks: int, told: str) -> None:
    done = cluster(ranks)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{told} on 1 host: no differences.\n"


def test_differences_of_settings_and_limits() -> None:
    shell = (
        "export XVCOMM_HOST=h$((XVCOMM_RANK / 2));"
        "[ $XVCOMM_RANK = 3 ] && export XVCOMM_RING_SLOTS=32; [ $XVCOMM_RANK -gt 1 ] && ulimit -n 512;"
    )
    done = cluster(4, shell, "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (found["ranks"], found["hosts"]) == (4, ["h0", "h1"])
    told = {one["what"]: dict(one["values"]) for one in found["differences"]}
    assert told.keys() == {"XVCOMM_RING_SLOTS", "open files (nofile)"}
    assert told["XVCOMM_RING_SLOTS"]["32"] == "rank 3"
    assert told["open files (nofile)"]["512"] == "h1"
    assert all(one["remedy"] for one in found["differences"])


def test_topology_of_ranks_with_gpus(rocm_path: Path, python: str) -> None:
    pytest.importorskip("rocm.bindings", reason="hip-python is not installed")
    command = [python, "-m", "xvcomm", "run", "-n", "2", "--no-prefix", "--", "xvcomm", "topo"]
    env = {**ENV, "ROCM_PATH": str(rocm_path), "XVCOMM_DEVICE": "rocm"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ranks on 1 host; islands: rocm x 2\n")
    assert "  rank 1  island rocm  rocm  0000:02:00\n" in done.stdout
    assert "  rank 1  an unknown distance\n" in done.stdout


def test_ranks_with_gpus(rocm_path: Path) -> None:
    """What NCCL and RCCL read is compared as well; versions of libraries and drivers that are the same are not told."""
    pytest.importorskip("rocm.bindings", reason="hip-python is not installed")
    env = {"ROCM_PATH": str(rocm_path), "XVCOMM_DEVICE": "rocm", "NO_COLOR": "1"}
    done = cluster(3, "[ $XVCOMM_RANK = 2 ] && export NCCL_ALGO=Ring;", env=env)
    assert done.returncode == 1, done.stderr
    assert "NCCL_* (rocm)" in done.stdout and "NCCL_ALGO=Ring" in done.stdout
    assert "rank 2" in done.stdout and "RCCL" not in done.stdout
    versions = "from xvcomm.backends.rocm import RocmBackend; print(RocmBackend().versions()['RCCL'])"
    asked = subprocess.run(
        [sys.executable, "-c", versions], env={**ENV, **env}, capture_output=True, text=True, timeout=60
    )
    assert asked.stdout[:1].isdigit(), asked.stderr
