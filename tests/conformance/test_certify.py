"""`xvcomm certify` with real ranks: what is right passes, what cannot run is skipped, seeded wrong results are found."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess

import pytest

from xvcomm.cli.certify.contract import FAILED, PASSED, PROVEN, SKIPPED, WRONG
from xvcomm.cli.certify.options import NAMES, Options
from xvcomm.cli.certify.runner import SECTIONS, certify_job
from xvcomm.testing import World

ENV = {k: v for k, v in os.environ.items() if not k.startswith("XVCOMM_")} | {"XVCOMM_DEVICE": "host"}
pytestmark = pytest.mark.usefixtures("python")
needs_rocm = pytest.mark.skipif(
    importlib.util.find_spec("rocm") is None, reason="hip-python is not installed: pip install hip-python"
)


def certify(*args, launcher=()):
    """Exit code, standard output, and standard error of the command."""
    command = [os.environ["TEST_PYTHON"], "-m", "xvcomm", *launcher, "certify", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=280)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def results(world, *sections, quick=True):
    """The code of all ranks, and rank 0's results by section."""
    outcomes = world.run(certify_job, Options(sections=sections, quick=quick), timeout=280)
    (code,) = {code for code, _ in outcomes}
    return code, {result.name: result for result in outcomes[0][1].results}


def test_sections_are_listed():
    assert tuple(section.name for section in SECTIONS) == NAMES


def test_what_is_right_passes(tmp_path):
    """Two islands of host memory: a report in three forms, and code 0 where all that was asked for was proven."""
    chosen = "versions,operations,messages,faults"
    code, printed, told = certify(
        "--islands", "a,b", "--quick", "--seconds", "240", "--sections", chosen, "--out", tmp_path
    )
    assert code == PROVEN, told + printed
    report = json.loads((tmp_path / "certify.json").read_text())
    assert report["code"] == 0 and "All proven: 4 passed" in printed
    assert [(r["name"], r["state"]) for r in report["results"]] == [(name, PASSED) for name in chosen.split(",")]
    assert all(r["done"] == r["planned"] > 0 for r in report["results"])
    assert "a: 1, b: 1 (rehearsal)" in report["setting"]["islands"]
    operations = report["results"][1]["tables"][0]
    assert {"all_reduce", "all_to_all"} < set(operations["columns"]) and len(operations["rows"]) > 12
    assert "WRONG" not in json.dumps(operations)
    lost = dict(report["results"][3]["tables"][0]["rows"])
    assert float(lost["a rank is lost"]) < 10 and "going on without the lost rank" in lost
    text, page = ((tmp_path / f"certify.{kind}").read_text() for kind in ("txt", "html"))
    assert "All proven" in text and "All proven" in page and "bfloat16" in text
    assert "http" not in page and "<script" not in page


def test_what_cannot_run_is_skipped(tmp_path):
    """Never passed: the code says that not all was proven."""
    chosen = "streams,graphs,rails,failover,rdma,direct"
    code, printed, _ = certify("--sections", chosen, "--out", tmp_path, launcher=("run", "-n", "2", "--", "xvcomm"))
    report = json.loads((tmp_path / "certify.json").read_text())
    assert code == report["code"] == 2 and "6 skipped" in printed
    assert all(r["state"] == SKIPPED and len(r["reason"]) > 10 for r in report["results"])


def test_rdma_alone_on_one_host():
    """Nothing is wrong, and nothing was certified."""
    code, printed, _ = certify("--rdma", launcher=("run", "-n", "2", "--", "xvcomm"))
    assert code == 2 and "on one host" in printed and "several hosts" in printed


def test_rdma_alone_without_devices(tmp_path):
    """The report names the hosts by their labels, and tells what failed and what to do; the code is that of all ranks."""
    python = os.environ["TEST_PYTHON"]
    label = f"XVCOMM_HOST=h$XVCOMM_RANK {python} -m xvcomm certify --rdma --seconds 0.1 --out {tmp_path}; echo code $?"
    command = [python, "-m", "xvcomm", "run", "-n", "2", "--no-prefix", "--", "sh", "-c", label]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV | {"XVCOMM_RDMA": "0"}, timeout=300)
    assert done.stdout.count("code 1\n") == 2, done
    for text in (done.stdout, (tmp_path / "certify-rdma.txt").read_text()):
        for here, there in (("h0 (rank 0)", "h1 (rank 1)"), ("h1 (rank 1)", "h0 (rank 0)")):
            assert f"WRONG: {here} to {there}: no rail of RDMA has come up; {here} uses no RDMA device" in text, text
        assert "What to do: follow docs/rdma.md" in text and "FAILED.\n" in text
    report = json.loads((tmp_path / "certify-rdma.json").read_text())
    assert report["hosts"] == ["h0", "h1"]
    assert [(way["compared"], way["wrong"]) for way in report["directions"]] == [(300, 0)] * 2


def test_one_rank_alone():
    code, printed, told = certify("--sections", "operations,messages", "--quick")
    assert code == 2 and "1 passed, 1 skipped" in printed
    assert "start two or more" in told


def test_training_and_speed(tmp_path):
    pytest.importorskip("torch")
    code, printed, told = certify(
        "-n", "2", "--quick", "--seconds", "240", "--sections", "training,speed", "--out", tmp_path
    )
    assert code == PROVEN, told + printed
    training, speed = json.loads((tmp_path / "certify.json").read_text())["results"]
    assert len(training["tables"][0]["rows"]) == 10
    assert {"gloo", "memcpy", "xvcomm"} == set(speed["plots"][0]["lines"])
    assert "<svg" in (tmp_path / "certify.html").read_text()


def test_time_that_is_over_is_told():
    with World(2, env={"XVCOMM_DEVICE": "host"}) as world:
        outcomes = world.run(certify_job, Options(sections=("operations",), seconds=1.0), timeout=100)
    code, report = outcomes[0]
    (result,) = report.results
    assert code == 2 and result.state == "unfinished" and 0 < result.done < result.planned
    assert "--seconds" in result.reason


def test_an_unknown_section():
    code, _, told = certify("--sections", "everything")
    assert code == 2 and "unknown section 'everything'" in told


@needs_rocm
def test_a_reducer_that_drops_an_element_is_named(rocm_path):
    env = {"ROCM_PATH": str(rocm_path), "HIPHOST_DROP": "1"}
    with World(devices="rocm:2", env=env, timeout=100) as world:
        code, found = results(world, "versions", "operations")
    assert code == WRONG and found["versions"].state == PASSED and found["operations"].state == FAILED
    told = found["operations"].findings
    sums = {finding.what.partition("(sum) of")[0] for finding in told if "(sum) of" in finding.what.partition(":")[0]}
    assert sums == {"all_reduce", "reduce", "reduce_scatter"}
    assert "1 of" in told[0].what and "elements differ" in told[0].what and "bench --op" in told[0].remedy
    assert not any(finding.what.startswith(("broadcast", "all_gather", "all_to_all")) for finding in told)
    assert any("WRONG" in cell for row in found["operations"].tables[0].rows for cell in row)


@needs_rocm
def test_a_native_library_of_another_version_is_named(rocm_path):
    env = [{"ROCM_PATH": str(rocm_path)}, {"ROCM_PATH": str(rocm_path), "HIPHOST_RCCL_VERSION": "22605"}]
    with World(devices="rocm:2", env=env, timeout=100) as world:
        code, found = results(world, "versions", "operations")
    assert code == WRONG and found["versions"].state == FAILED
    (finding,) = found["versions"].findings
    assert "2.28.9 on rank 0" in finding.what and "2.26.5 on rank 1" in finding.what
    assert "XVCOMM_ISLAND" in finding.remedy
    assert found["operations"].state == FAILED  # the library cannot join them
