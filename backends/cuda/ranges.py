"""Ranges in NVIDIA's profilers: NVTX, which CuPy contains."""

from __future__ import annotations

from xvcomm.abc.ranges import Ranges
from xvcomm.errors import BackendUnavailable


def nvtx() -> Ranges:
    """NVTX's functions.

    Raises:
        BackendUnavailable: CuPy was built without NVTX.
    """
    from cupy.cuda import nvtx

    if not getattr(nvtx, "available", True):  # what CuPy has in place of a module that was left out
        raise BackendUnavailable(
            "XVCOMM_RANGES=1: this CuPy has no NVTX; reinstall xvcomm[cuda], or unset the variable"
        )
    return Ranges(nvtx.RangePush, nvtx.RangePop)
