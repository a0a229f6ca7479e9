"""`xvcomm bench` with real ranks: all operations are correct, peers are measured too, files are written."""

import json
import os
import subprocess
import sys

import pytest

from xvcomm.cli.bench import measure
from xvcomm.cli.bench.case import OPS
from xvcomm.cli.bench.command import start
from xvcomm.cli.bench.options import Options

ENV = {k: v for k, v in os.environ.items() if not k.startswith("XVCOMM_")}
pytestmark = pytest.mark.usefixtures("python")
FIELDS = {"machine", "cores", "date", "versions", "islands", "rehearsal", "time", "algbw", "busbw", "wrong", "noisy"}


def bench(*args, python=None):
    few = "--iters", "2", "--warmup", "1", "--patience", "0"
    command = [python or os.environ["TEST_PYTHON"], "-m", "xvcomm", "bench", *few, *args]
    return subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=250)


def rows(text):
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def test_every_operation_over_two_islands(tmp_path):
    done = bench("--islands", "cuda:2,rocm:1", "--op", "all", "--sizes", "12,48K", "--dtype", "float32,bfloat16",
                 "--json", str(tmp_path / "out.json"), "--csv", str(tmp_path / "out.csv"),
                 "--plot", str(tmp_path / "out.png"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "3 ranks: cuda,cuda,rocm (rehearsal); rings over shm" in done.stdout
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 1 + len(rows(done.stdout))
    assert {row[0] for row in rows(done.stdout)} == set(OPS)
    assert all(row[7] == "0" for row in rows(done.stdout))
    records = json.loads((tmp_path / "out.json").read_text())
    assert len(records) == len(rows(done.stdout))
    assert all(record.keys() >= FIELDS and record["rehearsal"] and record["time"] > 0 for record in records)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_gloo_and_memcpy_as_peers(tmp_path):
    """Gloo has no uint32, and is left out there."""
    pytest.importorskip("torch")
    file = tmp_path / "out.json"
    how = "--sizes", "4K", "--dtype", "float32,uint32", "--peer", "gloo,memcpy"
    done = bench("-n", "2", "--op", "all", *how, "--json", str(file))
    assert done.returncode == 0, done.stderr
    records = json.loads(file.read_text())
    assert {r["op"] for r in records if r["library"] == "gloo" and r["wrong"] == 0} == set(OPS)
    assert {r["dtype"] for r in records if r["library"] == "gloo"} == {"float32"}
    for dtype in ("float32", "uint32"):
        found = {r["op"] for r in records if r["library"] == "memcpy" and r["dtype"] == dtype}
        assert found == set(OPS) - {"barrier"}
    without = [row for row in rows(done.stdout) if row[3] == "uint32"]
    assert len(without) == len(OPS) - 1 and all(row[8:10] == ["-", "-"] for row in without)


def test_a_peer_for_other_memory():
    done = bench("-n", "2", "--op", "all_reduce", "--sizes", "8", "--peer", "nccl")
    assert done.returncode == 2 and "peer nccl is not for host memory" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr + done.stdout


def test_mpi_as_peer(tmp_path):
    pytest.importorskip("mpi4py")
    file = tmp_path / "out.json"
    what = (
        "--islands",
        "a:1,b:1",
        "--op",
        "all",
        "--sizes",
        "4K",
        "--peer",
        "mpi",
        "--out-of-place",
        "--json",
        str(file),
    )
    done = bench(*what, python=sys.executable)  # mpirun looks after the processes that it has started
    assert done.returncode == 0, done.stderr + done.stdout
    records = json.loads(file.read_text())
    assert {r["op"] for r in records if r["library"] == "mpi" and r["wrong"] == 0} == set(OPS)
    assert records[0]["islands"] == ["a", "b"]


def test_a_peer_with_an_environment_gets_processes_of_its_own(python, tmp_path, monkeypatch, capfd):
    """Results of the peer's own processes appear in the same table and file; their time is limited too."""
    pytest.importorskip("torch")
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setitem(measure.PEERS, "gloo", measure.Peer("any", {"GLOO_SOCKET_IFNAME": "lo"}))
    options = Options(
        ops=("all_reduce",), sizes=(8, 4096), dtypes=("float32",), peers=("gloo", "memcpy"), in_place=True, seconds=0.1,
        iterations=2, warmup=1, patience=0, labels=("a", "b"), json=str(tmp_path / "out.json"), plot=None,
        devices=("host", "host"),
    )  # fmt: skip
    assert start(options) == 0
    found = [(r["size"], r["library"]) for r in json.loads((tmp_path / "out.json").read_text())]
    assert found == [(size, name) for size in (8, 4096) for name in ("xvcomm", "memcpy", "gloo")]
    printed = rows(capfd.readouterr().out)
    assert len(printed) == 2 and all("-" not in row for row in printed)


def test_cases_beyond_the_budget_are_left_out(tmp_path, capfd):
    options = Options(
        ops=("all_reduce",), sizes=(8, 16, 32), dtypes=("float32",), peers=(), in_place=True, seconds=0.1,
        iterations=1, warmup=1, patience=0, labels=("",) * 2, json=str(tmp_path / "out.json"), plot=None, budget=0.0,
    )  # fmt: skip
    assert start(options) == 0
    assert json.loads((tmp_path / "out.json").read_text()) == []
    assert "3 of 3 cases were not measured" in capfd.readouterr().out
