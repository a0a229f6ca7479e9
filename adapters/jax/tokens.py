"""Explicit tokens, which order operations by data: the fast path, and for releases of JAX without ordered effects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xvcomm.adapters.jax.arguments import TOKEN


def make_token() -> jax.Array:
    """Create a first token.

    Pass it as `token=` to an operation, that operation's token to the next one, and return the last from the jitted function:
    JAX eliminates an operation whose token and result are unused. One chain of tokens orders all operations, also those of
    different communicators. It is a float32 scalar that is zero, so that it can be differentiated: the operations of the
    backward pass are ordered by the tokens' cotangents.
    """
    return jnp.zeros((), TOKEN)


def given_back(results: Sequence[Any], token: Any) -> Any:
    """Return value of a function: the array alone, or with the token if the user passed one."""
    return results[0] if token is None else (results[0], results[-1])
