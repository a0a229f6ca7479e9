"""Warnings of the logger `xvcomm`, which only one process of a host prints."""

from __future__ import annotations

import fcntl
import logging
from functools import cache

PLACE = __file__
"""A file that every process can read; the process that holds its lock prints the warnings."""

_logger = logging.getLogger("xvcomm")


def notice(text: str) -> None:
    """Log a warning, if this is the process of the host that prints them."""
    if _logger.isEnabledFor(logging.WARNING) and speaks():
        _logger.warning("xvcomm: %s", text)


@cache
def speaks() -> bool:
    """Whether this process prints the host's warnings: the first one that asks, as long as it lives.

    The lock is on this module's file, because that exists even where nothing can be written.
    """
    try:
        file = open(PLACE, "rb")  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return False
    except OSError:  # the file system does not support locks
        return True
    _held.append(file)
    return True


_held: list[object] = []
