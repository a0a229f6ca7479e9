"""mpi4jax's functions, with their names, arguments and shapes, implemented by the adapter's, as a user would port them.

Differences: mpi4jax stacks the ranks' arrays along a new axis where xvcomm concatenates their rows; its allreduce treats the
cotangent as equal on all ranks (`replicated`); its receives accept any rank and tag by default.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from xvcomm.adapters import jax as xvjax
from xvcomm.comm.communicator import Communicator

comm_world: Communicator | None = None
"""Communicator to use if none is given; must be set before use."""


def _comm(comm: Communicator | None) -> Communicator:
    found = comm_world if comm is None else comm
    assert found is not None
    return found


def allreduce(x: Any, op: str, *, comm: Communicator | None = None) -> Any:
    """MPI_Allreduce."""
    return xvjax.all_reduce(x, op, comm=_comm(comm), replicated=op == "sum")


def reduce(x: Any, op: str, root: int, *, comm: Communicator | None = None) -> Any:
    """MPI_Reduce; other ranks get their input back."""
    return xvjax.reduce(x, root, op, comm=_comm(comm))


def scan(x: Any, op: str, *, comm: Communicator | None = None) -> Any:
    """MPI_Scan: reduction over the ranks up to this one."""
    return xvjax.scan(x, op, comm=_comm(comm))


def bcast(x: Any, root: int, *, comm: Communicator | None = None) -> Any:
    """MPI_Bcast."""
    return xvjax.broadcast(x, root, comm=_comm(comm))


def allgather(x: Any, *, comm: Communicator | None = None) -> Any:
    """MPI_Allgather, stacked."""
    return xvjax.all_gather(jnp.asarray(x)[None], comm=_comm(comm))


def gather(x: Any, root: int, *, comm: Communicator | None = None) -> Any:
    """MPI_Gather, stacked; other ranks get their input back."""
    found = xvjax.gather(jnp.asarray(x)[None], root, comm=_comm(comm))
    return jnp.asarray(x) if found is None else found


def scatter(x: Any, root: int, *, comm: Communicator | None = None) -> Any:
    """MPI_Scatter; other ranks pass an array with the result's shape and dtype."""
    comm = _comm(comm)
    if comm.rank == root:
        if x.shape[0] != comm.size:
            raise ValueError("Scatter input must have shape (nproc, ...)")
        whole = x
    else:
        whole = jnp.zeros((comm.size, *x.shape), x.dtype)
    return xvjax.scatter(whole, root, comm=comm)[0]


def alltoall(x: Any, *, comm: Communicator | None = None) -> Any:
    """MPI_Alltoall."""
    if x.shape[0] != _comm(comm).size:
        raise ValueError("Alltoall input must have shape (nproc, ...)")
    return xvjax.all_to_all(x, comm=_comm(comm))


def barrier(*, comm: Communicator | None = None) -> None:
    """MPI_Barrier."""
    xvjax.barrier(comm=_comm(comm))


def send(x: Any, dest: int, *, tag: int = 0, comm: Communicator | None = None) -> None:
    """MPI_Send."""
    xvjax.send(x, dest, tag, comm=_comm(comm))


def recv(
    x: Any, source: int | None = xvjax.ANY_SOURCE, *, tag: int | None = xvjax.ANY_TAG, comm: Communicator | None = None,
    status: Any = None,
) -> Any:  # fmt: skip
    """MPI_Recv."""
    return xvjax.recv(x, source, tag, comm=_comm(comm), status=status)


def sendrecv(
    sendbuf: Any, recvbuf: Any, source: int, dest: int, *, sendtag: int = 0, recvtag: int = 0,
    comm: Communicator | None = None,
) -> Any:  # fmt: skip
    """MPI_Sendrecv."""
    return xvjax.sendrecv(sendbuf, dest, recvbuf, source, sendtag, recvtag, comm=_comm(comm))
