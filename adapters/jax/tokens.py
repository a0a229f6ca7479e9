"""Explicit tokens: data that order operations, for who wants the fast path or has a JAX without ordered effects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xvcomm.adapters.jax.arguments import TOKEN


def make_token() -> jax.Array:
    """A first token.

    Pass it as `token=` to an operation, that operation's token to the next one, and return the last from the jitted
    function: an operation whose token and result this rank does not use may be left out. One chain of tokens orders
    all operations, also those of different communicators. It is a float32 scalar that is zero, so that derivatives can
    be taken along it: the operations of the backward pass are ordered by the tokens' cotangents.
    """
    return jnp.zeros((), TOKEN)


def given_back(results: Sequence[Any], token: Any) -> Any:
    """What a function returns: the array alone, or with the token if the user passed one."""
    return results[0] if token is None else (results[0], results[-1])
