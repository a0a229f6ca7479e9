"""Losses of training over two islands with torch's own parallelism, against those of one process."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torchjobs import BACKEND, Job, launch

EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPT = str(EXAMPLES / "torch_ddp.py")
SMALL = {
    "layers": 4, "dim": 32, "heads": 4, "kv_heads": 2, "hidden": 48, "context": 32, "steps": 15, "micro_batches": 4,
    "sequences": 2, "seed": 0, "lr": 1e-3,
}  # fmt: skip
TOLERANCE = 1e-6  # in float32; it is reached because every order of the same few additions is nearly as good


def losses(mode: str, alone: bool) -> tuple[list[float], list[float]]:
    """Losses of all ranks together and, if requested, of one process."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import torch_ddp
    from llama.config import Model

    args, device = argparse.Namespace(mode=mode, **SMALL), torch.device("cpu")
    model = Model(*(SMALL[name] for name in ("layers", "dim", "heads", "kv_heads", "hidden", "context")))
    found = torch_ddp.train(model, args, device, None)
    replicas = torch_ddp.layout(mode, torch.distributed.get_world_size())[1]
    return found, torch_ddp.train_alone(model, args, device, replicas) if alone else []


def compare(job: Job, mode: str) -> None:
    """Train, and compare on rank 0."""
    for rank in range(job.size):
        job.submit(rank, losses, mode, rank == 0)
    answers: list[Any] = job.collect(*range(job.size))
    found, alone = answers[0]
    assert all(other == found for other, _ in answers[1:]), "ranks disagree"
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, alone, strict=True))
    print(f"{mode} on {job.size} ranks: worst relative difference {worst:.1e}")
    assert found[-1] < found[0] - 0.5
    assert worst <= TOLERANCE


@pytest.mark.parametrize("mode", ["ddp", "fsdp2", "pp"])
def test_two_ranks_across_the_border(pair: Job, mode: str) -> None:
    compare(pair, mode)


@pytest.mark.parametrize("mode", ["ddp", "fsdp2", "pp", "pp-dp"])
def test_four_ranks_in_two_islands(four: Job, mode: str) -> None:
    compare(four, mode)


def read(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Header, steps and check of a log."""
    header, *steps, check = map(json.loads, file.read_text().splitlines())
    return header, steps, check["check"]


@pytest.mark.parametrize("launcher", ["torchrun", "xvcomm run"])
def test_the_script(tmp_path: Path, python: str, launcher: str) -> None:
    islands = "cuda:1,rocm:1"
    start = {
        "torchrun": ("-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT, "--islands", islands),
        "xvcomm run": ("-m", "xvcomm", "run", "--islands", islands, "--", SCRIPT),
    }[launcher]
    out = tmp_path / "log.jsonl"
    options = ("--backend", BACKEND, "--mode", "ddp", "--steps", "3", "--dim", "32", "--check", "--out", str(out))
    text = launch(python, *start, *options)
    header, steps, check = read(out)
    assert header["backend"] == BACKEND and header["ranks"] == 2 and header["rehearsal"] is True
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert check["passed"] and check["worst_relative_difference"] <= TOLERANCE
    assert "worst relative difference" in text
