"""Helpers of the differentiation rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

from xvcomm.adapters.jax.primitives import arrays_of, bind, tokens_of
from xvcomm.adapters.jax.specs import CollectiveSpec, Spec
from xvcomm.adapters.jax.versions import zero_tangent
from xvcomm.errors import ArgumentError
from xvcomm.types.dtype import ReduceOp

AnySpec = TypeVar("AnySpec", bound=Spec)

LINEAR = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)


def no_derivative(made: Primitive) -> None:
    """Make differentiation of an operation raise an error that says what to do."""
    ad.primitive_jvps[made] = lambda primals, tangents, *, spec: unless_constant(made, primals, tangents, spec)


def linear(made: Primitive) -> None:
    """Make the derivative of an operation the same operation on the tangents, for linear reductions."""

    def rule(primals: Sequence[Any], tangents: Sequence[Any], *, spec: CollectiveSpec) -> Any:
        if not jnp.issubdtype(primals[0].dtype, jnp.inexact) or (
            spec.reduction is not None and spec.reduction.op not in LINEAR
        ):
            return unless_constant(made, primals, tangents, spec)
        results = bind(made, *primals, spec=spec)
        operands, other = behind(results, tangents, spec)
        return results, bind(made, *operands, spec=other)

    ad.primitive_jvps[made] = rule


def unless_constant(made: Primitive, primals: Sequence[Any], tangents: Sequence[Any], spec: Spec) -> Any:
    """The operation, if only its token is differentiated; raises otherwise."""
    if any(type(t) is not ad.Zero for t in arrays_of(spec, tangents)):
        raise ArgumentError(
            f"{spec.name} {spec.details()} has no derivative; put jax.lax.stop_gradient on its array, or use an operation with "
            "one: all_reduce and reduce_scatter of sum, avg or premul_sum, all_gather, send, sendrecv, and recv of one rank "
            "and tag"
        )
    results = bind(made, *primals, spec=spec)
    zeros = [zero_tangent(y) for y in results]
    return results, [*zeros[:-1], tokens_of(spec, tangents)[0]] if spec.carried else zeros


def behind(results: Sequence[Any], tangents: Sequence[Any], spec: AnySpec) -> tuple[list[Any], AnySpec]:
    """Operands and spec for the same operation on the tangents.

    With tokens it is ordered after the operation itself, and so is its transpose: no operation of a backward pass may overtake
    one of the forward pass. Without tokens, JAX's effect ensures that.
    """
    inner = [*arrays_of(spec, tangents), *tokens_of(spec, tangents)[:1]]
    linked = spec.carried and not spec.ordered
    after = [results[-1]] if linked else []
    return [*map(ad.instantiate_zeros, inner), *after], spec.but(linked=linked)


def cotangents_of(cotangents: Sequence[Any]) -> list[Any]:
    """Cotangents as arrays, even if they are zero, because other ranks wait for them."""
    return [ad.instantiate_zeros(c) for c in cotangents]


def for_operands(results: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Cotangents for the operands of a transposed operation; None for those that are not differentiated."""
    missing = [None] * (len(operands) - len(results))
    return [y if ad.is_undefined_primal(x) else None for y, x in zip([*results, *missing], operands, strict=True)]


def links(spec: Spec, operands: Sequence[Any]) -> Sequence[Any]:
    """The token that a transposed operation is ordered after, if it is linked."""
    return operands[len(operands) - spec.linked :]


def scaled(x: Any, factor: float) -> Any:
    """`x` times a number, in the dtype of `x`."""
    return x * jnp.asarray(factor, x.dtype)
