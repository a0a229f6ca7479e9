"""What a user should know though nothing failed: warnings of the logger `xvcomm`, by one process of a host."""

from __future__ import annotations

import fcntl
import logging
from functools import cache

PLACE = __file__
"""A file that every process can read, whose lock says which one speaks."""

_logger = logging.getLogger("xvcomm")


def notice(text: str) -> None:
    """Log a warning, which goes to stderr where the program has not said otherwise; of several ranks here one does."""
    if _logger.isEnabledFor(logging.WARNING) and speaks():
        _logger.warning("xvcomm: %s", text)


@cache
def speaks() -> bool:
    """Whether no other process of this host does; the first one does to its end.

    This module's own file has the lock: it is there also where nothing can be written.
    """
    try:
        file = open(PLACE, "rb")  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return False
    except OSError:  # a file system that has no locks
        return True
    _held.append(file)
    return True


_held: list[object] = []
