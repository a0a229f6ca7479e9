"""`xvcomm certify --rdma` as two hosts with Soft-RoCE run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import job
import pytest

pytestmark = pytest.mark.rdma


def certify(port, folder, **more):
    """Exit status and output of this host's rank."""
    env = {**os.environ, **job.settings(port, **more), "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "160"}
    command = [sys.executable, "-m", "xvcomm", "certify", "--rdma", "--seconds", "0.3", "--out", str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, done.stdout


def test_both_directions_pass(other_host, tmp_path):
    status, printed = certify(7400, tmp_path)
    assert status == 0
    if other_host.index == 0:
        report = json.loads((tmp_path / "certify-rdma.json").read_text())
        assert report["hosts"] == ["host0", "host1"] and report["passed"]
        for direction in report["directions"]:
            assert len(direction["rails"]) == 4 and direction["by_rdma"] > 0.9
            assert direction["wrong"] == direction["lost"] == 0 and direction["compared"] > 100
            assert min(direction["speed"], direction["plain"]) > 1e6 and not direction["trouble"]
        assert "Passed." in printed and "passed" in (tmp_path / "certify-rdma.txt").read_text()
    other_host.swap()


def test_without_rdma(other_host, tmp_path):
    """All messages are right, but go by TCP: the cluster does not pass."""
    status, printed = certify(7401, tmp_path, XVCOMM_RDMA="0")
    if other_host.index == 0:
        assert status == 1 and "FAILED" in printed
        assert not json.loads((tmp_path / "certify-rdma.json").read_text())["directions"][0]["rails"]
    other_host.swap()


def test_sections_of_connections(other_host, tmp_path):
    """The sections `rails`, `failover` and `rdma` of the whole certificate, over the same devices."""
    env = {**os.environ, **job.settings(7402), "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "160"}
    sections = ["--sections", "rails,failover,rdma", "--seconds", "60", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "xvcomm", "certify", *sections]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    if other_host.index == 0:
        report = json.loads((tmp_path / "certify.json").read_text())
        assert [(each["name"], each["state"]) for each in report["results"]] == [
            ("rails", "passed"),
            ("failover", "passed"),
            ("rdma", "passed"),
        ]
        assert all("rdma" in row[-1] for row in report["results"][0]["tables"][0]["rows"])
    other_host.swap()
