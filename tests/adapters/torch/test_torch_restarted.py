"""A process that was started again (`XVCOMM_REJOIN=1`) cannot join a group of torch, and says so at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

import xvcomm
from xvcomm.errors import ConfigError

pytestmark = pytest.mark.not_gloo("this backend, by name")


@pytest.mark.parametrize("replaced", ["", "gloo"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_restarted_rank_makes_no_group(rank: str, replaced: str) -> None:
    """It does not wait in torch's rendezvous, as the server or a client of which no other rank would come."""
    env = {
        **os.environ, "XVCOMM_REJOIN": "1", "XVCOMM_REPLACE": replaced, "XVCOMM_DEVICE": "host", "RANK": rank,
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9",
    }  # fmt: skip
    backend = f"cpu:{replaced}" if replaced else "xvcomm"
    program = f"import time, torch.distributed as d; print(time.time(), flush=True); d.init_process_group({backend!r})"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert time.time() - float(done.stdout) < 15
    assert "ConfigError: a rank that was started again" in done.stderr and "torchrun --max-restarts" in done.stderr


def test_torchs_store() -> None:
    env = {"XVCOMM_REJOIN": "1", "XVCOMM_RANK": "0", "XVCOMM_SIZE": "2", "XVCOMM_DEVICE": "host"}
    with pytest.raises(ConfigError, match="cannot join the others through a store that is a HashStore"):
        xvcomm.init(store=dist.HashStore(), env=env, timeout=5)
