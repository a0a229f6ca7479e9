"""Makes CUDA's torch stand in for ROCm's: its tensors present themselves to xvcomm as tensors on a ROCm GPU.

Torch calls `install` on import, through its entry point for device extensions, in every process that has
`build.environment`. Only ranks with `XVCOMM_DEVICE=rocm` are affected.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_NAME = b"dlpack_exchange_api"


def install() -> None:
    """Replace torch's DLPack exchange table by one that reports ROCm devices."""
    if os.environ.get("XVCOMM_DEVICE") != "rocm":
        return
    import torch

    library = ctypes.CDLL(str(Path(os.environ["ROCM_PATH"], "lib", "libdlpack_as_rocm.so")))
    library.as_rocm.restype = ctypes.c_void_p
    library.as_rocm.argtypes = [ctypes.c_void_p]
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_New.restype = ctypes.py_object
    api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    theirs = api.PyCapsule_GetPointer(torch.Tensor.__dlpack_c_exchange_api__, _NAME)
    torch.Tensor.__dlpack_c_exchange_api__ = api.PyCapsule_New(library.as_rocm(theirs), _NAME, None)
