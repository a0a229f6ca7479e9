"""Unchanged NCCL programs run on xvcomm: with `xvcomm run --replace nccl`, and under torchrun with XVCOMM_REPLACE."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torchjobs import launch

PROGRAM = str(Path(__file__).parent / "nccl_program.py")
XVCOMM = ("-m", "xvcomm", "run", "--replace", "nccl", "--islands", "cuda:1,rocm:1", "--")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
WAYS = {
    "torchrun": (TORCHRUN, {"XVCOMM_REPLACE": "nccl"}, "nccl"),
    "xvcomm run over two islands": (XVCOMM, {}, "cpu:gloo,cuda:nccl"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_program_that_requests_nccl(way: str) -> None:
    """Its exit code tells whether all results were as with NCCL."""
    command, env, backend = WAYS[way]
    out = launch(sys.executable, *command, PROGRAM, backend, env=env)
    assert f"get_backend: {backend} served by: xvcomm." in out
    if ":" not in backend:  # with one a device, NCCL's own options make torch warn
        assert "Warning" not in out, out


def test_a_name_that_cannot_be_replaced() -> None:
    """Importing torch works; creating a group raises an error that explains it."""
    program = (
        "import torch, torch.distributed as dist\n"
        "print('imported')\n"
        "try:\n"
        "    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "except RuntimeError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    out = launch(sys.executable, "-c", program, env={"XVCOMM_REPLACE": "ncll"}).splitlines()
    assert out[-2] == "imported", out
    assert out[-1].startswith("ConfigError XVCOMM_REPLACE='ncll'") and "nccl and gloo" in out[-1], out
