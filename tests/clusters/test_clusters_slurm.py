"""Jobs on a real SLURM: the files of deploy/slurm, ranks that are killed, signals, and the start of many ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from environments import pythons
from slurm_cluster import tasks

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
DEPLOY, TRAIN = ROOT / "deploy" / "slurm", ROOT / "examples" / "train.py"
RANKS, RESUME, START = ROOT / "tests" / "hosts" / "ranks.py", *map(Path(__file__).with_name, ("resume.py", "start.py"))
SMALL = (
    *("--layers", "2", "--dim", "16", "--heads", "2", "--kv-heads", "2", "--hidden", "24", "--context", "16"),
    *("--sequences", "1", "--micro-batches", "4", "--check"),
)
HERE = {"PYTHON": sys.executable}
TWO_EACH = ("--ntasks-per-node=2", "--time=10")


def read(folder):
    """The lines of a log of examples/train.py, the last one perhaps unfinished."""
    file = folder / "log.jsonl"
    return (
        [json.loads(line) for line in file.read_text().splitlines(True) if line.endswith("\n")] if file.exists() else []
    )


def within(reached, seconds=60.0):
    """Wait until something is reached, and give it."""
    end = time.monotonic() + seconds
    while not (found := reached()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def passed(folder):
    """Whether the trainer has had the losses of one process, over an island on each node."""
    header, *_, last = read(folder)
    assert header["stages"] == [[0, 1], [2, 3]]
    assert header["islands"] == ["cuda@0 x 2", "rocm@1 x 2"]
    return last["check"]["passed"]


def test_one_partition(cluster, tmp_path):
    """Two nodes and two islands, by SLURM's variables alone: the losses of one process."""
    program = (TRAIN, *SMALL, "--islands", "cuda:2,rocm:2", "--steps", 3, "--out", tmp_path)
    number = cluster.submit(*TWO_EACH, "--output", tmp_path / "out", DEPLOY / "train.sbatch", *program, env=HERE)
    cluster.wait(number)
    assert passed(tmp_path)


def test_heterogeneous_job(cluster, tmp_path):
    """Groups 0 and 1 are on nodes b and a, in two environments: one job, and the losses of one process."""
    mixed, env = DEPLOY / "mixed.sbatch", pythons(tmp_path)
    one_each = ("--ntasks-per-node=1", "--output", tmp_path / "told", ":", "--ntasks-per-node=1")
    told = cluster.submit(*one_each, mixed, RANKS, "told", env=env)
    cluster.wait(told)
    lines = sorted(line for line in (tmp_path / "told").read_text().splitlines() if line.startswith("["))
    assert [json.loads(line) for line in lines] == [[0, "b", "cuda@0", "1.0"], [1, "a", "rocm@1", "2.0"]]
    two_each = ("--ntasks-per-node=2", "--output", tmp_path / "out", ":", "--ntasks-per-node=2")
    cluster.wait(cluster.submit(*two_each, mixed, TRAIN, *SMALL, "--steps", 3, "--out", tmp_path, env=env))
    assert passed(tmp_path)


def test_torchrun(cluster, tmp_path):
    """A torchrun on each node, and what they start: the losses of one process."""
    pytest.importorskip("torch")
    program = (TRAIN, *SMALL, "--islands", "cuda:2,rocm:2", "--steps", 3, "--out", tmp_path)
    env = {**HERE, "RANKS_EACH": "2"}
    number = cluster.submit("--time=10", "--output", tmp_path / "out", DEPLOY / "torchrun.sbatch", *program, env=env)
    cluster.wait(number)
    assert passed(tmp_path)


@pytest.mark.parametrize("file", ["train.sbatch", pytest.param("mixed.sbatch", marks=pytest.mark.slow)])
def test_killed_rank(cluster, tmp_path, file):
    """The others raise PeerLost, the job is requeued, and trains to the end."""
    program = (TRAIN, *SMALL, "--islands", "cuda:2,rocm:2", "--steps", 60, "--out", tmp_path)
    more = (":", "--ntasks-per-node=2") if file == "mixed.sbatch" else ()
    env = {"PYTHON": sys.executable, "CUDA_PYTHON": sys.executable, "ROCM_PYTHON": sys.executable}
    number = cluster.submit(*TWO_EACH, "--output", tmp_path / "out", *more, DEPLOY / file, *program, env=env)
    within(lambda: any("step" in line for line in read(tmp_path)))
    os.kill(tasks(number)[3], signal.SIGKILL)
    job = cluster.wait(number)
    assert job["Restarts"] == "1" and passed(tmp_path)
    printed = (tmp_path / "out").read_text()
    assert re.search(r"rank 3 (of the job\) )?on [ab] was lost", printed), printed


def test_signal_before_the_end(cluster, tmp_path):
    """`--signal`: all ranks save after the same step and leave; the job goes on from there."""
    limits = ("--ntasks-per-node=1", "--time=1", "--signal=USR2@20")
    options = (*limits, "--output", tmp_path / "out", DEPLOY / "train.sbatch", RESUME, tmp_path, 30, 1.0)
    job = cluster.wait(cluster.submit(*options, env=HERE))
    assert job["Restarts"] == "1"
    lines = [line for line in (tmp_path / "out").read_text().splitlines() if line.startswith("rank ")]
    first, second = ({line.rpartition(": ")[2] for line in lines[turn : turn + 2]} for turn in (0, 2))
    (before,), (after,) = first, second
    assert before.startswith("steps 0 to") and after == f"steps {before.split()[-1]} to 30"
    losses = json.loads((tmp_path / "checkpoint.json").read_text())["losses"]
    assert len(losses) == 30 and losses[-1] < 0.1 * losses[0]


def test_cancelled(cluster, tmp_path):
    """`scancel` ends all ranks at once, and nothing is left of them."""
    limits = ("--ntasks-per-node=2", "--time=1")
    number = cluster.submit(
        *limits, "--output", tmp_path / "out", DEPLOY / "train.sbatch", RESUME, tmp_path, 1000, 0.1, env=HERE
    )
    within((tmp_path / "checkpoint.json").exists)
    assert sorted(tasks(number)) == [0, 1, 2, 3]
    cluster.call("scancel", number)
    job = cluster.wait(number, "CANCELLED", seconds=30)
    assert job["Restarts"] == "0"
    within(lambda: not tasks(number), seconds=10)
    assert not cluster.left()


@pytest.mark.parametrize("plugin", ["none", "pmi2"])
def test_plug_ins_for_mpi(cluster, plugin):
    """`srun --mpi=pmi2`, which many clusters have as default, changes nothing; there is no PMIx here, nor mpi4py for SLURM."""
    text = cluster.step("--mpi", plugin, "-N2", "-n2", sys.executable, RANKS, "told")
    lines = sorted(line for line in text.splitlines() if line.startswith("["))
    assert [json.loads(line)[:2] for line in lines] == [[0, "a"], [1, "b"]]


@pytest.mark.slow
def test_start_of_64_ranks(cluster):
    """What a rank does from its imports to the end of the first all_reduce takes 10 s at most of a core of its own."""
    text = cluster.step("-N2", "-n64", sys.executable, START, env={"XVCOMM_TIMEOUT": "250"})
    seconds = [float(line) for line in text.splitlines() if line[:1].isdigit()]
    assert len(seconds) == 64
    assert max(seconds) < 10, sorted(seconds)
