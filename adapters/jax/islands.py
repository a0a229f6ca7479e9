"""Several devices of one process, inside `jax.shard_map`: they reduce among themselves, and one communicates with other ranks.

That one is the rank's own device, on host memory the first. The others take part in the same program with zeros, which are
added to its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from xvcomm.adapters.jax import arguments
from xvcomm.adapters.jax.primitives import bind
from xvcomm.adapters.jax.specs import CollectiveSpec
from xvcomm.adapters.jax.tokens import make_token
from xvcomm.adapters.jax.versions import varying
from xvcomm.errors import ArgumentError
from xvcomm.types.dtype import ReduceOp, Reduction

_LOCAL = {
    ReduceOp.SUM: jax.lax.psum, ReduceOp.AVG: jax.lax.pmean, ReduceOp.PREMUL_SUM: jax.lax.psum,
    ReduceOp.MAX: jax.lax.pmax, ReduceOp.MIN: jax.lax.pmin,
}  # fmt: skip


def all_reduce(made: Primitive, x: Any, spec: CollectiveSpec, axis_name: Any, token: Any) -> Any:
    """See `reductions.all_reduce`. An average is that of all devices, if all ranks have the same number."""
    _without_token("all_reduce", token)
    x, spec, ways = _reduced(x, spec, axis_name)
    return _divided(_crossing(made, x, spec, axis_name), ways)


def reduce_scatter(made: Primitive, x: Any, spec: CollectiveSpec, axis_name: Any, token: Any) -> Any:
    """See `blocks.reduce_scatter`."""
    _without_token("reduce_scatter", token)
    devices = jax.lax.psum(1, axis_name)
    mine = spec.rows[spec.comm.rank]
    if mine % devices:
        raise ArgumentError(f"reduce_scatter: the rank's {mine} rows are not a multiple of its {devices} devices")
    x, spec, ways = _reduced(x, spec, axis_name)
    block = _divided(_crossing(made, x, spec, axis_name), ways)
    part = mine // devices
    return jax.lax.dynamic_slice_in_dim(block, jax.lax.axis_index(axis_name) * part, part, 0)


def all_gather(
    made: Primitive, x: Any, spec: CollectiveSpec, axis_name: Any, token: Any, counts: Sequence[int] | None
) -> Any:
    """See `blocks.all_gather`."""
    _without_token("all_gather", token)
    block = jax.lax.all_gather(x, axis_name, tiled=True)
    spec = spec.but(rows=arguments.owned("all_gather", block, counts, spec.comm))
    return _crossing(made, block, spec, axis_name)


def broadcast(made: Primitive, x: Any, spec: CollectiveSpec, axis_name: Any, token: Any) -> Any:
    """See `moves.broadcast`."""
    _without_token("broadcast", token)
    if spec.comm.rank == spec.root:
        # A token, because XLA before Shardy derives the sharding from a result.
        bind(made, varying(x, axis_name), make_token(), spec=spec.but(lone=True, carried=True))
        return x
    return _crossing(made, x, spec, axis_name)


def _reduced(x: Any, spec: CollectiveSpec, axis_name: Any) -> tuple[Any, CollectiveSpec, int]:
    """The array reduced among this process's devices, in its own dtype; the spec to continue with; and the final divisor."""
    how = spec.reduction
    assert how is not None
    local = _LOCAL.get(how.op)
    if local is None:
        raise ArgumentError(
            f"{spec.name}: JAX does not reduce by {how.op} among the devices of a process; gather with "
            "jax.lax.all_gather, reduce, and call it outside of jax.shard_map"
        )
    if how.op is ReduceOp.AVG and not jnp.issubdtype(x.dtype, jnp.inexact):  # JAX would return floats
        ways = jax.lax.psum(1, axis_name) * spec.comm.size
        return jax.lax.psum(x, axis_name), spec.but(reduction=Reduction(ReduceOp.SUM)), ways
    return local(x, axis_name).astype(x.dtype), spec, 1


def _divided(x: Any, ways: int) -> Any:
    return x if ways == 1 else jax.lax.div(x, jnp.asarray(ways, x.dtype))


def _crossing(made: Primitive, x: Any, spec: CollectiveSpec, axis_name: Any) -> Any:
    """Run the operation on one device, and return its result on all."""
    (y,) = bind(made, varying(x, axis_name), spec=spec.but(lone=True))
    if y.dtype == jnp.bool_:
        return jax.lax.psum(y.astype(jnp.uint8), axis_name).astype(y.dtype)
    return jax.lax.psum(y, axis_name)


def _without_token(op: str, token: Any) -> None:
    if token is not None:
        raise ArgumentError(f"{op}: axis_name= and token= cannot be combined; omit the token")
