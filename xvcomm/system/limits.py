"""Turns "too many open files" into errors that name the limit and say how to raise it."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator

from xvcomm.errors import ResourceError, XvcommError


def reached(error: OSError, doing: str) -> ResourceError | None:
    """The ResourceError to raise if `error` means too many open files; otherwise None.

    Args:
        doing: what failed, as words that follow "cannot".
    """
    if isinstance(error, XvcommError):
        return None
    if error.errno == errno.EMFILE:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        remedy = f"this process may have {files}: raise the limit (`ulimit -n 65536`, docker run --ulimit nofile=65536)"
    elif error.errno == errno.ENFILE:
        remedy = "the system has no more: raise its limit (`sysctl -w fs.file-max=...`)"
    else:
        return None
    return ResourceError(
        f"cannot {doing}: too many open files; {remedy}, or close files that the program has left open"
    )


def named(error: BaseException, doing: str) -> BaseException:
    """Return the error of `reached`, or `error` itself if there is none."""
    refusal = reached(error, doing) if isinstance(error, OSError) else None
    if refusal is None:
        return error
    refusal.__cause__ = error
    return refusal


@contextlib.contextmanager
def told(doing: str) -> Iterator[None]:
    """Raise ResourceError if the block runs out of file descriptors."""
    try:
        yield
    except OSError as error:
        found = named(error, doing)
        if found is error:
            raise
        raise found from error
