"""What the system refuses because a limit is reached, as errors that say which one and how to raise it."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator

from xvcomm.errors import ResourceError, XvcommError


def reached(error: OSError, doing: str) -> ResourceError | None:
    """The error for the user, if a call failed because no more files may be open; else None.

    Args:
        doing: what failed, in words that follow "cannot".
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
    """The error itself, or instead of it what `reached` gives."""
    refusal = reached(error, doing) if isinstance(error, OSError) else None
    if refusal is None:
        return error
    refusal.__cause__ = error
    return refusal


@contextlib.contextmanager
def told(doing: str) -> Iterator[None]:
    """Raise ResourceError where the block runs out of file descriptors."""
    try:
        yield
    except OSError as error:
        found = named(error, doing)
        if found is error:
            raise
        raise found from error
