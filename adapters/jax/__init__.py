"""JAX: xvcomm's operations as functions on `jax.Array`, eager and compiled.

    from xvcomm.adapters import jax as xvjax

    comm = xvjax.init()
    step = jax.jit(lambda x: xvjax.all_reduce(x * 2))

Operations keep the order in which they are called, within and across programs, without tokens. They support `jax.grad`, `vmap`,
`scan`, `cond`, `while_loop`, `checkpoint` and `shard_map`. See docs/jax.md.
"""

from __future__ import annotations

from xvcomm.adapters.jax import versions  # noqa: F401  # first of all: it refuses a JAX that is too old
from xvcomm.adapters.jax.blocks import all_gather, reduce_scatter
from xvcomm.adapters.jax.communicators import init, use
from xvcomm.adapters.jax.failures import cause, named_errors
from xvcomm.adapters.jax.messages import recv, send, sendrecv
from xvcomm.adapters.jax.moves import all_to_all, barrier, broadcast, gather, scatter
from xvcomm.adapters.jax.reductions import all_reduce, reduce, scan
from xvcomm.adapters.jax.status import ANY_SOURCE, ANY_TAG, Status
from xvcomm.adapters.jax.tokens import make_token

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "Status",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "cause",
    "gather",
    "init",
    "make_token",
    "named_errors",
    "recv",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "send",
    "sendrecv",
    "use",
]
