"""Events of torch's profiler: one per operation, named like Gloo's and NCCL's, `xvcomm:all_reduce`.

With `record_shapes=True` they also have the shapes and types of the tensors, and their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast

profiling: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether a profiler is recording."""

_NOBODY: AbstractContextManager[Any] = nullcontext()


def recorded(backend: str, what: str, tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """A context manager that records an event if a profiler is recording."""
    if not profiling():
        return _NOBODY
    nbytes = sum(x.numel() * x.element_size() for x in tensors)
    # not torch.profiler.record_function, which has no place for tensors and takes ten times as long
    event: AbstractContextManager[Any] = _RecordFunctionFast(f"{backend}:{what}", list(tensors), {"bytes": nbytes})
    return event
