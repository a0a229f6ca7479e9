"""`xvcomm certify --rdma`, and the sections of connections, as two hosts with Soft-RoCE run them; `xvcomm topo` between these."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import job
import pytest

pytestmark = pytest.mark.rdma
RXE = [("rxe0 port 1", "rxe0 port 1"), ("rxe1 port 1", "rxe1 port 1")]
"""Devices that reach each other."""


def run(port, *command, **more):
    """Exit status and output of this host's rank."""
    settings = job.settings(port, **{"XVCOMM_RDMA_TIMEOUT": "18", **more})  # seconds: a busy machine loses no rail
    env = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "170"}
    done = subprocess.run([sys.executable, *map(str, command)], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode in (0, 1, 2), done.stderr
    assert "Error" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def certify(port, folder, **more):
    """The same of the command, and on host 0 its report."""
    status, printed = run(port, "-m", "xvcomm", "certify", "--rdma", "--seconds", "0.3", "--out", folder, **more)
    file = folder / "certify-rdma.json"
    return status, printed, json.loads(file.read_text()) if file.exists() else None


def check_right(report, slots):
    """Everything was right, over all rails and each pair of devices alone."""
    assert report["hosts"] == ["host0", "host1"] and report["code"] in (0, 2) and len(report["directions"]) == 2
    for direction in report["directions"]:
        assert len(direction["rails"]) == 4 and direction["by_rdma"] > 0.9
        assert direction["wrong"] == 0 and direction["lost"] == {} and direction["compared"] > 100
        assert [direction[side]["slots"] for side in ("source", "target")] == [slots, slots]
        assert [(pair["source"], pair["target"]) for pair in direction["pairs"]] == RXE
        for pair in direction["pairs"]:
            assert pair["rails"] == 2 and pair["compared"] > 10 and pair["wrong"] == 0 and not pair["trouble"]
            assert pair["carried"] > 0.9 and min(pair["speed"], pair["plain"], direction["speed"]) > 1e6


def test_both_directions_pass(other_host, tmp_path):
    status, printed, report = certify(7400, tmp_path)
    assert status == 0
    if other_host.index == 0:
        check_right(report, "host")
        assert not report["grades"] and not report["findings"]
        for text in (printed, (tmp_path / "certify-rdma.txt").read_text()):
            assert "host0: rxe1 port 1" in text and "plain WRITEs" in text and text.rstrip().endswith("Passed.")
    other_host.swap()


def test_without_rdma(other_host, tmp_path):
    """All messages are right, but go by TCP: the cluster does not pass."""
    status, printed, report = certify(7401, tmp_path, XVCOMM_RDMA="0")
    assert status == 1
    if other_host.index == 0:
        assert "FAILED" in printed and "uses no RDMA device" in printed and "xvcomm doctor" in printed
        assert not report["directions"][0]["rails"]
    other_host.swap()


@pytest.mark.parametrize("is_open", [True, False], ids=["direct", "refused"])
def test_gpu_memory(other_host, rocm_path, tmp_path, is_open):
    """Arrays of the stand-in's GPUs: with rings in their memory, or in host memory, where the grades say why."""
    pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install hip-python")
    more = {"ROCM_PATH": str(rocm_path), "HIPHOST_STRICT": str(int(not is_open)), "XVCOMM_DEVICE": "rocm"}
    status, printed, report = certify(7403 + is_open, tmp_path, **more)
    assert status == (0 if is_open else 2)
    if other_host.index == 0:
        check_right(report, "nic" if is_open else "host")
        grades = {(grade["side"], grade["device"], grade["direction"], grade["grade"]) for grade in report["grades"]}
        assert grades == {
            (f"host{rank} (rank {rank})", f"rxe{nic}", direction, "direct" if is_open else "exported")
            for rank in range(2)
            for nic in range(2)
            for direction in ("writes", "reads")
        }
        assert len(report["findings"]) == (0 if is_open else 4)
        assert all("came as far as exported: neither as a dma-buf" in found["what"] for found in report["findings"])
        assert printed.rstrip().endswith("Passed." if is_open else "no Device-Direct everywhere.")
    other_host.swap()


def sections(port, folder, *names):
    """The code of a certificate during which a rail is lost, and on host 0 its results."""
    status, _ = run(port, Path(__file__).with_name("lose_rank.py"), folder, *names)
    file = folder / "certify.json"
    return status, json.loads(file.read_text())["results"] if file.exists() else None


def test_a_lost_rail_fails(other_host, tmp_path):
    """It was replaced, all bytes were right, and went by RDMA: the report names it all the same."""
    status, results = sections(7405, tmp_path, "rdma")
    assert status == 1
    if other_host.index == 0:
        (what,) = (finding["what"] for finding in results[0]["findings"] if finding["wrong"])
        assert "host0 (rank 0) to host1 (rank 1): a connection was lost: 10.77." in what
        lost, by_rdma = ([row[column] for row in results[0]["tables"][0]["rows"]] for column in (3, 7))
        assert lost == ["1", "0"] and all(90 <= int(share.rstrip("%")) <= 100 for share in by_rdma)
    other_host.swap()


def test_sections_of_connections(other_host, tmp_path):
    """The sections `rails`, `failover` and `rdma` of the whole certificate, over the same devices."""
    chosen = ["--sections", "rails,failover,rdma", "--seconds", "60", "--out", tmp_path]
    status, printed = run(7402, "-m", "xvcomm", "certify", *chosen)
    assert status == 0, printed
    if other_host.index == 0:
        report = json.loads((tmp_path / "certify.json").read_text())
        assert [(each["name"], each["state"]) for each in report["results"]] == [
            ("rails", "passed"),
            ("failover", "passed"),
            ("rdma", "passed"),
        ]
        assert all("rdma" in row[-1] for row in report["results"][0]["tables"][0]["rows"])
    other_host.swap()


def test_topo(other_host):
    """Each interface with its device, and each connection with its speed alone."""
    status, printed = run(7406, "-m", "xvcomm", "topo", "--seconds", "0.2")
    assert status == 0
    if other_host.index == 0:
        lines = [line.split() for line in printed.splitlines()]
        assert [line[-1] for line in lines if line[:1] in (["eth0"], ["eth1"])] == ["rxe0", "rxe1"] * 2
        schemes = [line[3] for line in lines if "alone" in line]
        assert sorted(schemes) == ["rdma"] * 4 + ["tcp"] * 4
    other_host.swap()
