"""The benchmarks between hosts do what they say, in short runs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIBRARIES = {"xvcomm", "gloo", "mpi", "C", "C, polling"}


def test_quick(two_hosts, tmp_path, python):
    """All figures are measured and written; no result is wrong, and what a cut link delays is noticed."""
    pytest.importorskip("mpi4py")
    pytest.importorskip("torch")
    if not shutil.which("gcc") or not Path(sys.executable).with_name("mpirun").exists():
        pytest.skip("needs gcc, and mpirun beside this Python")
    command = (python, BENCHMARKS / "hosts.py", "--quick", "--out", tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "hosts.json").read_text())
    found = {place: [] for place in ("loopback", "veth", "2 x 1 Gbit/s")}
    for record in report["records"]:
        found[record["place"]].append(record)
        assert not record["wrong"]
    for place in ("loopback", "veth"):
        assert {record["library"] for record in found[place]} == LIBRARIES
    assert all(record["algbw"] < 0.27 for record in found["2 x 1 Gbit/s"])
    assert report["failover"]["stall"] > 0.2 and report["failover"]["before"] < 0.26
    text = (tmp_path / "hosts.md").read_text()
    assert text.count("| 64 KiB |") == 6 and "over 2 x 1 Gbit/s, xvcomm" in text
    assert (tmp_path / "hosts.png").read_bytes().startswith(b"\x89PNG")


def test_quick_losses(two_hosts, tmp_path, python):
    """Losses are noticed after they occur, a host's when it was silent for most of its timeout."""
    command = (python, BENCHMARKS / "faults.py", "--quick", "--out", tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "faults.json").read_text())
    second, cut, stopped = report["seconds"].values()
    for figures in (second, cut):
        (notice,), (shrink,), (everything,) = figures["notice"], figures["shrink"], figures["all"]
        assert shrink > 0 and everything > notice
    assert second["notice"][0] > 0 and second["all"][0] > 0.3
    assert cut["notice"][0] > -1 and stopped["verdict"][0] > 0
    text = (tmp_path / "faults.md").read_text()
    assert len(report["bars"]) == 3 and all(bar["what"] in text for bar in report["bars"])
