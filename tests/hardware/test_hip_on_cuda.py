"""hip-python over CUDA and NCCL, on which the ROCm tests and figures on NVIDIA GPUs are based."""

import importlib.util
import os
import subprocess
import sys

import pytest

from xvcomm.engine.session import plugins

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="session")
def environment(root, tmp_path_factory):
    """Variables of processes in which ROCm's libraries forward to CUDA."""
    cuda = next((found for found in plugins.backends() if found.name == "cuda"), None)
    if cuda is None or not cuda.usable:
        pytest.skip(cuda.reason if cuda else "no backend for CUDA is registered")
    spec = importlib.util.spec_from_file_location(
        "hip_on_cuda_build", root / "tests" / "shims" / "hip_on_cuda" / "build.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {**os.environ, **module.environment(module.build(tmp_path_factory.mktemp("rocm"))), "XVCOMM_DEVICE": "rocm"}


@pytest.mark.parametrize(
    "check", ["devices", "memory_and_streams", "kernels_and_graphs", "collectives", "torch_says_rocm"]
)
def test_hip_python(root, environment, check):
    if check == "torch_says_rocm":
        pytest.importorskip("torch")
    command = [sys.executable, str(root / "tests" / "shims" / "hip_on_cuda" / "checks.py"), check]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
