"""Jobs on a real Ray of two nodes: Ray Train, ray.util.collective, and actors that shrink, by the files of deploy/ray."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from install import python_of

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(600)]
ROOT, JOBS = Path(__file__).parents[2], Path(__file__).with_name("ray_jobs.py")


@pytest.fixture
def job(tmp_path):
    """Run a job of `ray_jobs.py`; what it prints in JSON, line by line."""
    if not python_of("ray").exists():
        pytest.skip("no Ray: tests/clusters/install.py puts it into an environment of its own")

    def run(name):
        env = {name: value for name, value in os.environ.items() if not name.startswith("XVCOMM_") or "CACHE" in name}
        env |= {
            "PYTHONPATH": ":".join(map(str, (ROOT, ROOT / "deploy" / "ray", ROOT / "examples"))), "OMP_NUM_THREADS": "1",
            "XVCOMM_DEVICE": "host", "XVCOMM_TIMEOUT": "60", "RAY_USAGE_STATS_ENABLED": "0",
        }  # fmt: skip
        with open(tmp_path / "errors", "w") as errors:
            line = [python_of("ray"), JOBS, name, tmp_path]
            done = subprocess.run(line, env=env, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=400)
        assert done.returncode == 0, done.stdout + (tmp_path / "errors").read_text()[-5000:]
        return [
            json.loads(text) for text in done.stdout.splitlines() if text[:1] in "[{" and not text.startswith("[33m")
        ]

    return run


def test_ray_train(job, tmp_path):
    """TorchTrainer with the backend xvcomm over two nodes and two islands: the losses of one process."""
    job("train")
    found = json.loads((tmp_path / "losses.json").read_text())
    assert found["backend"] == "xvcomm" and found["size"] == 4
    assert found["together"] == pytest.approx(found["alone"], rel=1e-6)


def test_killed_worker(job):
    """Ray starts the group again, which goes on from the last checkpoint: the losses of one process all the same."""
    (found,) = job("killed")
    assert found["killed"] == [2]
    assert found["losses"] == pytest.approx(found["alone"], rel=1e-4)


def test_actors_shrink(job, tmp_path):
    """One of four actors is killed: the others go on without it. Those of one node have a Python of their own."""
    (found,) = job("actors")
    assert [rank["ranks"] for rank in found] == [[0, 2, 3]] * 3
    assert all(rank["step"] == 20_000 and rank["lost"] == [1] for rank in found)
    assert all(rank["weights"] == pytest.approx([5 / 3] * 4) for rank in found)
    assert (tmp_path / "used").exists()


def test_collective(job):
    """Each operation of ray.util.collective, and a group of the same name again."""
    first, second = (
        [0, 2, 3, 1, 1, 3, [0, 1], 3, [0, 0, 0]],
        [1, 2, 3, 1, 1, 2, [0, 1], 21, [0, 1, 2]],
    )
    assert job("collective") == [[first, second]] * 2
