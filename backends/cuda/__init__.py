"""NVIDIA GPUs: CUDA through CuPy's low-level modules, NCCL through nccl4py's."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from xvcomm.backends.ccl.backend import GpuBackend
from xvcomm.backends.gpu.vendor import Library

if TYPE_CHECKING:
    from xvcomm.backends.cuda.runtime import CudaRuntime

__all__ = ["CudaBackend"]

_NO_DEVICE = 100


class CudaBackend(GpuBackend):
    """Ranks with arrays in the memory of an NVIDIA GPU."""

    kind, native = "cuda", "nccl"
    dlpack_device, dlpack_host = 2, (3,)
    torch_device = xla_platform = "cuda"
    packages = ("cupy-cuda13x", "cupy-cuda12x", "nccl4py", "nvidia-nccl-cu13", "nvidia-nccl-cu12")

    @classmethod
    def serves(cls, library: ModuleType) -> bool:
        if library.__name__ == "torch":
            return library.version.cuda is not None
        return library.__name__ == "cupy" and not library.cuda.runtime.is_hip

    def refusal(self) -> tuple[str, str] | None:
        """See `Backend.refusal`; asks the driver."""
        if find_spec("cupy") is None:
            return "CuPy is not installed", "pip install 'xvcomm[cuda]', or 'xvcomm[cuda12]' for a driver of CUDA 12"
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            return str(error), "install NVIDIA's driver; start a container with --gpus all"
        count = ctypes.c_int()
        code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
        if code == _NO_DEVICE or (not code and not count.value):
            return "no NVIDIA GPU is visible", "check nvidia-smi and CUDA_VISIBLE_DEVICES"
        if code:
            return f"the driver returns error {code}", "check nvidia-smi; a reboot may be needed after an update"
        return None

    def driver(self) -> str:
        try:
            words = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split()
        except (OSError, IndexError):
            return ""
        return next((word for word in words if word[:1].isdigit() and "." in word), "")

    def runtime(self) -> CudaRuntime:
        from xvcomm.backends.cuda.runtime import CudaRuntime

        return CudaRuntime()

    def library(self, architecture: str) -> Library:
        from xvcomm.backends.cuda.library import NcclLibrary

        return NcclLibrary(architecture)
