"""Loads the functions of every reduction when it is imported, for ranks that use most of them."""

from __future__ import annotations

from xvcomm.backends.host import reducers
from xvcomm.testing.cases import reductions
from xvcomm.types.dtype import DTYPES, ReduceOp

for _dtype in DTYPES:
    for _op in set(reductions(_dtype)) - {ReduceOp.AVG, ReduceOp.PREMUL_SUM}:
        reducers.kit(_dtype, _op)
    if _dtype.kind != "b":
        reducers.finisher(_dtype)
