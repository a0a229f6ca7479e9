"""Helpers of the JAX adapter's tests: ranks, arrays with known results, the forms of an operation."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from xvcomm.adapters import jax as xvjax
from xvcomm.comm.communicator import Communicator
from xvcomm.testing.world import World

ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XVCOMM_DEVICE": "host"}
PRELOAD = ("pytest", "jax.numpy", "xvcomm.adapters.jax")
Array = np.ndarray[Any, Any]
DTYPES = (
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "int8",
    "int16", "int32", "uint8", "uint16", "uint32", "bool", "complex64",
)  # fmt: skip
WIDE = ("float64", "int64", "uint64", "complex128")


def started(islands: str, devices: int = 1, env: Mapping[str, str] | None = None) -> World:
    """Ranks in islands, each with this number of JAX host devices."""
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    with mock.patch.dict(os.environ, ENVIRONMENT):  # a server imports JAX for all ranks, and JAX reads them then
        return World(islands=islands, env={**ENVIRONMENT, **flags, **(env or {})}, timeout=30, preload=PRELOAD)


def inputs(comm: Communicator, shape: tuple[int, ...], dtype: Any = "float32") -> list[Array]:
    """Every rank's array: small numbers whose sums are exact in any dtype."""
    kind = np.dtype(jnp.dtype(dtype))
    size = int(np.prod(shape))
    arrays = []
    for rank in range(comm.size):
        numbers = (np.arange(size) + rank) % 3 if kind.name != "bool" else (np.arange(size) + rank) % 2
        arrays.append(numbers.astype(kind).reshape(shape))
    return arrays


def total(arrays: list[Array]) -> Array:
    """The sum over the ranks, in the inputs' dtype."""
    if arrays[0].dtype == bool:
        return np.logical_or.reduce(arrays)
    return sum((a.astype(np.complex128) for a in arrays[1:]), arrays[0].astype(np.complex128)).real.astype(
        arrays[0].dtype
    )


def equal(found: Any, expected: Any, what: str = "") -> None:
    """Assert the same dtype, shape and elements."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype and found.shape == expected.shape, (what, found, expected)
    assert (found == expected).all(), (what, found, expected)


def close(found: Any, expected: Any, what: str = "") -> None:
    """Assert nearly the same elements."""
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5, atol=1e-6, err_msg=what)


def plain(operation: Callable[..., Any], *arrays: Any) -> Any:
    """An operation outside compiled functions."""
    return operation(*arrays)


def compiled(operation: Callable[..., Any], *arrays: Any) -> Any:
    """An operation in a compiled function."""
    return jax.jit(operation)(*arrays)


def carried(operation: Callable[..., Any], *arrays: Any) -> Any:
    """An operation in a compiled function, with a token."""
    result, token = jax.jit(lambda *a: operation(*a, token=xvjax.make_token()))(*arrays)
    equal(token, np.float32(0), "token")
    return result


def plainly_carried(operation: Callable[..., Any], *arrays: Any) -> Any:
    """An operation outside compiled functions, with a token."""
    result, token = operation(*arrays, token=xvjax.make_token())
    equal(token, np.float32(0), "token")
    return result


FORMS = {"eager": plain, "jit": compiled, "token": carried, "eager token": plainly_carried}


def separate(check: Callable[..., None]) -> Callable[..., None]:
    """Run a check on a communicator of its own, so that its errors do not abort the processes' default one."""

    @functools.wraps(check)
    def run(comm: Communicator, *arguments: Any) -> None:
        sub = comm.split(0)
        assert sub is not None
        try:
            check(sub, *arguments)
        finally:
            sub.close()

    return run
