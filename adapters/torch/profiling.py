"""Events of torch's profiler: one an operation, named as Gloo's and NCCL's are, `xvcomm:all_reduce`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

profiling: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether somebody records."""

_NOBODY: AbstractContextManager[Any] = nullcontext()


def recorded(backend: str, what: str, tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """A block that shows as an event, if somebody records."""
    if not profiling():
        return _NOBODY
    event: AbstractContextManager[Any] = torch.profiler.record_function(f"{backend}:{what}")
    return event
