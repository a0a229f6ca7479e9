"""Everything that depends on torch's release. Written for 2.9 to 2.13, which give Python groups little information.

* The function that creates a group does not get the GPU that the user bound it to, and one that replaces Gloo not even its
  ranks.
* A group is not told whether the caller of a message waits for it at once.
* Some methods of a Python group are not reachable from C++: see `dispatch`.
"""

from __future__ import annotations

import inspect
import sys
from typing import NamedTuple

import torch
import torch.distributed as dist

_MAKER = "_new_process_group_helper"


class Making(NamedTuple):
    """The group that torch has been asked to create.

    Attributes:
        ranks: the group's ranks in the default group; empty for the default group itself.
        device: the GPU that the user bound the default group to.
    """

    ranks: list[int]
    name: str
    device: torch.device | None


def making() -> Making:
    """The group that the calling thread is creating, from the arguments of c10d's own function on the stack.

    Without such a call: a group of its own.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != _MAKER:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return Making([], "alone", None)
    arguments = frame.f_locals
    ranks = list(arguments.get("global_ranks_in_group") or [])
    return Making(ranks, str(arguments.get("group_name", "")), arguments.get("device_id"))


_BLOCKING = {inspect.unwrap(function).__code__ for function in (dist.send, dist.recv)}
_BETWEEN = 4  # frames of torch and of this adapter between those functions and `waits`


def waits(further: int = 0) -> bool:
    """Whether a message is sent or received by `dist.send` or `dist.recv`, which block until it is complete.

    Args:
        further: frames of this adapter between the caller and the entry point in `messages`.
    """
    frame = sys._getframe(2 + further)
    for _ in range(_BETWEEN):
        if frame.f_code in _BLOCKING:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def awaited(x: torch.Tensor) -> torch.Tensor | None:
    """Result of a functional collective, after waiting for it; None if `x` is not one."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else None


def untraced(*classes: type) -> None:
    """Exclude the classes' methods and their callees from `torch.compile`: C++ calls them while frames are compiled."""
    from torch._C._dynamo import eval_frame

    if not hasattr(eval_frame, "_FrameExecStrategy"):
        return
    skip = eval_frame._FrameAction.SKIP
    for function in (f for kind in classes for f in vars(kind).values() if inspect.isfunction(f)):
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
