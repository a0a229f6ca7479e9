"""All that depends on torch's release. Written for 2.9 to 2.13, whose groups in Python are told little.

* A group's creator is not told which GPU the user bound it to, and one that stands in for Gloo not even its ranks.
* A group is not told whether the caller of a message waits for it at once.
* Some methods of a group in Python are not reached from C++: see `dispatch`.
"""

from __future__ import annotations

import inspect
import sys
from typing import NamedTuple

import torch
import torch.distributed as dist

_MAKER = "_new_process_group_helper"


class Making(NamedTuple):
    """What torch has been asked to make.

    Attributes:
        ranks: the group's ranks in the default group; empty for the default group itself.
        name: the group's.
        device: the GPU that the user bound the default group to.
    """

    ranks: list[int]
    name: str
    device: torch.device | None


def making() -> Making:
    """The group that the calling thread is in the middle of making, from the arguments of c10d's own function.

    Outside of it: a group that stands alone.
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
_BETWEEN = 4  # functions of torch, and of ours, between those and the question


def waits(further: int = 0) -> bool:
    """Whether a message is sent or received for `dist.send` or `dist.recv`, which do nothing else until it is through.

    Args:
        further: functions of ours between the caller and the entry of `messages`.
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
    """What a functional collective gives, once that is over; None if `x` does not stand for a result."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else None


def untraced(*classes: type) -> None:
    """Keep `torch.compile` out of the classes' methods and of what they call: C++ calls them while frames are compiled."""
    from torch._C._dynamo import eval_frame

    if not hasattr(eval_frame, "_FrameExecStrategy"):
        return
    skip = eval_frame._FrameAction.SKIP
    for function in (f for kind in classes for f in vars(kind).values() if inspect.isfunction(f)):
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
