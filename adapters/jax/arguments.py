"""Validation of users' arguments."""

from __future__ import annotations

import ctypes
import operator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xvcomm.comm.communicator import Communicator
from xvcomm.comm.point_to_point import CHANNELS
from xvcomm.errors import ArgumentError, ArrayError, DTypeError
from xvcomm.trace.callsite import find_call_site, skip_folder
from xvcomm.trace.format import CALL_SITE_BYTES
from xvcomm.types.dtype import from_numpy

TOKEN = np.dtype(np.float32)
_JAX = str(Path(jax.__file__).parent)


def array(op: str, x: Any) -> Any:
    """Convert `x` to an array or tracer of JAX with a definite dtype.

    A Python number gets the dtype that JAX would give it; ranks that differ in it get a MismatchError as usual.

    Raises:
        ArrayError: it is not an array.
        DTypeError: xvcomm does not support its dtype, or a number does not fit JAX's; JAX would convert 64-bit numpy arrays to
            32 bits unless configured otherwise.
    """
    if isinstance(x, np.ndarray | np.generic) and not isinstance(x, jax.Array):
        _check_width(op, x.dtype)
        x = jnp.asarray(x)
    if isinstance(x, bool | int | float | complex):
        x = _number(op, x)
    if not isinstance(x, jax.Array):
        raise ArrayError(f"{op}: {type(x).__name__} is not an array of JAX or numpy; call this on each leaf of a tree")
    if getattr(x, "weak_type", False):
        x = x.astype(x.dtype)
    if x.dtype == jax.dtypes.float0 or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        raise DTypeError(f"{op}: arrays of {x.dtype} contain no numbers; pass jax.random.key_data(x) of a key")
    from_numpy(np.dtype(x.dtype))
    return x


def like(op: str, x: Any) -> Any:
    """An object that defines shape and dtype of an array to receive: an array, a tracer, or a `jax.ShapeDtypeStruct`."""
    if isinstance(x, jax.ShapeDtypeStruct):
        _check_width(op, x.dtype)
        return jnp.zeros(x.shape, x.dtype)
    return array(op, x)


def rows(op: str, x: Any) -> Any:
    """An array with at least one dimension."""
    if not x.ndim:
        raise ArrayError(f"{op}: a scalar has no rows to divide; pass an array with at least one dimension")
    return x


def whole(op: str, what: str, value: Any) -> int:
    """An integer that is known when the program is traced.

    Raises:
        ArgumentError: it is not an integer, or a tracer.
    """
    if isinstance(value, jax.core.Tracer):
        raise ArgumentError(
            f"{op}: {what} is a tracer, but programs are compiled for given ranks and sizes; name the argument in "
            "static_argnames, or close over it"
        )
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentError(f"{op}: {what}={value!r}: expected an integer") from None


def rank(op: str, what: str, value: Any, comm: Communicator) -> int:
    """A rank of a communicator."""
    number = whole(op, what, value)
    if not 0 <= number < comm.size:
        raise ArgumentError(f"{op}: {what} {number}: ranks of this communicator go from 0 to {comm.size - 1}")
    return number


def peer(op: str, what: str, value: Any, comm: Communicator) -> int:
    """A rank of a communicator other than this one."""
    number = rank(op, what, value, comm)
    if number == comm.rank:
        raise ArgumentError(f"{op}: {what} {number} is this rank itself; use the array as it is")
    return number


def channel(op: str, value: Any) -> int:
    """A channel of messages."""
    number = whole(op, "channel", value)
    if not 0 <= number < CHANNELS:
        raise ArgumentError(f"{op}: channel {number}: must be an integer from 0 to {CHANNELS - 1}")
    return number


def counts(op: str, what: str, values: Any, comm: Communicator) -> tuple[int, ...]:
    """Rows per rank."""
    try:
        numbers = tuple(whole(op, what, n) for n in values)
    except TypeError:
        raise ArgumentError(f"{op}: {what}={values!r}: expected integers, one per rank") from None
    if len(numbers) != comm.size or min(numbers) < 0:
        raise ArgumentError(f"{op}: {what} {numbers}: expected {comm.size} numbers of rows")
    return numbers


def divided(op: str, what: str, x: Any, values: Any, comm: Communicator) -> tuple[int, ...]:
    """Rows per rank of an array that contains the rows of all ranks."""
    total = x.shape[0]
    if values is None:
        if total % comm.size:
            raise ArrayError(f"{op}: {total} rows are not a multiple of {comm.size} ranks; pass {what}=")
        return (total // comm.size,) * comm.size
    numbers = counts(op, what, values, comm)
    if sum(numbers) != total:
        raise ArgumentError(f"{op}: {what} {numbers} add up to {sum(numbers)} rows, but the array has {total}")
    return numbers


def owned(op: str, x: Any, values: Any, comm: Communicator) -> tuple[int, ...]:
    """Rows per rank, if an array contains this rank's rows."""
    if values is None:
        return (x.shape[0],) * comm.size
    numbers = counts(op, "counts", values, comm)
    if numbers[comm.rank] != x.shape[0]:
        raise ArgumentError(
            f"{op}: counts {numbers} give rank {comm.rank} {numbers[comm.rank]} rows, but its array has {x.shape[0]}"
        )
    return numbers


def token(op: str, given: Any) -> list[Any]:
    """Operands for a token: an empty list if none is given.

    Raises:
        ArgumentError: it is not the result of `make_token` or an operation.
    """
    if given is None:
        return []
    if not isinstance(given, jax.Array) or given.dtype != TOKEN or given.shape:
        raise ArgumentError(
            f"{op}: token={given!r}: expected the result of make_token() or of an operation with token="
        )
    return [given]


def shared(comm: Communicator, carrier: list[Any]) -> dict[str, Any]:
    """Arguments of the spec of any operation that the user calls; `carrier` is what `token` returned."""
    return {"comm": comm, "call_site": call_site(), "carried": bool(carrier), "ordered": not carrier}


def call_site() -> str:
    """The user's call site of the calling operation; JAX's own frames are skipped."""
    skip_folder(_JAX)
    return ctypes.string_at(find_call_site(1), CALL_SITE_BYTES).rstrip(b"\0").decode(errors="replace")


def _number(op: str, x: Any) -> Any:
    try:
        return jnp.asarray(x)
    except OverflowError:
        raise DTypeError(
            f"{op}: {x} does not fit into the integers that JAX makes of Python's; pass jnp.asarray(x, dtype), for 64 bits "
            "with jax.config.update('jax_enable_x64', True)"
        ) from None


def _check_width(op: str, dtype: Any) -> None:
    kind = np.dtype(dtype)
    if kind.itemsize // (2 if kind.kind == "c" else 1) == 8 and kind.kind in "fiuc" and not jax.config.jax_enable_x64:
        raise DTypeError(
            f"{op}: JAX would make 32 bits of the {kind}, as 64 bits are off; set jax.config.update('jax_enable_x64', "
            "True), or convert the array"
        )
