"""Jobs of two parts by Open MPI and MPICH, with another Python on each of two hosts: the files of deploy/mpi."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from environments import pythons
from install import python_of

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.clusters
ROOT = Path(__file__).parents[2]
DEPLOY, RANKS, TRAIN = ROOT / "deploy" / "mpi", ROOT / "tests" / "hosts" / "ranks.py", ROOT / "examples" / "train.py"
SMALL = (
    *("--layers", "2", "--dim", "16", "--heads", "2", "--kv-heads", "2", "--hidden", "24", "--context", "16"),
    *("--sequences", "1", "--micro-batches", "4", "--steps", "3", "--check"),
)


def here(ranks):
    """Variables for so many ranks on each host."""
    return {"RANKS_EACH": str(ranks), "CUDA_HOSTS": f"a:{ranks}", "ROCM_HOSTS": f"b:{ranks}"}


@pytest.fixture(params=["openmpi", "mpich"])
def job(request, nodes, tmp_path):
    """Run a program as so many ranks on each host by a file; what they print. The other host is entered in place of ssh."""
    agent = str(nodes.agent(tmp_path / "agent"))
    if request.param == "mpich":
        base = python_of("mpich")
        library = base.parents[1] / "lib" / "libmpi.so.12"
        env = {
            "MPI4PY_LIBMPI": str(library),
            "HYDRA_LAUNCHER": "rsh",
            "HYDRA_LAUNCHER_EXEC": agent,
            "CUDA_HOSTS": "a",
            "ROCM_HOSTS": "b",
        }
    else:
        base = Path(sys.executable)
        env = {"PRTE_MCA_plm_ssh_agent": agent, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        env |= {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if not (base.parent / ("mpiexec" if request.param == "mpich" else "mpirun")).exists():
        pytest.skip(f"no {request.param}: make test-clusters")
    env |= {"PATH": f"{base.parent}:{os.environ['PATH']}", **pythons(tmp_path)}

    def run(ranks, *program):
        place = nodes.begin(0, DEPLOY / f"{request.param}.sh", *program, env={**env, **here(ranks)})
        text = place.communicate(timeout=200)[0]
        assert place.returncode == 0, text
        return text

    return run


def test_two_parts(job, tmp_path):
    """One job of two environments, with the losses of one process."""
    lines = sorted(line for line in job(1, RANKS, "told").splitlines() if line.startswith(("[0, ", "[1, ")))
    assert [json.loads(line) for line in lines] == [[0, "a", "cuda@0", "1.0"], [1, "b", "rocm@1", "2.0"]]
    job(2, TRAIN, *SMALL, "--out", tmp_path)
    header, *_, last = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert header["stages"] == [[0, 1], [2, 3]] and last["check"]["passed"]
