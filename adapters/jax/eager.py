"""Operations outside of compiled functions, on host memory: called directly, without XLA.

JAX's arrays are read in place. Results are allocated at addresses that JAX can adopt without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xvcomm.adapters.jax import versions
from xvcomm.adapters.jax.customcalls import CustomCall, passing, prepared
from xvcomm.adapters.jax.specs import CollectiveSpec, MessageSpec, Shape, Spec
from xvcomm.errors import ArrayError
from xvcomm.types.opcode import OpCode

ALIGNMENT = 64
"""Bytes; JAX copies memory with a smaller alignment."""

COPIED = 4096
"""Up to this size in bytes, a copy takes less time than adopting memory."""

_BY_SHARD = (OpCode.ALL_REDUCE, OpCode.REDUCE, OpCode.BROADCAST)


def evaluate(arrays: Sequence[Any], tokens: Sequence[Any], spec: Spec) -> list[Any]:
    """Run an operation of a rank on host memory; blocks until it is complete.

    Args:
        tokens: tokens that it is ordered after; the first is returned, if the operation is carried.

    Raises:
        ArrayError: an array is on another device, or on several devices and the operation does not work on parts.
    """
    arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in arrays]
    check(arrays, spec)
    if spec.idle:
        return [*arrays, *tokens[:1]]
    if spec.ordered:
        versions.finish_ordered()
    jax.block_until_ready(tokens)
    if arrays and len(arrays[0].sharding.device_set) > 1:
        results = _by_shard(arrays[0], spec)
    else:
        told = isinstance(spec, MessageSpec) and spec.status is not None
        results = _run((passing if told else prepared)(spec, arrays), arrays)
    return [*arrays[: spec.passes], *results, *tokens[:1]]


def check(arrays: Sequence[Any], spec: Spec) -> None:
    """Raise ArrayError for concrete arrays on devices that the operation cannot use."""
    comm = spec.comm
    for x in arrays:
        if not x.is_fully_addressable:
            raise ArrayError(
                f"{spec.name}: the array is spread over several processes; call it in jax.shard_map, or on the parts "
                "in x.addressable_shards"
            )
        devices = x.sharding.device_set
        platform = next(iter(devices)).platform
        if (platform == "cpu") != (comm.device == "host"):
            raise ArrayError(
                f"{spec.name}: the array is on {platform} but this rank's device is {comm.device}; move it with "
                f"jax.device_put, or join with xvcomm.init(device=...)"
            )
        by_shard = comm.device == "host" and isinstance(spec, CollectiveSpec) and spec.op in _BY_SHARD
        if len(devices) > 1 and not by_shard:
            raise ArrayError(
                f"{spec.name}: the array is spread over {len(devices)} devices; call it in jax.shard_map with "
                "axis_name=, or gather it first with jax.device_put(x, device)"
            )


def _run(call: CustomCall, arrays: Sequence[Any]) -> list[Any]:
    sources = [np.asarray(x, order="C") for x in arrays]  # JAX may store them in another layout
    if not call.writes:
        call.run(sources[0].ctypes.data if call.reads else 0, 0, None)
        return []
    out = _empty(call.spec.results(sources[-1].shape)[0], sources[-1].dtype)
    call.run(sources[0].ctypes.data, out.ctypes.data, None)
    # As in JAX, results are committed to a device only if an operand was.
    device = next((next(iter(x.devices())) for x in arrays if getattr(x, "committed", True)), None)
    if device is None and out.nbytes <= COPIED:
        return [jnp.asarray(out)]
    return [jax.device_put(out, device)]


def _by_shard(x: Any, spec: Spec) -> list[Any]:
    """Run on each part by itself, and once for equal ones."""
    assert isinstance(spec, CollectiveSpec)
    done: dict[str, np.ndarray[Any, Any]] = {}
    parts = []
    writes = bool(spec.results(x.shape))
    for shard in x.addressable_shards:
        key = str(shard.index)
        if key not in done:
            source = np.asarray(shard.data, order="C")
            call = prepared(spec, [source])
            done[key] = _empty(source.shape, source.dtype) if writes else source
            call.run(source.ctypes.data, done[key].ctypes.data if writes else 0, None)
        parts.append(jax.device_put(done[key], shard.device))
    return [jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)] if writes else []


def _empty(shape: Shape, dtype: Any) -> np.ndarray[Any, Any]:
    """An array at an address that JAX can adopt."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    room = np.empty(size + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + size].view(kind).reshape(shape)
