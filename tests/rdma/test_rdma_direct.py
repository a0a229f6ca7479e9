"""Rings in GPU memory that devices of the fake provider read and write: any side, any fault, and the CPU never touches them.

The stand-in for GPUs closes their memory to host code, and the provider keeps back what it writes there until a READ from it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install hip-python")
JOB = Path(__file__).with_name("direct_job.py")


@pytest.fixture
def run(fake_verbs, fresh, shim, rocm_path):
    """A function that runs the job, and gives what it says."""

    def running(sides, fault, delay):
        arguments = ["rocm", fake_verbs, fresh(), delay, sides, fault, 7]
        modules = [shim, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        env = os.environ | {"ROCM_PATH": str(rocm_path), "PYTHONPATH": os.pathsep.join(map(str, modules))}
        done = subprocess.run(
            [sys.executable, JOB, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return running


@pytest.mark.parametrize("fault", ["none", "cut", "flush"])
@pytest.mark.parametrize("sides", ["both", "producer", "consumer"])
@pytest.mark.parametrize("delay", [0, 3])
def test_messages(run, sides, fault, delay):
    """Messages are right where both sides' rings, or one side's, lie in GPU memory, also if a queue pair or its READs fail."""
    assert run(sides, fault, delay) == "all right"


@pytest.mark.parametrize("sides", ["producer", "consumer"])
def test_memory_at_the_other_end_that_cannot_be_registered(run, sides):
    """Nothing can carry such a ring, and the ranks are told at once."""
    assert "memory at the other that RDMA devices cannot register" in run(sides, "memlock", 0)


def test_a_device_that_does_not_answer_reads(run):
    """The ranks are told after the time for which a host may be silent, although queue pairs come up again and again."""
    assert "no RDMA reaches it any more, and rings in GPU memory need it" in run("both", "silent", 0)
