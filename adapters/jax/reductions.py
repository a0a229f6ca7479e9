"""all_reduce, reduce and scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.interpreters import ad

from xvcomm.adapters.jax import arguments, islands
from xvcomm.adapters.jax.blocks import all_gather_p
from xvcomm.adapters.jax.communicators import chosen
from xvcomm.adapters.jax.derivatives import cotangents_of, for_operands, linear, links, no_derivative, scaled
from xvcomm.adapters.jax.primitives import batched_as_is, bind, primitive
from xvcomm.adapters.jax.specs import CollectiveSpec
from xvcomm.adapters.jax.tokens import given_back
from xvcomm.comm.collectives import Op
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import ArgumentError
from xvcomm.types.dtype import ReduceOp, Reduction, from_numpy, reduction_on
from xvcomm.types.opcode import OpCode

all_reduce_p = primitive("all_reduce")
reduce_p = primitive("reduce")

_SUM = Reduction(ReduceOp.SUM)
_ALONG: dict[ReduceOp, Callable[[Any], Any]] = {
    ReduceOp.SUM: lambda rows: rows.sum(axis=0), ReduceOp.PROD: lambda rows: rows.prod(axis=0),
    ReduceOp.MAX: lambda rows: rows.max(axis=0), ReduceOp.MIN: lambda rows: rows.min(axis=0),
}  # fmt: skip


def all_reduce(
    x: Any, op: Op = "sum", *, comm: Communicator | None = None, token: Any = None, axis_name: Any = None,
    replicated: bool = False,
) -> Any:  # fmt: skip
    """Reduce elementwise over all ranks; every rank gets bitwise equal results.

    Differentiable for sum, avg and premul_sum. The derivative is that of the sum of all ranks' losses: the cotangent is
    all-reduced too.

    Args:
        x: array of any dtype that xvcomm supports.
        op: `"sum"`, `"avg"`, `"prod"`, `"min"`, `"max"`, `"band"`, `"bor"`, `"bxor"`, `xvcomm.premul_sum(factor)`.
        comm: the communicator; by default the one of `init` or `use`.
        token: orders this operation after the one that returned it; see `make_token`.
        axis_name: inside `jax.shard_map`: axes of a mesh of this process's devices, over which to reduce as well.
        replicated: for a sum: every rank uses the result in the same way, for instance as a loss, so that the derivative is
            that of one such value: cotangents are equal on all ranks, and passed on unchanged.

    Returns:
        An array like `x`; with `token`, that array and the next token.

    Raises:
        ArrayError, DTypeError, ArgumentError: an argument is invalid; says what to do.
        MismatchError, PeerLost, DeadlineExceeded, Aborted, ClosedError: as in `Communicator`; compiled programs raise JAX's
            errors instead, see `named_errors`.
    """
    comm, x = chosen(comm), arguments.array("all_reduce", x)
    how = reduction_on(op, from_numpy(np.dtype(x.dtype)))
    if replicated and how.op is not ReduceOp.SUM:
        raise ArgumentError(f"all_reduce: replicated= is for sums, not for {how.op}")
    carrier = arguments.token("all_reduce", token)
    spec = CollectiveSpec(op=OpCode.ALL_REDUCE, reduction=how, replicated=replicated, **arguments.shared(comm, carrier))
    if axis_name is not None:
        return islands.all_reduce(all_reduce_p, x, spec, axis_name, token)
    return given_back(bind(all_reduce_p, x, *carrier, spec=spec), token)


def reduce(x: Any, root: int = 0, op: Op = "sum", *, comm: Communicator | None = None, token: Any = None) -> Any:
    """Reduce elementwise over all ranks; only the root gets the result, the others get `x` back.

    Arguments and errors as in `all_reduce`. Not differentiable.
    """
    comm, x = chosen(comm), arguments.array("reduce", x)
    how, root = reduction_on(op, from_numpy(np.dtype(x.dtype))), arguments.rank("reduce", "root", root, comm)
    carrier = arguments.token("reduce", token)
    spec = CollectiveSpec(op=OpCode.REDUCE, reduction=how, root=root, **arguments.shared(comm, carrier))
    return given_back(bind(reduce_p, x, *carrier, spec=spec), token)


def scan(x: Any, op: Op = "sum", *, comm: Communicator | None = None, token: Any = None) -> Any:
    """Reduce elementwise over the ranks up to this one, like MPI_Scan; op is sum, prod, max or min.

    It gathers the arrays of all ranks, so it is meant for small ones. Differentiable like JAX's own reductions. Arguments and
    errors as in `all_reduce`.
    """
    comm, x = chosen(comm), arguments.array("scan", x)
    how = reduction_on(op, from_numpy(np.dtype(x.dtype)))
    if how.op not in _ALONG:
        raise ArgumentError(f"scan: {how.op}: must be sum, prod, max or min; compute others from all_gather")
    carrier = arguments.token("scan", token)
    spec = CollectiveSpec(op=OpCode.ALL_GATHER, rows=(1,) * comm.size, **arguments.shared(comm, carrier))
    rows, *rest = bind(all_gather_p, x[None], *carrier, spec=spec)
    return given_back([_ALONG[how.op](rows[: comm.rank + 1]).astype(x.dtype), *rest], token)


def _transpose(cotangents: Sequence[Any], *operands: Any, spec: CollectiveSpec) -> list[Any]:
    """A sum is its own transpose; for premul_sum, each rank's factor is applied after the sum."""
    how, back = spec.reduction, [*cotangents_of(cotangents), *links(spec, operands)]
    assert how is not None
    if spec.replicated:
        results = bind(all_reduce_p, *back, spec=spec.but(identity=not spec.identity))
    elif how.op is ReduceOp.PREMUL_SUM:
        results = bind(all_reduce_p, *back, spec=spec.but(reduction=_SUM))
        results[0] = scaled(results[0], how.factor)
    else:
        results = bind(all_reduce_p, *back, spec=spec)
    return for_operands(results, operands)


linear(all_reduce_p)
ad.primitive_transposes[all_reduce_p] = _transpose
batched_as_is(all_reduce_p)
no_derivative(reduce_p)
batched_as_is(reduce_p)
