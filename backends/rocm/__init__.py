"""AMD GPUs: HIP and RCCL through hip-python."""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from xvcomm.backends.ccl.backend import GpuBackend
from xvcomm.backends.gpu.vendor import Library

if TYPE_CHECKING:
    from xvcomm.backends.rocm.runtime import HipRuntime

__all__ = ["RocmBackend"]

_NO_DEVICE = 100


class RocmBackend(GpuBackend):
    """Ranks with arrays in the memory of an AMD GPU."""

    kind, native = "rocm", "rccl"
    dlpack_device, dlpack_host = 10, (11,)
    torch_device, xla_platform = "cuda", "rocm"  # torch's build for ROCm keeps the name
    packages = ("hip-python",)

    @classmethod
    def serves(cls, library: ModuleType) -> bool:
        if library.__name__ == "torch":
            return library.version.hip is not None
        return library.__name__ == "cupy" and bool(library.cuda.runtime.is_hip)

    def refusal(self) -> tuple[str, str] | None:
        """See `Backend.refusal`; asks the runtime that hip-python would load, which ROCM_PATH may select."""
        if not _installed("rocm.bindings.hip"):
            return "hip-python is not installed", "pip install 'xvcomm[rocm]'"
        from rocm.bindings.util.paths import get_library_path

        try:
            library = ctypes.CDLL(os.fsdecode(get_library_path("amdhip64")))
        except OSError as error:
            return str(error), "install ROCm, or set ROCM_PATH to its folder"
        count = ctypes.c_int()
        code = library.hipGetDeviceCount(ctypes.byref(count))
        if code == _NO_DEVICE or (not code and not count.value):
            return "no AMD GPU is visible", "check rocminfo, HIP_VISIBLE_DEVICES, and the permissions of /dev/kfd"
        if code:
            return f"HIP returns error {code}", "check rocminfo; driver and ROCm may be incompatible"
        return None

    def driver(self) -> str:
        try:
            return Path("/sys/module/amdgpu/version").read_text().strip()
        except OSError:  # the kernel's own amdgpu tells no version
            return ""

    def runtime(self) -> HipRuntime:
        from xvcomm.backends.rocm.runtime import HipRuntime

        return HipRuntime()

    def library(self, architecture: str) -> Library:
        from xvcomm.backends.rocm.library import RcclLibrary

        return RcclLibrary()


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
