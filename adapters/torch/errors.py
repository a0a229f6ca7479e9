"""Converts xvcomm's errors for users of `torch.distributed`, who catch `RuntimeError` and `DistBackendError`."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.distributed as dist

from xvcomm import errors
from xvcomm.errors import XvcommError


@cache
def _both(kind: Any) -> Any:
    return type(kind.__name__, (kind, dist.DistBackendError), {"__module__": __name__, "__doc__": kind.__doc__})


def __getattr__(name: str) -> Any:
    """Create these classes by name, so that they can be unpickled in a process that has not raised them."""
    kind: Any = getattr(errors, name, None)
    ours = isinstance(kind, type) and issubclass(kind, XvcommError)
    if ours:
        return _both(kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def as_torch(error: BaseException) -> BaseException:
    """Convert an error of xvcomm to one that is also a `DistBackendError`; other errors are returned unchanged."""
    if not isinstance(error, XvcommError) or isinstance(error, dist.DistBackendError):
        return error
    kind: Any = type(error)
    both: type[XvcommError] = _both(kind)
    text = str(error)
    if isinstance(error, TimeoutError) and "Timed out" not in text:
        text = f"{error.op or 'operation'}: Timed out waiting; {text}"  # programs search for this text of Gloo's
    return both(text, rank=error.rank, peer=error.peer, op=error.op, seq=error.seq)


class _Mapped:
    """A class, because entering and leaving a generator-based context manager takes four times as long."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, XvcommError):
            raise as_torch(error) from error.__cause__


_mapped = _Mapped()


def mapped() -> _Mapped:
    """A context manager that converts xvcomm's errors with `as_torch`."""
    return _mapped
