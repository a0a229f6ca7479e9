"""What xvcomm raises, made fit for users of `torch.distributed`, who catch `RuntimeError` and `DistBackendError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch.distributed as dist

from xvcomm.errors import XvcommError


@cache
def _both(kind: Any) -> Any:
    both = type(kind.__name__, (kind, dist.DistBackendError), {"__module__": __name__, "__doc__": kind.__doc__})
    globals()[kind.__name__] = both  # pickle finds classes by name
    return both


def as_torch(error: BaseException) -> BaseException:
    """The same error as a `torch.distributed.DistBackendError` too, if it is one of xvcomm's."""
    if not isinstance(error, XvcommError) or isinstance(error, dist.DistBackendError):
        return error
    kind: Any = type(error)
    both: type[XvcommError] = _both(kind)
    text = str(error)
    if isinstance(error, TimeoutError) and "Timed out" not in text:
        text = f"{error.op or 'operation'}: Timed out waiting; {text}"  # programs look for Gloo's words
    return both(text, rank=error.rank, peer=error.peer, op=error.op, seq=error.seq)


@contextmanager
def mapped() -> Iterator[None]:
    """Raise xvcomm's errors of the block as `as_torch` gives them."""
    try:
        yield
    except XvcommError as error:
        raise as_torch(error) from error.__cause__
