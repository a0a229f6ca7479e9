"""Events of torch's profiler: one per operation, named like Gloo's and NCCL's, `xvcomm:all_reduce`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

profiling: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether a profiler is recording."""

_NOBODY: AbstractContextManager[Any] = nullcontext()


def recorded(backend: str, what: str, tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """A context manager that records an event if a profiler is recording."""
    if not profiling():
        return _NOBODY
    event: AbstractContextManager[Any] = torch.profiler.record_function(f"{backend}:{what}")
    return event
