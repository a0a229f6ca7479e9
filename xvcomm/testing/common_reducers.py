"""Loads the functions of the most common reductions when it is imported, so that ranks forked afterwards have them."""

from __future__ import annotations

from xvcomm.backends.host.reducers import kit
from xvcomm.types.dtype import BY_NAME, ReduceOp

for _name in ("float32", "float64", "int32", "int64"):
    kit(BY_NAME[_name], ReduceOp.SUM)
