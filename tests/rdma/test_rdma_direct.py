"""Rings in GPU memory that devices of the fake provider read and write: any side, any fault, and the CPU never touches them.

The stand-in for GPUs closes their memory to host code, and the provider keeps back what it writes there until a READ from it.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install hip-python")
JOB = Path(__file__).with_name("direct_job.py")


SIDES = ["both", "producer", "consumer"]
FAULTS = ["none", "cut", "flush"]


@pytest.fixture
def run(fake_verbs, tmp_path, shim, rocm_path, python):
    """A function that runs the job with some faults, each with a delay, and gives what it says of each."""

    def running(sides, *cases):
        arguments = ["rocm", fake_verbs, tmp_path, sides, *itertools.chain(*cases)]
        modules = [shim, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        env = os.environ | {"ROCM_PATH": str(rocm_path), "PYTHONPATH": os.pathsep.join(map(str, modules))}
        done = subprocess.run([python, JOB, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, f"after {done.stdout}\n{done.stderr}"
        return done.stdout.splitlines()

    return running


@pytest.mark.parametrize("sides", SIDES)
def test_messages(run, sides):
    """Messages are right where both sides' rings, or one side's, lie in GPU memory, also if a queue pair or its READs fail."""
    cases = list(itertools.product(FAULTS, [0, 3]))
    assert run(sides, *cases) == ["all right"] * len(cases)


@pytest.mark.parametrize("sides", SIDES)
def test_some_rails_carry_alone(run, sides):
    """Those of RDMA: what each of them carries can be measured."""
    assert run(sides, ("restrict", 0)) == ["all right"]


@pytest.mark.parametrize("sides", SIDES[1:])
def test_memory_at_the_other_end_that_cannot_be_registered(run, sides):
    """Nothing can carry such a ring, and the ranks are told at once."""
    (told,) = run(sides, ("memlock", 0))
    assert "memory at the other that RDMA devices cannot register" in told


def test_a_device_that_does_not_answer_reads(run):
    """The ranks are told after the time for which a host may be silent, although queue pairs come up again and again."""
    (told,) = run("both", ("silent", 0))
    assert "no RDMA reaches it any more, and rings in GPU memory need it" in told


def test_a_ring_that_the_other_rank_opens_first(run):
    """It lies in the memory of the GPU at one end, although the rank at the other one has no such GPU, and did not wait."""
    assert run("consumer", ("early", 0)) == ["host GPU"]
