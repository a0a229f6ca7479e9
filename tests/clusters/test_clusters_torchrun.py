"""torchrun and accelerate over two hosts: the commands of docs/clusters.md."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from install import python_of

pytest.importorskip("torch")
pytestmark = pytest.mark.clusters
TRAIN = Path(__file__).parents[2] / "examples" / "torch_ddp.py"
SMALL = (
    *("--layers", "2", "--dim", "16", "--heads", "2", "--kv-heads", "2", "--hidden", "24", "--context", "16"),
    *("--sequences", "1", "--micro-batches", "4", "--steps", "3", "--check"),
)


def run(nodes, python, sides, *command, out):
    """Start torch_ddp.py by a command on hosts at the same time, with their numbers for `{side}`; all must end well."""
    env = {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    words = (*command, TRAIN, *SMALL, "--islands", "cuda:2,rocm:2", "--out", out)
    begun = [nodes.begin(side, *(str(word).format(side=side) for word in words), env=env) for side in sides]
    printed = [process.communicate(timeout=200)[0] for process in begun]
    assert not any(process.returncode for process in begun), "\n---\n".join(printed)


def checked(file):
    """The backend, and whether the losses were those of one process."""
    header, *_, last = map(json.loads, file.read_text().splitlines())
    assert header["ranks"] == 4 and header["backend"] == "xvcomm"
    return last["check"]["passed"]


TORCHRUN = ("python", "-m", "torch.distributed.run")


def test_c10d(nodes, tmp_path):
    """Both torchruns have the same command, and find out which one is the first."""
    place = (
        "--nnodes",
        2,
        "--nproc-per-node",
        2,
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        7,
        "--rdzv-endpoint",
        "a:29400",
    )
    run(nodes, Path(sys.executable), (0, 1), *TORCHRUN, *place, out=tmp_path / "log")
    assert checked(tmp_path / "log")


def test_standalone(nodes, tmp_path):
    """One host, with two islands."""
    run(nodes, Path(sys.executable), (0,), *TORCHRUN, "--standalone", "--nproc-per-node", 4, out=tmp_path / "log")
    assert checked(tmp_path / "log")


def test_accelerate(nodes, tmp_path):
    """accelerate's launcher on each host; it starts torchrun for GPUs, which ranks on host memory do not look for."""
    if not python_of("accelerate").exists():
        pytest.skip("no accelerate: make test-clusters")
    place = ("--multi_gpu", "--num_machines", 2, "--num_processes", 4, "--machine_rank", "{side}")
    meet = ("--main_process_ip", "a", "--main_process_port", 29500, "--mixed_precision", "no", "--dynamo_backend", "no")
    run(nodes, python_of("accelerate"), (0, 1), "accelerate", "launch", *place, *meet, out=tmp_path / "log")
    assert checked(tmp_path / "log")
