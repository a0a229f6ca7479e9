"""The stack of a process's main thread, read from the text that `faulthandler` writes."""

from __future__ import annotations

import re
from typing import NamedTuple

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_OWN = re.compile(
    r"/xvcomm/(abc|adapters|backends|comm|engine|jit|memory|pipeline|rendezvous|schedule|system|trace|types|wire)/"
)
_LIBRARIES = ("/lib/python", "/site-packages/", "/dist-packages/", "<")
_WAITING = frozenset({"acquire", "block_until_ready", "join", "result", "synchronize", "wait", "wait_for"})
"""Functions of frameworks and of the standard library in which a thread waits for something else."""


class Frame(NamedTuple):
    """One call."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(self.file.split('/')[-2:])}:{self.line})"


class Stack(NamedTuple):
    """One thread's calls, the newest first."""

    frames: tuple[Frame, ...]

    @property
    def inside(self) -> bool:
        """Whether the thread is in a call of xvcomm: libraries below it do not count, and what runs the program neither."""
        nearest = next(
            (f for f in self.frames if _OWN.search(f.file) or not any(p in f.file for p in _LIBRARIES)), None
        )
        return nearest is not None and _OWN.search(nearest.file) is not None

    @property
    def waits(self) -> bool:
        """Whether the thread is in xvcomm, or waits for something else."""
        return self.inside or any(frame.function in _WAITING for frame in self.frames[:3])


def parse(text: str) -> Stack | None:
    """The calls of a thread; None if there are none in the text."""
    frames = [Frame(**found.groupdict()) for line in text.splitlines() if (found := _FRAME.fullmatch(line))]
    return Stack(tuple(frames)) if frames else None


def busy(text: str) -> bool:
    """Whether the program does something of its own: its main thread is not in xvcomm, and does not wait."""
    found = parse(text)
    return found is not None and not found.waits
