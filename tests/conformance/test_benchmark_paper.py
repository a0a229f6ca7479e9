"""`benchmarks/paper.py`: a complete run of tiny models, jobs that fail or hang, and what is made of the records."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

# Ranks that write the records of an example job without training, and do what the name of a variant says.
FAKE = """
import json, os, pathlib, sys, time
settings = json.loads(pathlib.Path(sys.argv[2]).read_text())
rank = int(os.environ["RANK"])
out = open(sys.argv[4], "a")
def write(**record):
    print(json.dumps(record), file=out, flush=True)
if rank == 0:
    write(event="job", device="ranks without work", torch="0")
for phase in settings["phases"]:
    for turn in range(phase["turns"]):
        for variant in phase["variants"]:
            name, where = variant["name"], {"phase": phase["name"], "variant": variant["name"], "turn": turn}
            if rank == 0:
                write(event="begin", **where)
                write(event="variant", **where, layers=[1, 3], batch=[8, 1, 2], text="what it is")
            if name == "crashes":
                time.sleep(0.5)
                sys.exit(3)
            if name == "raises" and turn == 1:
                write(event="error", rank=rank, variant=name, error="OutOfMemoryError: too large")
                sys.exit(1)
            if name == "hangs":
                time.sleep(60)
            if rank == 0:
                write(event="step", **where, step=turn + 1, warmup=turn == 0 and name == "slow", loss=2.0 - turn,
                      seconds=0.5, tokens_per_second_per_gpu=100.0, tflops_per_gpu=1.0, peak_memory_gib=3.0)
"""


@pytest.fixture(scope="module")
def driver(root: Path) -> Iterator[ModuleType]:
    """The program as a module."""
    sys.path.insert(0, str(root / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location("benchmark_paper", root / "benchmarks" / "paper.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules["benchmark_paper"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(root / "benchmarks"))


@pytest.fixture
def run(driver: ModuleType, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs phases of variants with these names on ranks without work; returns the run."""
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE)
    monkeypatch.setattr(driver, "RANK", fake)
    monkeypatch.setattr(sys, "executable", python)

    def begin(*phases: Any, patience: float = 30.0, budget: float = 60.0) -> Any:
        now = time.monotonic()
        started = driver.Run(2, "host", patience, now, now + budget)
        started.complete(driver.Settings("tiny-llama", phases))
        return started

    return begin


def phase(driver: ModuleType, name: str, *variants: str, turns: int = 2, fresh: bool = False) -> Any:
    chosen = tuple(driver.Variant(variant, "xvcomm") for variant in variants)
    return driver.Phase(name, chosen, turns=turns, fresh=fresh)


def steps(run: Any) -> list[str]:
    """Phase and variant of each step, in order."""
    return [f"{r['phase']}/{r['variant']}" for r in run.records if r["event"] == "step"]


def test_a_variant_that_raises_is_recorded_and_the_rest_go_on(driver: ModuleType, run: Any) -> None:
    done = run(phase(driver, "speed", "a", "raises", "b"), phase(driver, "loss", "c", "d", turns=1, fresh=True))
    assert [(f["phase"], f["variant"], f["error"]) for f in done.failed] == [
        ("speed", "raises", "OutOfMemoryError: too large")
    ]
    assert steps(done) == [
        "speed/a", "speed/raises", "speed/b", "speed/a", "speed/a", "speed/b", "loss/c", "loss/d",
    ]  # fmt: skip
    assert not done.left_out


def test_what_a_fresh_phase_has_done_is_not_repeated(driver: ModuleType, run: Any) -> None:
    done = run(phase(driver, "speed", "a", turns=1), phase(driver, "loss", "c", "crashes", "d", turns=1, fresh=True))
    assert steps(done) == ["speed/a", "loss/c", "loss/d"]
    (failed,) = done.failed
    assert (failed["phase"], failed["variant"]) == ("loss", "crashes") and "exit code 3" in failed["error"]


def test_a_variant_that_hangs_is_ended(driver: ModuleType, run: Any) -> None:
    begun = time.monotonic()
    done = run(phase(driver, "speed", "a", "hangs", "b", turns=1), patience=4.0)
    assert [(f["variant"], f["error"]) for f in done.failed] == [("hangs", "no sign for 4 s")]
    assert steps(done) == ["speed/a", "speed/a", "speed/b"]
    assert time.monotonic() - begun < 120


def test_the_budget_ends_everything(driver: ModuleType, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "END_SECONDS", 2.0)
    begun = time.monotonic()
    done = run(phase(driver, "speed", "a", "hangs", "b", turns=1), phase(driver, "loss", "c"), budget=8.0)
    assert time.monotonic() - begun < 60
    assert not done.failed and done.left_out == ["speed/hangs", "speed/b", "loss/c"]


def test_entries_of_a_run(driver: ModuleType, run: Any) -> None:
    report, given = driver.report, driver.Settings("tiny-llama", ())
    done = run(phase(driver, "speed", "slow", "raises", "b"))
    slow, raises, b = report.entries(done.records, done.failed, driver.common(given, 2))
    assert (slow["iterations"], slow["tokens_per_second_per_gpu"], slow["losses"]) == (1, 100.0, [2.0, 1.0, 2.0])
    assert (b["peak_memory_gib"], b["layers"], b["error"], b["device"]) == (3.0, [1, 3], "", "ranks without work")
    assert raises["error"] == "OutOfMemoryError: too large" and raises["ranks"] == 2
    page = report.markdown([slow, raises, b])
    assert "| `raises` |" in page and "`raises` failed: OutOfMemoryError: too large" in page
    assert "| |" not in page and "|  |" not in page


def entry(variant: str, speed: float = 100.0, losses: tuple[float, ...] = (), **more: Any) -> dict[str, Any]:
    return {
        "model": "llama-8b", "ranks": 4, "phase": "speed", "variant": variant, "date": "2026-01-01", "device": "GPU",
        "torch": "2", "state": "bfloat16", "rehearsal": True, "deterministic": False, "text": "what", "layers": [16, 16],
        "batch": [8, 1, 2], "tokens_per_second_per_gpu": speed, "tflops_per_gpu": 1.0, "peak_memory_gib": 3.0,
        "losses": list(losses), "iterations": 4, "error": "", **more,
    }  # fmt: skip


@pytest.mark.parametrize(("mixed", "met"), [(98.2, True), (98.1, False)])
def test_throughput_is_judged_by_the_papers(driver: ModuleType, mixed: float, met: bool) -> None:
    found = [entry("nccl"), entry("xvcomm", mixed), entry("gloo", 0.0, error="it failed")]
    (bar,) = driver.bars(found)
    assert (bar.bound, bar.met) == (0.982, met) and bar.value == pytest.approx(mixed / 100)
    assert f"| {mixed / 100:.3f} | 0.982 |" in driver.report.markdown(found)
    assert not driver.bars(found[1:])


@pytest.mark.parametrize(
    ("last", "met"), [(2.01, True), (2.02, False), (float("nan"), False)], ids=["near", "far", "not a number"]
)
def test_losses_are_judged_by_the_largest_difference(driver: ModuleType, last: float, met: bool) -> None:
    losses = {"nccl": (3.0, 2.5, 2.0, 1.9), "xvcomm": (3.0, 2.5, last)}
    (bar,) = driver.bars([entry(name, losses=each, phase="loss") for name, each in losses.items()])
    assert bar.met is met


def test_losses_that_are_no_numbers_are_drawn(driver: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    losses = {"nccl": (3.0, 2.5, 2.0), "xvcomm": (3.0, float("nan"), float("inf"))}
    driver.report.write(tmp_path, [entry(name, losses=each, phase="loss") for name, each in losses.items()])
    assert (tmp_path / "paper.png").exists() and "at most inf" in (tmp_path / "paper.md").read_text()
    assert len(driver.report.load(tmp_path / "paper.json")) == 2


def test_new_entries_replace_those_of_the_same_variant(driver: ModuleType) -> None:
    old, new = [entry("nccl", 1.0), entry("xvcomm", 1.0)], [entry("xvcomm", 2.0), entry("xvcomm", 3.0, ranks=8)]
    assert [
        (e["variant"], e["ranks"], e["tokens_per_second_per_gpu"]) for e in driver.report.merged(old, new)
    ] == [("nccl", 4, 1.0), ("xvcomm", 4, 2.0), ("xvcomm", 8, 3.0)]  # fmt: skip


def test_the_plan_knows_what_is_expensive(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["paper.py"])
    args: argparse.Namespace = driver.arguments()
    todo = driver.jobs(args)
    assert [(s.model, [p.name for p in s.phases], s.deterministic) for s in todo] == [
        ("llama-8b", ["speed", "balance"], False), ("llama-8b", ["loss"], True),
        ("qwen2-7b", ["speed", "balance"], False), ("qwen2-7b", ["loss"], True),
    ]  # fmt: skip
    speed = replace(todo[0].phases[0], seconds=1e9)
    times = [driver.estimate(todo[0], speed, variant, 4) for variant in speed.variants]
    assert dict(zip((v.name for v in speed.variants), times, strict=True))["gloo"] == max(times)
    lines = list(driver.plan(todo, 4, 1.0))
    assert "what does not fit is cut" in lines[-1] and any("loss: nccl" in line for line in lines)


def test_what_was_measured_survives_the_end_by_a_signal(root: Path, tmp_path: Path) -> None:
    (tmp_path / "fake.py").write_text(FAKE)
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); fake = sys.argv.pop(1); import paper;"
        "paper.RANK = fake; sys.exit(paper.main())"
    )
    options = ["--device", "host", "--ranks", "2", "--models", "tiny-llama", "--phases", "speed", "--turns", "100000"]
    command = [sys.executable, "-c", code, str(root / "benchmarks"), str(tmp_path / "fake.py"), *options]
    with subprocess.Popen([*command, "--out", str(tmp_path)], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for line in program.stdout:
            if "step" in line:
                break
        program.terminate()
        program.stdout.read()
    assert program.returncode == 128 + 15
    assert json.loads((tmp_path / "paper.json").read_text())["entries"][0]["iterations"] > 0


def test_run_on_host_memory(root: Path, python: str, tmp_path: Path) -> None:
    """Real ranks, and all files."""
    command = [python, str(root / "benchmarks" / "paper.py"), "--device", "host", "--ranks", "2"]
    sizes = ["--models", "tiny-llama", "--context", "16", "--micro-batches", "2", "--loss-iterations", "8"]
    more = ["--loss-context", "16", "--phases", "balance,loss", "--slow", "amd:300", "--out", str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("XVCOMM_")}
    done = subprocess.run([*command, *sizes, *more], capture_output=True, text=True, env=env, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "paper.json").read_text())["entries"]
    rows = {(e["phase"], e["variant"]): e for e in found}
    assert list(rows) == [
        ("balance", "nccl"), ("balance", "even"), ("balance", "balanced"), ("loss", "nccl"), ("loss", "xvcomm")
    ]  # fmt: skip
    even, balanced = rows["balance", "even"], rows["balance", "balanced"]
    assert even["layers"] == [2, 2] and balanced["layers"][0] > balanced["layers"][1]
    assert all(e["tokens_per_second_per_gpu"] > 0 and e["iterations"] and not e["error"] for e in found)
    assert len(rows["loss", "nccl"]["losses"]) == 8
    assert rows["loss", "nccl"]["losses"] == rows["loss", "xvcomm"]["losses"]
    assert "losses apart: 0 (" in done.stdout and "in all about" in done.stdout
    assert "Losses differ by at most 0.0e+00" in (tmp_path / "paper.md").read_text()
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "paper.png").read_bytes().startswith(b"\x89PNG")
