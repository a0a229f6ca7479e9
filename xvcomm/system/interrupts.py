"""Ctrl-C: where it waits, and what it prints: the program's lines and the operation that it was in, without what is below."""

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
    """Let Ctrl-C wait until the block is over, for libraries that an interrupt leaves broken."""
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
    """Print an interrupt that ends this process without xvcomm's internals. Other errors stay as they are. Idempotent."""
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
    """Keep of an error's traceback the callers of xvcomm, the function that they called, and what xvcomm called of theirs.

    An error that was being handled inside xvcomm is not shown either.
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
    """Whether it is of Python itself or of an installed package; what Cython compiled names its source, wherever that was."""
    file = entry.tb_frame.f_code.co_filename
    return file.startswith((*_LIBRARIES, "<")) or file.endswith(".pyx")
