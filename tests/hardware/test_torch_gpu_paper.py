"""`examples/paper.py` on GPUs: losses do not depend on the library that carries."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "adapters" / "torch"))  # for the module

import torch
from torchjobs import launch

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[2] / "examples" / "paper.py"
COMMS = ("nccl", "xvcomm", "rails-1", "rails-4", "staged", "gloo")
ROUNDING = 1e-5


@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_do_not_depend_on_the_libraries(
    vendor: str, places: Callable[[str], tuple[str, ...]], tmp_path: Path, ranks: int
) -> None:
    kinds = places(f"cuda:{ranks}")
    if torch.cuda.device_count() < len(kinds):
        pytest.skip(f"this torch is not built for {vendor}, or sees too few GPUs")
    out = tmp_path / "records.jsonl"
    options = (
        "--model", "tiny-qwen2", "--comm", ",".join(COMMS), "--fresh", "--deterministic", "--iterations", "4", "--context",
        "64", "--micro-batches", "4", "--dtype", "float32", "--state", "float32", "--layers", "1,3", "--out", str(out),
    )  # fmt: skip
    launcher = (sys.executable, "-m", "xvcomm", "run", "-n", str(ranks), "--", str(SCRIPT))
    launch(*launcher, *options, env={"XVCOMM_DEVICE": kinds[0]}, timeout=200)
    records = list(map(json.loads, out.read_text().splitlines()))
    losses: dict[str, list[float]] = {comm: [] for comm in COMMS}
    for record in records:
        if record["event"] == "step":
            losses[record["variant"]].append(record["loss"])
    backends = {record["variant"]: record["backends"] for record in records if record["event"] == "variant"}
    assert backends["staged"] == ["gloo", "nccl"] and backends["gloo"] == ["gloo", "gloo"]
    assert len(losses["nccl"]) == 5
    for comm in COMMS:
        assert losses[comm] == pytest.approx(losses["nccl"], rel=ROUNDING), comm
