"""Options of a call, in all forms in which c10d passes them.

Methods of c10d's groups are called with an options object, by C++ and by `torch.distributed`; or with plain arguments, by
programs that use a group object directly.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from xvcomm.errors import ArgumentError
from xvcomm.types.dtype import ReduceOp, Reduction, premul_sum

_OPS = {
    "SUM": ReduceOp.SUM, "AVG": ReduceOp.AVG, "PRODUCT": ReduceOp.PROD, "MIN": ReduceOp.MIN, "MAX": ReduceOp.MAX,
    "BAND": ReduceOp.BAND, "BOR": ReduceOp.BOR, "BXOR": ReduceOp.BXOR,
}  # fmt: skip
_REDUCTIONS = {hash(getattr(dist.ReduceOp, name)): Reduction(op) for name, op in _OPS.items()}
_UNSET = timedelta(milliseconds=-1)
_PREMUL_SUM = hash(dist.ReduceOp.PREMUL_SUM)
SUM = Reduction(ReduceOp.SUM)
# The options objects, and whether they contain a reduction and a root.
_PARTS = {
    kind: (hasattr(kind, "reduceOp"), hasattr(kind, "rootRank"))
    for kind in vars(c10d).values() if isinstance(kind, type) and hasattr(kind, "asyncOp")
}  # fmt: skip


class Options(msgspec.Struct, frozen=True):
    """Options of one call.

    Attributes:
        root: rank in the group.
        timeout: in seconds; None for the group's default.
        waits: whether the caller waits for the result before anything else, so that no Work is needed.
    """

    op: Reduction = SUM
    root: int = 0
    timeout: float | None = None
    waits: bool = False


def read(given: Any, timeout: Any = None, *, root: int | None = None) -> Options:
    """Read options from an object of c10d, or from `op` (or None) and `timeout`."""
    parts = _PARTS.get(type(given))
    if parts is None:
        return Options(SUM if given is None else reduction(given), root or 0, seconds(timeout))
    reduces, rooted = parts
    limit = given.timeout
    return Options(
        reduction(given.reduceOp) if reduces else SUM, given.rootRank if rooted else 0,
        None if limit == _UNSET else seconds(limit), not given.asyncOp,
    )  # fmt: skip


def seconds(timeout: Any) -> float | None:
    """A duration of torch in seconds; None if it means the group's default."""
    if timeout is None or timeout == _UNSET:
        return None
    left = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return left if left > 0 else None


def reduction(op: Any) -> Reduction:
    """Convert an element of `torch.distributed.ReduceOp` to a Reduction."""
    try:
        code = hash(op)  # its number; other ways to read it take five times as long
    except TypeError:
        raise ArgumentError(f"op={op!r}: pass one of torch.distributed.ReduceOp") from None
    found = _REDUCTIONS.get(code)
    if found is not None:
        return found
    if code == _PREMUL_SUM:
        return premul_sum(float(op.__getstate__()[1]))
    raise ArgumentError(f"op={op!r}: xvcomm has SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR and PREMUL_SUM")
