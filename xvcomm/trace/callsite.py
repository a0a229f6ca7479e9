"""Call sites: where in the user's program an operation was called, as text at an address that compiled code copies from."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

from xvcomm.trace.format import CALL_SITE_BYTES

_HERE = str(Path(__file__).parents[1])
_inner: tuple[str, ...] = (_HERE,)
_CACHED = 4096
_internal: dict[str, bool] = {}
_depths: dict[tuple[int, int], int] = {}
_callers: dict[int, int] = {}
# Text of call sites, each at an address of its own that stays valid: compiled code copies from it.
_texts = (ctypes.c_char * CALL_SITE_BYTES * _CACHED)()
_numbers = itertools.count()  # one step, so that threads need no lock
# By the code object's address and the place in it, which are quicker to ask for than file and line. The code object is
# kept, so that no other one gets the address.
_call_sites: dict[tuple[int, int], tuple[int, CodeType]] = {}


def skip_folder(folder: str) -> None:
    """Let files of a folder count as xvcomm's in `find_call_site`: a framework's, whose callers are the users."""
    global _inner
    if folder not in _inner:
        _inner = (*_inner, folder)
        _internal.clear()
        _call_sites.clear()
        _depths.clear()


def called_at(call_site: int, call: Callable[[], Any]) -> Any:
    """Run a call that another thread has asked for: until it is over, `find_call_site` gives this thread the other one's.

    Args:
        call_site: from the other thread's `find_call_site`; 0 if it is unknown.
    """
    thread = get_ident()
    before = _callers.get(thread, 0)
    _callers[thread] = call_site
    try:
        return call()
    finally:
        if before:
            _callers[thread] = before
        else:
            del _callers[thread]


def find_call_site(inside: int) -> int:
    """Address of `file.py:line`, at most 48 bytes, of the nearest caller outside xvcomm.

    Where C++ called xvcomm, in a thread without a line of Python's, it is the function that was called.

    Args:
        inside: callers of this function, counted from the nearest, that lie in xvcomm for certain; looking at each
            would take time.
    """
    if _callers:
        call_site = _callers.get(get_ident(), 0)
        if call_site:
            return call_site
    frame = sys._getframe(inside + 1)
    key = id(frame.f_code), frame.f_lasti
    found = _call_sites.get(key)
    if found is not None:
        return found[0]
    depth = _depths.get(key, 0)
    if depth:
        # Behind one place in xvcomm the user is nearly always as many callers away as the last time.
        try:
            outer = sys._getframe(inside + 1 + depth)
        except ValueError:
            return _outer_call_site(frame, key)
        found = _call_sites.get((id(outer.f_code), outer.f_lasti))
        if found is not None:
            return found[0]
    return _outer_call_site(frame, key)


def make_call_site(text: str) -> ctypes.Array[ctypes.c_char]:
    """A call site that its owner keeps: use its address, as `find_call_site` gives one, as long as the array lives."""
    return ctypes.create_string_buffer(text.encode()[-CALL_SITE_BYTES:], CALL_SITE_BYTES)


def _outer_call_site(frame: FrameType, key: tuple[int, int]) -> int:
    """The same, looking at each caller from a frame on; remembers under `key` how far it was."""
    depth = 0
    while True:
        file = frame.f_code.co_filename
        internal = _internal.get(file)
        if internal is None:
            internal = _internal[file] = file.startswith(_inner)
        if not internal or frame.f_back is None:
            break
        frame = frame.f_back
        depth += 1
    if len(_depths) >= _CACHED:
        _depths.clear()
    _depths[key] = depth
    found = _call_sites.get((id(frame.f_code), frame.f_lasti))
    return found[0] if found is not None else _add_call_site(frame)


def _add_call_site(frame: FrameType) -> int:
    if len(_call_sites) >= _CACHED:
        _call_sites.clear()
    text = _texts[next(_numbers) % _CACHED]
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    if _internal.get(frame.f_code.co_filename):
        place = f"{frame.f_code.co_name}(), called by C++"
    text.raw = place.encode()[-CALL_SITE_BYTES:].ljust(CALL_SITE_BYTES, b"\0")
    address = ctypes.addressof(text)
    _call_sites[id(frame.f_code), frame.f_lasti] = address, frame.f_code
    return address
