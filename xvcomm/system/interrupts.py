"""Signals: delays their handlers during calls that these would break, and keeps xvcomm's internals out of Ctrl-C's traceback."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

_HERE = str(Path(__file__).parents[1]) + "/"
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_sigaction = ctypes.CDLL(None).sigaction
_ACTION_BYTES = 256  # more than any `struct sigaction`
_SIGNALS: list[int] = sorted(signal.valid_signals())
Handler = Callable[[int, FrameType | None], object]
_installed = False


@contextmanager
def held_back() -> Iterator[None]:
    """Delay Python's signal handlers, such as that of Ctrl-C, until the block ends. Main thread only.

    For library calls that an exception of a handler leaves in a broken state.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Handler] = {
        number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))
    }
    arrived: dict[int, FrameType | None] = {}
    try:
        for number in handlers:
            _replace(number, arrived.setdefault)
        yield
    finally:
        with contextlib.ExitStack() as last:  # makes each call, also after one that raises
            last.callback(_deliver, handlers, arrived)
            for number, handler in handlers.items():
                last.callback(_replace, number, handler)


def _replace(number: int, handler: Handler) -> None:
    """Replace a signal's handler in Python, and nothing else: not its flags, nor a handler in C that calls Python's next."""
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    known = _sigaction(number, None, action) == 0
    signal.signal(number, handler)
    if known:
        _sigaction(number, action, None)


def _deliver(handlers: Mapping[int, Handler], arrived: Mapping[int, FrameType | None]) -> None:
    with contextlib.ExitStack() as calls:
        for number, frame in arrived.items():
            calls.callback(handlers[number], number, frame)


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
