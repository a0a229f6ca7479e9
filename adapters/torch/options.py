"""What a call asks for, read from any form that c10d passes it in.

A method of c10d's groups is called with an options object, by C++ and by `torch.distributed`; or with plain arguments,
by whoever uses a group object directly.
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
# Which options objects there are, and whether they hold a reduction and a root.
_PARTS = {
    kind: (hasattr(kind, "reduceOp"), hasattr(kind, "rootRank"))
    for kind in vars(c10d).values() if isinstance(kind, type) and hasattr(kind, "asyncOp")
}  # fmt: skip


class Options(msgspec.Struct, frozen=True):
    """One call's options.

    Attributes:
        op: how to reduce.
        root: rank in the group.
        timeout: seconds; None for the group's own.
        waits: whether the caller waits for the result before anything else, so that no Work need be made.
    """

    op: Reduction = SUM
    root: int = 0
    timeout: float | None = None
    waits: bool = False


def read(given: Any, timeout: Any = None, *, root: int | None = None) -> Options:
    """Options from an object of c10d, or from `op` (or nothing) and `timeout`."""
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
    """A duration of torch in seconds; None where it says to take the group's own."""
    if timeout is None or timeout == _UNSET:
        return None
    left = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return left if left > 0 else None


def reduction(op: Any) -> Reduction:
    """xvcomm's reduction for one of `torch.distributed.ReduceOp`."""
    try:
        code = hash(op)  # its number, which takes five times as long to read in other ways
    except TypeError:
        raise ArgumentError(f"op={op!r}: pass one of torch.distributed.ReduceOp") from None
    found = _REDUCTIONS.get(code)
    if found is not None:
        return found
    if code == _PREMUL_SUM:
        return premul_sum(float(op.__getstate__()[1]))
    raise ArgumentError(f"op={op!r}: xvcomm has SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR and PREMUL_SUM")
