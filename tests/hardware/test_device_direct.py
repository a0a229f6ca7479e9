"""Device-Direct on real GPUs: the driver exports memory, and messages go through rings in it, without a network card.

The fake provider of verbs writes and reads the GPU's memory by copies, in place of a card, and keeps back what it writes until a
READ from it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xvcomm.backends.rdma.direct import examine
from xvcomm.config import Config
from xvcomm.engine.session import plugins

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).resolve().parents[1]
SHIM = TESTS / "shims" / "verbs"


def test_memory_is_exported(vendor: str) -> None:
    """The driver gives a dma-buf; a machine without RDMA devices in use says that none has registered it."""
    device = plugins.backend(vendor).device(Config())
    address = device.nic_memory(1 << 20)  # type: ignore[attr-defined]
    descriptor = device.dma_buf(address, 1 << 20)  # type: ignore[attr-defined]
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith(("/dmabuf:", "anon_inode:"))
    os.close(descriptor)
    device.return_nic_memory(address, 1 << 20)  # type: ignore[attr-defined]
    (trial,) = examine(Config(), {}, [], device)
    assert (trial.grade, trial.reason) == ("exported", "no RDMA device has registered it")


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake provider, compiled."""
    sys.path.append(str(SHIM))
    from fabric import NoCompiler, build

    try:
        return build(tmp_path_factory.mktemp("verbs"))
    except NoCompiler as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("sides", ["both", "producer", "consumer"])
def test_messages(vendor: str, provider: Path, tmp_path: Path, sides: str) -> None:
    """Messages between two hosts that share a GPU are right with rings in its memory, also if a queue pair or its READs fail."""
    if vendor != "cuda":
        pytest.skip("the fake provider copies by CUDA")
    modules = [SHIM, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, modules))}
    cases = "none", 2, "cut", 2, "flush", 2
    arguments = [TESTS / "rdma" / "direct_job.py", vendor, provider, tmp_path, sides, *cases]
    run = subprocess.run([sys.executable, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, f"after {run.stdout}\n{run.stderr}"
    assert run.stdout.splitlines() == ["all right"] * 3
