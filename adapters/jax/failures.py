"""Errors of handlers: XLA passes on a text, and the error itself is kept here."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import re
from collections import OrderedDict
from collections.abc import Iterator

from xvcomm.adapters.jax.ffi import ErrorCode
from xvcomm.errors import (
    Aborted,
    ArgumentError,
    ArrayError,
    ClosedError,
    DeadlineExceeded,
    DTypeError,
    MismatchError,
    PeerLost,
)

_CODES: tuple[tuple[type[BaseException], ErrorCode], ...] = (
    (DeadlineExceeded, ErrorCode.DEADLINE_EXCEEDED),
    (PeerLost, ErrorCode.UNAVAILABLE),
    (Aborted, ErrorCode.ABORTED),
    (ClosedError, ErrorCode.FAILED_PRECONDITION),
    (MismatchError, ErrorCode.INVALID_ARGUMENT),
    (ArgumentError, ErrorCode.INVALID_ARGUMENT),
    (ArrayError, ErrorCode.INVALID_ARGUMENT),
    (DTypeError, ErrorCode.INVALID_ARGUMENT),
    (KeyboardInterrupt, ErrorCode.CANCELLED),
)
_KEPT = 64
_kept: OrderedDict[int, BaseException] = OrderedDict()
_numbers = itertools.count(1)
_MARK = re.compile(r"\[xvcomm error (\d+)\]")


def explain(error: BaseException) -> tuple[ErrorCode, str]:
    """XLA's error code and text for an error of a handler, which is kept for `cause`."""
    if isinstance(error, KeyboardInterrupt):
        _thread.interrupt_main()  # XLA raises another error; the user must still get the interrupt
    number = next(_numbers)
    error.__traceback__ = None  # the traceback would keep the handler's memory alive
    _kept[number] = error
    while len(_kept) > _KEPT:
        _kept.popitem(last=False)
    code = next((code for kind, code in _CODES if isinstance(error, kind)), ErrorCode.INTERNAL)
    return code, f"{type(error).__name__}: {error} [xvcomm error {number}]"


def cause(error: BaseException) -> BaseException | None:
    """The xvcomm error behind one that JAX raised for a compiled program; None if there is none, or it is too old."""
    found = _MARK.search(str(error))
    return _kept.get(int(found[1])) if found else None


@contextlib.contextmanager
def named_errors() -> Iterator[None]:
    """Raise xvcomm's own errors instead of a `jax.errors.JaxRuntimeError` or ValueError.

        with xvjax.named_errors():
            step(params, batch)[0].block_until_ready()

    Applies to errors raised within the block: wait for results inside.
    """
    try:
        yield
    except Exception as error:
        known = cause(error)
        if known is None:
            raise
        raise known from error
