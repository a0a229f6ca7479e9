"""Collectives and pipelines for jobs that mix NVIDIA GPUs, AMD GPUs and host memory.

    comm = xvcomm.init()
    comm.all_reduce(x)

`init` joins the job that a launcher started (`xvcomm run`, torchrun, mpirun, SLURM, JAX) and returns a `Communicator`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xvcomm.errors import (
    Aborted,
    ArgumentError,
    ArrayError,
    AuthenticationError,
    BackendUnavailable,
    ClosedError,
    ConfigError,
    DeadlineExceeded,
    DTypeError,
    MismatchError,
    NotPicklable,
    PeerLost,
    ResourceError,
    ScheduleError,
    StoreError,
    XvcommError,
)
from xvcomm.types.dtype import ReduceOp, premul_sum

if TYPE_CHECKING:
    from xvcomm.comm.communicator import Communicator
    from xvcomm.comm.init import init
    from xvcomm.engine.inflight.work import Work

__version__ = "0.1.0"
__all__ = [
    "Aborted",
    "ArgumentError",
    "ArrayError",
    "AuthenticationError",
    "BackendUnavailable",
    "ClosedError",
    "Communicator",
    "ConfigError",
    "DTypeError",
    "DeadlineExceeded",
    "MismatchError",
    "NotPicklable",
    "PeerLost",
    "ReduceOp",
    "ResourceError",
    "ScheduleError",
    "StoreError",
    "Work",
    "XvcommError",
    "init",
    "premul_sum",
]

# Imported on first use: they import numba, which takes longer than everything else together.
_LATER = {"init": "xvcomm.comm.init", "Communicator": "xvcomm.comm.communicator", "Work": "xvcomm.engine.inflight.work"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        import importlib

        from xvcomm.system import interrupts

        interrupts.print_shortly()
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'xvcomm' has no attribute {name!r}")
