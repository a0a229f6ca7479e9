"""Everything that depends on JAX's release. Written for 0.7 to 0.12.

Private interfaces of JAX are used here only:

* the registry of ordered effects (`jax._src.effects`), without which explicit tokens are required;
* the type of XLA's tokens, public only from 0.11 on;
* the target of a lowering: export, mesh, devices;
* whether programs with ordered effects are running.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, NamedTuple, NoReturn

import jax
from jax.interpreters import ad, mlir

from xvcomm.errors import ArgumentError, BackendUnavailable

_REGISTRIES = (
    "lowerable_effects",
    "ordered_effects",
    "shardable_ordered_effects",
    "control_flow_allowed_effects",
    "custom_derivatives_allowed_effects",
    "remat_allowed_effects",
    "partial_eval_kept_effects",
)


OLDEST = (0, 7)


def require(release: str) -> None:
    """Check that the adapter supports this JAX.

    Raises:
        BackendUnavailable: it is older than OLDEST.
    """
    if tuple(map(int, release.split(".")[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise BackendUnavailable(
            f"xvcomm.adapters.jax needs JAX {oldest} or newer, and found {release}: pip install -U jax jaxlib"
        )


require(jax.__version__)


class Effects(NamedTuple):
    """The effects of an operation.

    Attributes:
        order: keeps all of xvcomm's operations in program order.
        call: makes JAX call compiled programs from Python, where it passes the tokens of ordered effects; the faster path that
            `lower().compile()` uses from its second call on omits them.
    """

    order: Any
    call: Any


def _unpicklable(effect: Any) -> NoReturn:
    raise ArgumentError(
        "a program with xvcomm's operations cannot be pickled, because communicators are bound to a process; trace and "
        "compile the function in the process that runs it"
    )


@cache
def effects() -> Effects:
    """The effects of operations without tokens; registered with JAX on first use.

    Raises:
        BackendUnavailable: this JAX has no such registry.
    """
    try:
        module = importlib.import_module("jax._src.effects")
        registries = [getattr(module, name) for name in _REGISTRIES]
        base = module.Effect
    except (ImportError, AttributeError) as missing:
        raise BackendUnavailable(
            f"JAX {jax.__version__} has no registry of ordered effects ({missing}); pass token= to every operation"
        ) from None

    def made(name: str, registries: list[Any]) -> Any:
        kind = type(name, (base,), {
            "__str__": lambda self: name, "__hash__": lambda self: hash(name),
            "__eq__": lambda self, other: type(self) is type(other), "__reduce__": _unpicklable,
        })  # fmt: skip
        for registry in registries:
            registry.add_type(kind)
        return kind()

    ordering = [module.ordered_effects, module.shardable_ordered_effects]
    return Effects(made("xvcomm", registries), made("xvcomm_call", [r for r in registries if r not in ordering]))


def keeping() -> set[Any]:
    """The effect of an operation with a token that must be kept in its program even if the token is unused.

    Empty if this JAX has no registry of effects: then only the token keeps it.
    """
    try:
        return {effects().call}
    except BackendUnavailable:
        return set()


@cache
def abstract_token() -> Any:
    """The type of XLA's tokens; JAX compares it by identity."""
    for module in ("jax.ffi", "jax._src.core"):
        found = getattr(importlib.import_module(module), "abstract_token", None)
        if found is not None:
            return found
    raise BackendUnavailable(f"JAX {jax.__version__} has no abstract_token; pass token= to every operation")


@cache
def _runtime_tokens() -> Any:
    return getattr(importlib.import_module("jax._src.dispatch"), "runtime_tokens", None)


def finish_ordered() -> None:
    """Wait for programs with ordered effects that this thread has started."""
    tokens = _runtime_tokens()
    if tokens is None or tokens.current_tokens or tokens.output_runtime_tokens:
        jax.effects_barrier()


def exporting(context: Any) -> bool:
    """Whether a lowering is for `jax.export`."""
    module = context.module_context
    parameters = getattr(module, "lowering_parameters", None)
    return bool(getattr(parameters, "for_export", False)) or len(module.platforms) > 1


def platform(context: Any) -> str:
    """Platform of a lowering: `cpu`, `cuda`, `rocm`, ..."""
    platforms = getattr(context, "platforms", None) or context.module_context.platforms
    name: str = platforms[0]
    return {"gpu": "cuda"}.get(name, name)


def devices(context: Any) -> tuple[tuple[Any, ...], bool]:
    """This process's devices that a program runs on, as far as known, and whether each runs its own program.

    The latter is the case inside `jax.shard_map` over all axes of the mesh; elsewhere XLA partitions one program.
    """
    axes = context.module_context.axis_context
    if isinstance(axes, mlir.SPMDAxisContext):
        whole = axes.mesh.size == 1 or set(axes.manual_axes) == set(axes.mesh.axis_names)
        try:
            found = tuple(axes.mesh.devices.flat)
        except (AttributeError, ValueError):  # an abstract mesh
            found = tuple(jax.local_devices()[: axes.mesh.size])
        mine = jax.process_index()
        return tuple(d for d in found if d.process_index == mine), whole
    count = getattr(axes, "num_devices", 1)
    assigned = getattr(axes, "device_assignment", None) or ()
    return tuple(assigned) or tuple(jax.local_devices()[:count]), count == 1


def zero_tangent(x: Any) -> Any:
    """The tangent of an operand that is not differentiated."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def varying(x: Any, axis_name: Any) -> Any:
    """Mark `x` as varying along an axis of `jax.shard_map`."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    kind = jax.typeof(x)
    known: Any = getattr(getattr(kind, "mat", None), "varying", None) or getattr(kind, "vma", ())
    missing = tuple(name for name in names if name not in known)
    if not missing:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, missing, to="varying")
    return jax.lax.pvary(x, missing)
