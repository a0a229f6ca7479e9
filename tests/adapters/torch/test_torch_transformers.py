"""An unchanged script of Hugging Face's Trainer and accelerate that requests Gloo runs on xvcomm."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torchjobs import Job, launch

SCRIPT = str(Path(__file__).parents[3] / "examples" / "transformers_finetune.py")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT)
STEPS = 8
missing = [name for name in ("transformers", "accelerate") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(missing), reason=f"not installed: {', '.join(missing)}; pip install 'xvcomm[examples]'"
)


def trained(folder: Path, *command: str, **env: str) -> dict[str, Any]:
    """The script's output file."""
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


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Two ranks on host memory, without a group."""
    with Job("a:1,b:1", backend=None, env={"HF_HUB_OFFLINE": "1"}) as job:
        yield job


def refusal(backend: str, folder: str) -> str:
    """The error by which Trainer and accelerate reject a backend on host memory; both must be the same."""
    from accelerate import PartialState
    from transformers import TrainingArguments

    with pytest.raises(ValueError, match="backend") as trainer:
        TrainingArguments(output_dir=folder, use_cpu=True, ddp_backend=backend).world_size  # noqa: B018 (it makes the group)
    PartialState._reset_state()
    with pytest.raises(ValueError, match="backend") as accelerate:
        PartialState(cpu=True, backend=backend)
    PartialState._reset_state()
    assert str(trainer.value) == str(accelerate.value)
    return str(trainer.value)


def trained_on_own_group(folder: str) -> tuple[str, list[float], list[float]]:
    """Backend, losses and parameters of Trainer on a group that the program created."""
    import torch
    import torch.distributed as dist
    from transformers import Trainer, TrainingArguments
    from transformers.training_args import ParallelMode

    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.weight * x - 3 * x).square().mean()}

    dist.init_process_group("xvcomm")
    options = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=3, per_device_train_batch_size=1, learning_rate=0.1, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    assert options.parallel_mode == ParallelMode.DISTRIBUTED and options.world_size == 2
    model = Line()
    trainer = Trainer(model=model, args=options, train_dataset=[{"x": torch.tensor([float(i)])} for i in range(1, 9)])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return dist.get_backend(), losses, model.weight.tolist()


@pytest.mark.parametrize("backend", ["xvcomm", "nccl"])
def test_refused_on_host_memory(job: Job, tmp_path: Path, backend: str) -> None:
    """docs/from-nccl.md describes this; if the test fails, update the page."""
    expected = f"Your assigned backend {backend} is not available, please use gloo"
    assert job.run(refusal, backend, str(tmp_path)) == [expected] * 2


def test_group_made_first(job: Job, tmp_path: Path) -> None:
    mine, theirs = job.run(trained_on_own_group, str(tmp_path))
    assert mine == theirs
    backend, losses, weight = mine
    assert backend == "xvcomm" and len(losses) == 3 and losses[-1] < losses[0] and weight[0] > 0
