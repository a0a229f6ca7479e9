"""A script of Hugging Face's Trainer and accelerate, unchanged: it asks for Gloo and runs on xvcomm."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torchjobs import launch

SCRIPT = str(Path(__file__).parents[2] / "examples" / "transformers_finetune.py")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT)
STEPS = 8
missing = [name for name in ("transformers", "accelerate") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(missing), reason=f"not installed: {', '.join(missing)}; pip install 'xvcomm[examples]'"
)


def trained(folder: Path, *command: str, **env: str) -> dict[str, Any]:
    """What the script wrote."""
    options = ("--steps", str(STEPS), "--out", str(folder))
    launch(sys.executable, *command, *options, env={"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", **env})
    record: dict[str, Any] = json.loads((folder / "losses.json").read_text())
    assert record["processes"] == 2 and len(record["losses"]) == STEPS
    assert record["losses"][-1] < record["losses"][0] - 0.2
    return record


@pytest.fixture(scope="module")
def on_gloo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same script without xvcomm."""
    record = trained(tmp_path_factory.mktemp("gloo"), *TORCHRUN)
    assert "xvcomm" not in record["group"]
    return record


def test_torchrun(tmp_path: Path, on_gloo: dict[str, Any]) -> None:
    record = trained(tmp_path, *TORCHRUN, XVCOMM_REPLACE="gloo")
    assert "xvcomm" in record["group"]
    assert record["losses"] == pytest.approx(on_gloo["losses"], rel=1e-6)
    assert record["held_out"] == pytest.approx(on_gloo["held_out"], rel=1e-6)


def test_xvcomm_run_over_two_islands(tmp_path: Path, on_gloo: dict[str, Any]) -> None:
    run = ("-m", "xvcomm", "run", "--islands", "cuda:1,rocm:1", "--replace", "gloo", "--")
    command = (*run, SCRIPT, "--accumulate", "2")
    record = trained(tmp_path, *command)
    assert "xvcomm" in record["group"]
    assert record["losses"] == pytest.approx(on_gloo["losses"], rel=1e-5)  # the same sequences in smaller pieces
