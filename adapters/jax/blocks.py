"""all_gather and reduce_scatter, which are each other's transpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.interpreters import ad

from xvcomm.adapters.jax import arguments, islands
from xvcomm.adapters.jax.communicators import chosen
from xvcomm.adapters.jax.derivatives import cotangents_of, for_operands, linear, links, scaled
from xvcomm.adapters.jax.primitives import batched_by_rows, bind, primitive
from xvcomm.adapters.jax.specs import CollectiveSpec
from xvcomm.adapters.jax.tokens import given_back
from xvcomm.comm.collectives import Op
from xvcomm.comm.communicator import Communicator
from xvcomm.types.dtype import ReduceOp, Reduction, from_numpy, reduction_on
from xvcomm.types.opcode import OpCode

all_gather_p = primitive("all_gather")
reduce_scatter_p = primitive("reduce_scatter")


def all_gather(
    x: Any, *, counts: Sequence[int] | None = None, comm: Communicator | None = None, token: Any = None,
    axis_name: Any = None,
) -> Any:  # fmt: skip
    """Concatenate the blocks of all ranks along axis 0, on every rank.

    Differentiable: the cotangent is reduce-scattered.

    Args:
        x: this rank's block, `counts[rank]` rows. A scalar counts as one row.
        counts: rows per rank; by default equal.
        axis_name: as in `all_reduce`; a rank's block is then the concatenation of its devices' blocks.
        comm, token: as in `all_reduce`, which also lists the errors.

    Returns:
        All rows; with `token`, those and the next token.
    """
    comm, x = chosen(comm), arguments.array("all_gather", x)
    x = x if x.ndim else x.reshape(1)
    carrier = arguments.token("all_gather", token)
    spec = CollectiveSpec(
        op=OpCode.ALL_GATHER, rows=() if axis_name is not None else arguments.owned("all_gather", x, counts, comm),
        uneven=counts is not None, **arguments.shared(comm, carrier),
    )  # fmt: skip
    if axis_name is not None:
        return islands.all_gather(all_gather_p, x, spec, axis_name, token, counts)
    return given_back(bind(all_gather_p, x, *carrier, spec=spec), token)


def reduce_scatter(
    x: Any, op: Op = "sum", *, counts: Sequence[int] | None = None, comm: Communicator | None = None, token: Any = None,
    axis_name: Any = None,
) -> Any:  # fmt: skip
    """Reduce elementwise over all ranks, and give rank i the i-th block of rows.

    Differentiable for sum, avg and premul_sum: the cotangent is all-gathered.

    Args:
        x: `sum(counts)` rows along axis 0; without `counts` their number must be a multiple of the ranks.
        counts: rows per rank.
        axis_name: as in `all_reduce`; each of a rank's devices then gets an equal part of the rank's block.
        op, comm, token: as in `all_reduce`, which also lists the errors.

    Returns:
        This rank's block; with `token`, that and the next token.
    """
    comm, x = chosen(comm), arguments.rows("reduce_scatter", arguments.array("reduce_scatter", x))
    how = reduction_on(op, from_numpy(np.dtype(x.dtype)))
    carrier = arguments.token("reduce_scatter", token)
    spec = CollectiveSpec(
        op=OpCode.REDUCE_SCATTER, reduction=how, rows=arguments.divided("reduce_scatter", "counts", x, counts, comm),
        uneven=counts is not None, **arguments.shared(comm, carrier),
    )  # fmt: skip
    if axis_name is not None:
        return islands.reduce_scatter(reduce_scatter_p, x, spec, axis_name, token)
    return given_back(bind(reduce_scatter_p, x, *carrier, spec=spec), token)


def _transpose_all_gather(cotangents: Sequence[Any], *operands: Any, spec: CollectiveSpec) -> list[Any]:
    other = spec.but(op=OpCode.REDUCE_SCATTER, reduction=Reduction(ReduceOp.SUM))
    results = bind(reduce_scatter_p, *cotangents_of(cotangents), *links(spec, operands), spec=other)
    return for_operands(results, operands)


def _transpose_reduce_scatter(cotangents: Sequence[Any], *operands: Any, spec: CollectiveSpec) -> list[Any]:
    how = spec.reduction
    assert how is not None
    other = spec.but(op=OpCode.ALL_GATHER, reduction=None)
    results = bind(all_gather_p, *cotangents_of(cotangents), *links(spec, operands), spec=other)
    if how.op is not ReduceOp.SUM:
        results[0] = scaled(results[0], 1 / spec.comm.size if how.op is ReduceOp.AVG else how.factor)
    return for_operands(results, operands)


for _made, _rule in ((all_gather_p, _transpose_all_gather), (reduce_scatter_p, _transpose_reduce_scatter)):
    linear(_made)
    ad.primitive_transposes[_made] = _rule
    batched_by_rows(_made)
