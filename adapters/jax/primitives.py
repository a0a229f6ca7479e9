"""JAX primitives of xvcomm's operations: typing, lowering to custom calls, and binding.

Each has one static parameter, a `Spec`. Operands are the arrays, then a token if the spec is `carried`, then another if it is
`linked`. Results are the output array, if there is one, or the operand that is this rank's result (`passes`), then the first
token. A token is a float32 scalar, zero unless it is a cotangent: a data dependency that orders operations. Without tokens, JAX
orders them by an effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, partial_eval

from xvcomm.adapters.jax import eager, versions
from xvcomm.adapters.jax.customcalls import prepared, target
from xvcomm.adapters.jax.specs import Spec
from xvcomm.errors import ArgumentError, ArrayError
from xvcomm.memory import vendors


def primitive(name: str) -> Primitive:
    """Create a primitive for an operation; the caller adds its rules for differentiation and batching."""
    made = Primitive(f"xvcomm_{name}")
    made.multiple_results = True
    made.def_effectful_abstract_eval(_typed)
    made.def_impl(partial(_evaluate, made))
    mlir.register_lowering(made, _lower)
    partial_eval.partial_eval_jaxpr_custom_rules[made] = _kept
    return made


def bind(made: Primitive, *operands: Any, spec: Spec) -> list[Any]:
    """Apply a primitive.

    Raises:
        ArrayError: an operand is a tracer of a function that JAX has finished tracing.
    """
    try:
        results: list[Any] = made.bind(*operands, spec=spec)
    except jax.errors.UnexpectedTracerError as leaked:
        raise ArrayError(
            f"{spec.name}: the array is a tracer that was kept outside of the function it belongs to; return it from "
            "that function and use the result"
        ) from leaked
    return results


def arrays_of(spec: Spec, operands: Sequence[Any]) -> Sequence[Any]:
    """The operands without tokens."""
    return operands[: len(operands) - spec.carried - spec.linked]


def tokens_of(spec: Spec, operands: Sequence[Any]) -> Sequence[Any]:
    """The tokens among the operands."""
    return operands[len(operands) - spec.carried - spec.linked :]


def _typed(*operands: Any, spec: Spec) -> tuple[list[Any], set[Any]]:
    """Types of the results, and effects."""
    arrays = arrays_of(spec, operands)
    shapes = spec.results(arrays[-1].shape) if arrays else []
    results = [arrays[-1].update(shape=shape, weak_type=False) for shape in shapes]
    if spec.passes:
        results.append(arrays[0].update(weak_type=False))
    if spec.carried:
        results.append(tokens_of(spec, operands)[0])
    if spec.effectful:
        return results, set(versions.effects())
    return results, versions.keeping() if spec.mute else set()


def _evaluate(made: Primitive, *operands: Any, spec: Spec) -> list[Any]:
    """Run outside of compiled functions: on host memory directly, on GPUs as a program of one operation."""
    if spec.comm.device == "host":
        return eager.evaluate(arrays_of(spec, operands), tokens_of(spec, operands), spec)
    eager.check(arrays_of(spec, operands), spec)
    return [*operands[: spec.passes], *_compiled(made, spec)(*operands)]


@lru_cache(maxsize=1024)
def _compiled(made: Primitive, spec: Spec) -> Any:
    return jax.jit(lambda *operands: made.bind(*operands, spec=spec)[spec.passes :])


def _lower(context: Any, *operands: Any, spec: Spec) -> Sequence[Any]:
    """Lower to one custom call; results of a lone operation are zeros on devices that do not take part."""
    if spec.idle:
        return operands[: len(context.avals_out)]
    device = _placed(context, spec)
    platform = versions.platform(context)
    passed = operands[: spec.passes]
    given, types, results = list(operands), list(context.avals_in), list(context.avals_out)[len(passed) :]
    arrays = arrays_of(spec, types)
    call = prepared(spec, arrays, device)
    aliases = {len(arrays): len(results) - 1} if spec.carried else {}
    if spec.lone and call.writes:
        kind = results[0]
        zeros = mlir.lower_fun(lambda: jnp.zeros(kind.shape, kind.dtype), multiple_results=False)
        aliases[len(given)] = 0
        given += zeros(context.replace(primitive=None, avals_in=[], avals_out=[kind]))
        types.append(kind)
    if spec.effectful:
        effect, token = versions.effects().order, versions.abstract_token()
        given.append(context.tokens_in.get(effect))
        types.append(token)
        results.append(token)
    rule = jax.ffi.ffi_lowering(target(spec.name, platform), has_side_effect=True, operand_output_aliases=aliases)
    within = context.replace(avals_in=types, avals_out=results)
    lowered = list(rule(within, *given, number=np.int64(call.number), text=call.text))
    if spec.effectful:
        context.set_tokens_out(mlir.TokenSet({effect: lowered.pop()}))
    return [*passed, *lowered]


def _placed(context: Any, spec: Spec) -> int | None:
    """Index of the device that takes part in a lone operation.

    Raises:
        ArgumentError: the program is exported.
        ArrayError: it runs on a platform that this rank's communicator does not support, or on several devices that cannot be
            distinguished.
    """
    op, comm = spec.name, spec.comm
    if versions.exporting(context):
        raise ArgumentError(
            f"{op}: a program with xvcomm's operations cannot be exported, because communicators are bound to a process; "
            "export the parts between them, or compile ahead of time with jax.jit(...).lower(...).compile()"
        )
    platform = versions.platform(context)
    if vendors.of(comm.device).xla_platform != platform:
        kind = vendors.kind_where(lambda vendor: vendor.xla_platform == platform)
        raise ArrayError(
            f"{op}: the program is compiled for {platform} but this rank's device is {comm.device}; move the arrays, "
            f"or join with xvcomm.init(device='{kind or 'host'}')"
        )
    mine, whole = versions.devices(context)
    if not whole:
        raise ArrayError(
            f"{op}: XLA divides this program among {len(mine)} devices, each of which would call it; put it into "
            "jax.shard_map over all axes of the mesh and pass axis_name="
        )
    if not spec.lone:
        if len(mine) > 1:
            raise ArrayError(
                f"{op}: {len(mine)} devices of this process would call it, but the process is one rank; pass "
                "axis_name= of the mesh axes (all_reduce, all_gather, reduce_scatter, broadcast), so that they act as one"
            )
        return None
    numbers = [device.local_hardware_id for device in mine]
    if comm.device == "host":
        return min(numbers)
    if comm.device_index not in numbers:
        raise ArrayError(
            f"{op}: the mesh contains {comm.device} devices {numbers} of this process, but its rank is on "
            f"{comm.device}:{comm.device_index}; include that one, or join with xvcomm.init(device='{comm.device}:N')"
        )
    return comm.device_index


def batched_as_is(made: Primitive) -> None:
    """Make `jax.vmap` of an operation that is elementwise, or has no array, the operation on the whole batch."""

    def rule(operands: Sequence[Any], dims: Sequence[Any], *, spec: Spec) -> Any:
        return bind_batch(
            made, arrays_of(spec, operands), operands, dims, next(iter(arrays_of(spec, dims)), None), spec
        )

    batching.primitive_batchers[made] = rule


def batched_by_rows(made: Primitive) -> None:
    """Make `jax.vmap` of an operation that divides rows the operation on longer rows: the batch dimension goes last."""

    def rule(operands: Sequence[Any], dims: Sequence[Any], *, spec: Spec) -> Any:
        x, last = operands[0], None
        if dims[0] is not None:
            last = x.ndim - 1
            x = jnp.moveaxis(x, dims[0], last)
        return bind_batch(made, [x], operands, dims, last, spec)

    batching.primitive_batchers[made] = rule


def bind_batch(
    made: Primitive, arrays: Sequence[Any], operands: Sequence[Any], dims: Sequence[Any], dim: int | None, spec: Spec
) -> tuple[list[Any], list[int | None]]:
    """Apply a primitive once to a whole batch; returns the results and their batch dimensions.

    Args:
        arrays: the arrays of all members.
        operands, dims: as JAX passes them to a batching rule; of these, only the tokens are used.
        dim: batch dimension of an array that results.
    """
    tokens = [
        token if at is None else jax.lax.index_in_dim(token, 0, at, keepdims=False)
        for token, at in zip(tokens_of(spec, operands), tokens_of(spec, dims), strict=True)
    ]
    results = bind(made, *arrays, *tokens, spec=spec)
    return results, [*[dim] * (len(results) - spec.carried), *[None] * spec.carried]


def _kept(saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], equation: Any) -> Any:
    """Make `jax.checkpoint` save results and tokens: to repeat the communication would break the order of operations."""
    count = len(equation.outvars)
    if not any(unknown):
        return equation, None, [False] * count, [False] * count, []
    needed = [x for x, there in zip(equation.invars, instantiated, strict=True) if not there]
    return None, equation, [True] * count, [True] * count, needed
