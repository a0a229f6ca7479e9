"""SIGINT (Ctrl-C): delays it during calls that it would break, and keeps xvcomm's internals out of its traceback."""

from __future__ import annotations

import signal
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

_HERE = str(Path(__file__).parents[1]) + "/"
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_installed = False


@contextmanager
def held_back() -> Iterator[None]:
    """Delay SIGINT until the block ends, for library calls that an interrupt leaves in a broken state. Main thread only."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(*arrived[0])


def print_shortly() -> None:
    """Install an excepthook that leaves xvcomm's internal frames out of KeyboardInterrupt tracebacks. Idempotent."""
    global _installed
    if not _installed:
        _installed = True
        sys.excepthook = _hook(sys.excepthook)


def _hook(previous: Hook) -> Hook:
    def print_interrupt(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            shorten(error)
            trace = error.__traceback__
        previous(kind, error, trace)

    return print_interrupt


def shorten(error: BaseException) -> None:
    """Remove xvcomm's internal frames from the traceback of `error`.

    It keeps the caller's frames, the xvcomm function that they called, and the user's functions that xvcomm called. An error
    that was being handled inside xvcomm is suppressed.
    """
    kept: list[TracebackType] = []
    inside, entry = False, error.__traceback__
    while entry is not None:
        if _is_own(entry):
            if not inside:
                kept.append(entry)
            inside = True
        elif not inside or not _is_library(entry):
            kept.append(entry)
            inside = False
        entry = entry.tb_next
    shown: TracebackType | None = None
    for one in reversed(kept):
        shown = TracebackType(shown, one.tb_frame, one.tb_lasti, one.tb_lineno)
    error.__traceback__ = shown
    handled = error.__context__.__traceback__ if error.__context__ else None
    if handled is not None and (_is_own(handled) or _is_library(handled)):
        error.__suppress_context__ = True


def _is_own(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_HERE)


def _is_library(entry: TracebackType) -> bool:
    """Whether the frame is in Python itself or an installed package. Cython code has the path of its source at build time."""
    file = entry.tb_frame.f_code.co_filename
    return file.startswith((*_LIBRARIES, "<")) or file.endswith(".pyx")
