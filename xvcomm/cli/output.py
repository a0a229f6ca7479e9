"""Merges the output of the ranks into one stream of whole lines, each prefixed with its rank."""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Mapping, Sequence

_PALETTE = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_ANSI = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")
_LONGEST = 1 << 16
_AT_ONCE = 4096
_SETTLED = 0.05
TAIL_LINES = 30


class LineAssembler:
    """Splits one rank's byte stream into lines, as a terminal would show them.

    A carriage return restarts the line, so only the last state of a progress bar counts. Text without a newline is kept until
    it gets one or the stream ends; a line of more than 64 KiB is split.
    """

    def __init__(self) -> None:
        self._open = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, without line ends."""
        *whole, rest = (self._open + data).split(b"\n")
        lines = [_last_state(line) for line in whole]
        keep = rest.rfind(b"\r", 0, len(rest) - 1)
        rest = rest[keep + 1 :]
        while len(rest) > _LONGEST:
            lines.append(rest[:_LONGEST])
            rest = rest[_LONGEST:]
        self._open = rest
        return lines

    def finish(self) -> list[bytes]:
        """The text left when the stream ends: at most one line."""
        line, self._open = _last_state(self._open), b""
        return [line] if line else []

    @property
    def unfinished(self) -> bytes:
        """The incomplete line, as a terminal would show it."""
        return _last_state(self._open)


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Outlet:
    """Buffered, nonblocking output to a file descriptor whose reader may be slow.

    Attributes:
        terminal: whether it is a terminal that supports control sequences.
        colour: whether output may be coloured.
        redraw_at: when `redraw` is due, on the monotonic clock; `math.inf` for never.
    """

    def __init__(self, fd: int, env: Mapping[str, str]) -> None:
        self.fd = fd
        self.terminal = os.isatty(fd) and env.get("TERM", "") != "dumb"
        self.colour = self.terminal and not env.get("NO_COLOR")
        self._waiting = bytearray()
        self._below = b""
        self._owner: object = None
        self._shown = False
        self.redraw_at = math.inf

    @property
    def backlog(self) -> int:
        """Bytes not yet written."""
        return len(self._waiting)

    def add(self, owner: object, lines: bytes, unfinished: bytes) -> None:
        """Append whole lines; on a terminal `unfinished` is shown below them until `owner` or another owner replaces it."""
        if not self.terminal:
            self._waiting += lines
            return
        if lines:
            self._erase()
            self._waiting += lines
        if unfinished:
            self._owner, self._below = owner, unfinished
        elif owner is self._owner:
            self._below = b""
        # Delayed, because most unfinished lines are complete a moment later.
        self.redraw_at = min(self.redraw_at, time.monotonic() + _SETTLED)

    def redraw(self) -> None:
        """Show the unfinished line in its current state."""
        self.redraw_at = math.inf
        self._erase()
        self._waiting += _fit(self._below, shutil.get_terminal_size().columns - 1)
        self._shown = bool(self._below)

    def _erase(self) -> None:
        if self._shown:
            self._waiting += b"\r\x1b[K"
            self._shown = False

    def restore(self) -> None:
        """Make a terminal's cursor visible again, which a killed rank may have hidden."""
        if self.terminal:
            self._waiting += b"\x1b[?25h"

    def discard(self) -> None:
        """Discard the buffered output, because its reader is gone."""
        self._waiting.clear()

    def write_some(self) -> None:
        """Write as much as one call takes without blocking; the descriptor must be ready.

        Raises:
            BrokenPipeError: the reader is gone.
        """
        written = os.write(self.fd, self._waiting[:_AT_ONCE])
        del self._waiting[:written]


def _fit(text: bytes, columns: int) -> bytes:
    plain = _ANSI.sub(b"", text).decode(errors="replace")
    return text if len(plain) <= columns else plain[:columns].encode()


def outlets(env: Mapping[str, str]) -> tuple[Outlet, Outlet]:
    """The launcher's stdout and stderr; one object if both refer to the same file, which preserves the order of lines."""
    out, err = os.fstat(1), os.fstat(2)
    first = Outlet(1, env)
    same = (out.st_dev, out.st_ino, out.st_rdev) == (err.st_dev, err.st_ino, err.st_rdev)
    return first, first if same else Outlet(2, env)


class RankStream:
    """Stdout or stderr of one rank, on its way to an outlet.

    Attributes:
        outlet: destination of its lines.
        last: the last lines, without prefix.
    """

    def __init__(self, outlet: Outlet, prefix: bytes) -> None:
        self.outlet = outlet
        self.last: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._prefix = prefix
        self._assembler = LineAssembler()

    def feed(self, data: bytes) -> None:
        """Process output of the rank; empty data means the end of the stream."""
        lines = self._assembler.feed(data) if data else self._assembler.finish()
        self.last.extend(lines)
        unfinished = self._assembler.unfinished
        whole = b"".join(self._prefix + line + b"\n" for line in lines)
        if whole or self.outlet.terminal:
            self.outlet.add(self, whole, self._prefix + unfinished if unfinished else b"")


def prefixes(labels: Sequence[str], colour: bool, first: int = 0) -> list[bytes]:
    """Line prefix of each rank from `first` on, `[2 rocm] `, aligned, and coloured by rank if `colour`."""
    names = [f"[{rank} {label}]" if label else f"[{rank}]" for rank, label in enumerate(labels, first)]
    width = max(len(name) for name in names)
    padded = [name.ljust(width) for name in names]
    if colour:
        padded = [f"\x1b[{_PALETTE[r % len(_PALETTE)]}m{name}\x1b[0m" for r, name in enumerate(padded)]
    return [f"{name} ".encode() for name in padded]
