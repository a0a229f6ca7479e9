"""The names of `mpi4py.MPI`, so that a program is ported by its import: `from xvcomm.adapters.mpi import MPI`.

COMM_WORLD joins the job on first use, like `xvcomm.init()`; on host memory unless `XVCOMM_DEVICE` is set. Finalize, or process
exit, leaves the job.
"""

from __future__ import annotations

import atexit
import platform
import sys
import time
from typing import Any

import xvcomm
from xvcomm.adapters.mpi import datatypes, ops
from xvcomm.adapters.mpi.buffers import BOTTOM, IN_PLACE
from xvcomm.adapters.mpi.cartesian import divide as _divide
from xvcomm.adapters.mpi.comm import (
    COMM_TYPE_SHARED,
    CONGRUENT,
    IDENT,
    SIMILAR,
    UNEQUAL,
    Cartcomm,
    Comm,
    Intracomm,
)
from xvcomm.adapters.mpi.datatypes import ORDER_C, ORDER_FORTRAN, Datatype
from xvcomm.adapters.mpi.groups import Group
from xvcomm.adapters.mpi.messages import ANY_SOURCE, ANY_TAG, TAG_UB
from xvcomm.adapters.mpi.ops import Op
from xvcomm.adapters.mpi.pointtopoint import NO_MESSAGE, PROC_NULL, Message
from xvcomm.adapters.mpi.requests import REQUEST_NULL, Prequest, Request
from xvcomm.adapters.mpi.status import UNDEFINED, Status
from xvcomm.comm.communicator import Communicator
from xvcomm.config import Config
from xvcomm.errors import ArgumentError, XvcommError

__all__ = [
    "ANY_SOURCE", "ANY_TAG", "BOTTOM", "BSEND_OVERHEAD", "COMM_NULL", "COMM_SELF", "COMM_TYPE_SHARED", "COMM_WORLD",
    "CONGRUENT", "DATATYPE_NULL", "IDENT", "INFO_NULL", "IN_PLACE", "MESSAGE_NO_PROC", "MESSAGE_NULL", "OP_NULL",
    "ORDER_C", "ORDER_F", "ORDER_FORTRAN", "PROC_NULL", "REQUEST_NULL", "SIMILAR", "SUCCESS", "TAG_UB",
    "THREAD_FUNNELED", "THREAD_MULTIPLE", "THREAD_SERIALIZED", "THREAD_SINGLE", "UNDEFINED", "UNEQUAL", "Alloc_mem",
    "Attach_buffer", "Cartcomm", "Comm", "Compute_dims", "Datatype", "Detach_buffer", "Exception", "Finalize",
    "Free_mem", "Get_library_version", "Get_processor_name", "Get_version", "Group", "Init", "Init_thread", "Intracomm",
    "Is_finalized", "Is_initialized", "Message", "Op", "Prequest", "Query_thread", "Request", "Status", "Wtick",
    "Wtime", "get_vendor",
]  # fmt: skip

SUCCESS = 0
ORDER_F = ORDER_FORTRAN
BSEND_OVERHEAD = 0
THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
Exception = XvcommError


class _World(Intracomm):
    """All ranks of the job."""

    def Free(self) -> None:
        """Not allowed: `Finalize` closes the world.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(f"{self.name} cannot be freed; MPI.Finalize() leaves the job")

    Disconnect, free = Free, Free

    def _leave(self) -> None:
        if self._found is not None:
            super().Free()


def _join() -> Communicator:
    device = Config.from_env().device
    communicator = xvcomm.init(device=device or "host")
    # Registered after the session's own exit handler, so it runs first: detached sends are still completed.
    atexit.register(_at_exit)
    return communicator


def _at_exit() -> None:
    try:
        COMM_WORLD._leave()
    except XvcommError as error:
        print(f"xvcomm: {error}", file=sys.stderr)


def _alone() -> Communicator:
    world = COMM_WORLD.communicator
    return world.subgroup([world.rank], "mpi self")


COMM_WORLD = _World(_join, "MPI_COMM_WORLD")
COMM_SELF = _World(_alone, "MPI_COMM_SELF")
COMM_NULL = Comm(None, "MPI_COMM_NULL")
DATATYPE_NULL = Datatype("MPI_DATATYPE_NULL", "V0")
MESSAGE_NULL, MESSAGE_NO_PROC = Message(constant=True), Message(NO_MESSAGE, constant=True)
OP_NULL = Op("OP_NULL", lambda x, y: y)
INFO_NULL = None


def __getattr__(name: str) -> Any:
    found: Any = datatypes.NAMED.get(name) or ops.NAMED.get(name)
    if found is None:
        raise AttributeError(
            f"xvcomm's MPI has no {name}: one-sided operations, files, dynamic processes and "
            "intercommunicators are not supported"
            if name[:1].isupper()
            else f"module {__name__!r} has no attribute {name!r}"
        )
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *datatypes.NAMED, *ops.NAMED})


def Init() -> None:
    """Join the job now, instead of on first use of COMM_WORLD."""
    _ = COMM_WORLD.rank


def Init_thread(required: int = THREAD_MULTIPLE) -> int:
    """Like `Init`; returns THREAD_MULTIPLE."""
    Init()
    return THREAD_MULTIPLE


def Query_thread() -> int:
    """THREAD_MULTIPLE: any thread may call MPI."""
    return THREAD_MULTIPLE


def Is_initialized() -> bool:
    """Whether this process has joined the job."""
    return COMM_WORLD._found is not None or Is_finalized()


def Is_finalized() -> bool:
    """Whether this process has left the job."""
    return not COMM_WORLD


def Finalize() -> None:
    """Wait for detached sends, and leave the job."""
    COMM_WORLD._leave()


def Wtime() -> float:
    """Seconds since some point in the past."""
    return time.perf_counter()


def Wtick() -> float:
    """Resolution of `Wtime` in seconds."""
    return time.get_clock_info("perf_counter").resolution


def Get_processor_name() -> str:
    """Name of this host."""
    return platform.node()


def Get_version() -> tuple[int, int]:
    """The MPI version that this interface follows."""
    return 4, 0


def Get_library_version() -> str:
    """Name and version of xvcomm."""
    return f"xvcomm {xvcomm.__version__}"


def get_vendor() -> tuple[str, tuple[int, int, int]]:
    """`"xvcomm"` and its version."""
    major, minor, patch = (int(part) for part in xvcomm.__version__.split(".")[:3])
    return "xvcomm", (major, minor, patch)


def Compute_dims(nnodes: int, dims: Any) -> list[int]:
    """Divide ranks among the axes of a grid as equally as possible; nonzero axes are kept."""
    return _divide(nnodes, dims)


def Alloc_mem(size: int, info: Any = None) -> memoryview:
    """Allocate zeroed memory of `size` bytes."""
    return memoryview(bytearray(size))


def Free_mem(mem: Any) -> None:
    """No-op: memory is garbage-collected."""


_attached: list[Any] = []


def Attach_buffer(buf: Any) -> None:
    """Keep the buffer for `Detach_buffer`; `Bsend` allocates its own memory."""
    _attached.append(buf)


def Detach_buffer() -> Any:
    """Wait until every `Bsend` has been sent, and return the attached buffer."""
    if COMM_WORLD._found is not None:
        COMM_WORLD._found.matcher.flush()
    return _attached.pop() if _attached else None
