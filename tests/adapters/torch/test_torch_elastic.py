"""torchrun's elastic agent: ranks are killed in mid-step, and training goes on from the last step in memory."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "torch_elastic.py"
STEPS = 12
RENDEZVOUS = "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"
pytestmark = pytest.mark.not_gloo("this backend, by name")

KILLED = f"""
import os, signal, sys, time
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import torch, torch_elastic, typer

attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
victim, number, when = {{"0": ("1", 5, "step"), "1": ("0", 4, "save"), "2": ("1", 1, "end")}}.get(attempt, ("", 0, ""))
calls = 0

def dying(real, name):
    def call(*args, **kwargs):
        global calls
        if rank == victim and name == when and (name != "save" or isinstance(args[1], os.PathLike)):
            calls += 1
            if calls == number:
                if name == "end":
                    time.sleep(1)  # the others have come as far
                os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return call

torch.optim.Adam.step = dying(torch.optim.Adam.step, "step")
torch_elastic.dist.all_reduce = dying(torch_elastic.dist.all_reduce, "end")
torch_elastic.torch.save = dying(torch.save, "save")
typer.run(torch_elastic.main)
"""


def run(
    python: str, folder: Path, script: Path, restarts: int, *options: str, ranks: int = 2
) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("XVCOMM_")} | {"XVCOMM_DEVICE": "host"}
    launcher = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command = [*launcher, "--max-restarts", str(restarts), *options, "--monitor-interval", "0.05", str(script)]
    arguments = ["--steps", str(STEPS), "--snapshots", str(folder)]
    return subprocess.run([*command, *arguments], env=env, capture_output=True, text=True, timeout=200)


def train(python: str, folder: Path, script: Path, restarts: int, *options: str) -> list[str]:
    """What rank 0 prints; the snapshots must be gone."""
    done = run(python, folder, script, restarts, *(options or ("--standalone",)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(folder.iterdir()) == []
    return done.stdout.splitlines()


def test_killed_ranks_lose_no_step(tmp_path: Path, python: str) -> None:
    """Rank 1 is killed in step 5 before it changes its weights, rank 0 while it writes its snapshot, rank 1 at the end."""
    folder, script = tmp_path / "memory", tmp_path / "killed.py"
    folder.mkdir()
    script.write_text(KILLED)
    *begun, loss = train(python, folder, script, 3)
    assert begun == ["goes on after step 4", "goes on after step 7", f"goes on after step {STEPS - 1}"]
    assert loss.startswith("loss ")
    for rank in range(2):  # an earlier job of this name has failed
        (place := folder / f"torch-elastic-{os.getuid()}-job-{rank}").mkdir()
        (place / "7").write_text("stale")
    assert [loss] == train(python, folder, EXAMPLE, 0, *RENDEZVOUS, "--rdzv-id", "job")


def test_a_job_without_a_name(tmp_path: Path, python: str) -> None:
    """Its snapshots could be those of another one."""
    done = run(python, tmp_path, EXAMPLE, 0, *RENDEZVOUS, ranks=1)
    assert done.returncode != 0 and "the job has no name" in done.stderr
    assert list(tmp_path.iterdir()) == []
