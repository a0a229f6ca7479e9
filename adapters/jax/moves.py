"""broadcast, gather, scatter, all_to_all and barrier, which have no derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xvcomm.adapters.jax import arguments, islands
from xvcomm.adapters.jax.communicators import chosen
from xvcomm.adapters.jax.derivatives import no_derivative
from xvcomm.adapters.jax.primitives import batched_as_is, batched_by_rows, bind, primitive
from xvcomm.adapters.jax.specs import CollectiveSpec
from xvcomm.adapters.jax.tokens import given_back
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import ArgumentError
from xvcomm.types.opcode import OpCode

broadcast_p = primitive("broadcast")
gather_p = primitive("gather")
scatter_p = primitive("scatter")
all_to_all_p = primitive("all_to_all")
barrier_p = primitive("barrier")


def broadcast(
    x: Any, root: int = 0, *, comm: Communicator | None = None, token: Any = None, axis_name: Any = None
) -> Any:
    """Copy the root's array to every rank.

    Args:
        x: the array on the root; elsewhere an object that defines shape and dtype.
        root: rank that sends.
        axis_name: as in `all_reduce`; all of the root's devices must have the array.
        comm, token: as in `all_reduce`, which also lists the errors.

    Returns:
        The root's array; with `token`, that and the next token.
    """
    comm, x = chosen(comm), arguments.array("broadcast", x)
    root, carrier = arguments.rank("broadcast", "root", root, comm), arguments.token("broadcast", token)
    spec = CollectiveSpec(op=OpCode.BROADCAST, root=root, **arguments.shared(comm, carrier))
    if axis_name is not None:
        return islands.broadcast(broadcast_p, x, spec, axis_name, token)
    return given_back(bind(broadcast_p, x, *carrier, spec=spec), token)


def gather(
    x: Any, root: int = 0, *, counts: Sequence[int] | None = None, comm: Communicator | None = None, token: Any = None
) -> Any:
    """Concatenate the blocks of all ranks along axis 0 on the root; None elsewhere. Arguments as in `all_gather`."""
    comm, x = chosen(comm), arguments.array("gather", x)
    x = x if x.ndim else x.reshape(1)
    root, carrier = arguments.rank("gather", "root", root, comm), arguments.token("gather", token)
    spec = CollectiveSpec(
        op=OpCode.GATHER, root=root, rows=arguments.owned("gather", x, counts, comm), uneven=counts is not None,
        **arguments.shared(comm, carrier),
    )  # fmt: skip
    results = bind(gather_p, x, *carrier, spec=spec)
    return given_back(results if comm.rank == root else [None, *results], token)


def scatter(
    x: Any, root: int = 0, *, counts: Sequence[int] | None = None, comm: Communicator | None = None, token: Any = None
) -> Any:
    """Give rank i the i-th block of the root's rows.

    Args:
        x: all rows on the root; elsewhere an object that defines their shape and dtype.
        counts: rows per rank, the same on all ranks; by default equal.
        root, comm, token: as in `broadcast`.

    Returns:
        This rank's block; with `token`, that and the next token.
    """
    comm, x = chosen(comm), arguments.rows("scatter", arguments.array("scatter", x))
    root, carrier = arguments.rank("scatter", "root", root, comm), arguments.token("scatter", token)
    spec = CollectiveSpec(
        op=OpCode.SCATTER, root=root, rows=arguments.divided("scatter", "counts", x, counts, comm),
        uneven=counts is not None, **arguments.shared(comm, carrier),
    )  # fmt: skip
    return given_back(bind(scatter_p, x, *carrier, spec=spec), token)


def all_to_all(
    x: Any, *, send_counts: Sequence[int] | None = None, recv_counts: Sequence[int] | None = None,
    comm: Communicator | None = None, token: Any = None,
) -> Any:  # fmt: skip
    """Send the i-th block of rows to rank i, and receive one block from each rank, in rank order.

    Args:
        x: `sum(send_counts)` rows along axis 0.
        send_counts, recv_counts: rows for and from each rank; by default equal. Give both or neither.
        comm, token: as in `all_reduce`, which also lists the errors.

    Returns:
        `sum(recv_counts)` rows; with `token`, those and the next token.
    """
    comm, x = chosen(comm), arguments.rows("all_to_all", arguments.array("all_to_all", x))
    if (send_counts is None) != (recv_counts is None):
        raise ArgumentError("all_to_all: give both send_counts and recv_counts, or neither")
    rows = arguments.divided("all_to_all", "send_counts", x, send_counts, comm)
    back = rows if recv_counts is None else arguments.counts("all_to_all", "recv_counts", recv_counts, comm)
    carrier = arguments.token("all_to_all", token)
    spec = CollectiveSpec(
        op=OpCode.ALL_TO_ALL, rows=rows, back=back, uneven=send_counts is not None, **arguments.shared(comm, carrier)
    )
    return given_back(bind(all_to_all_p, x, *carrier, spec=spec), token)


def barrier(*, comm: Communicator | None = None, token: Any = None) -> Any:
    """Delay each rank's next operation until every rank has called this.

    In a compiled program this orders only operations of xvcomm, or those that use its token; the host does not wait for a
    program that it has started. Outside of compiled programs the host waits.

    Returns:
        None; with `token`, the next token.
    """
    comm, carrier = chosen(comm), arguments.token("barrier", token)
    spec = CollectiveSpec(op=OpCode.BARRIER, **arguments.shared(comm, carrier))
    results = bind(barrier_p, *carrier, spec=spec)
    return results[0] if carrier else None


for _made in (broadcast_p, gather_p, scatter_p, all_to_all_p, barrier_p):
    no_derivative(_made)
for _made in (broadcast_p, barrier_p):
    batched_as_is(_made)
for _made in (gather_p, scatter_p, all_to_all_p):
    batched_by_rows(_made)
