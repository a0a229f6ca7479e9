"""State of other processes on this host, from /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

_DIGITS = 10  # maximum length of a process id


def place() -> str:
    """Boot id of this host and PID namespace of this process; empty if the system does not provide them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def own() -> str:
    """Identifies this process for `stopped`."""
    return f"{place()} {os.getpid()}"


def identity() -> str:
    """Identifies this process for `state`, also if its id is used again."""
    return f"{own()} {started(os.getpid())}"


def state(process: str) -> Literal["alive", "dead", "unknown"]:
    """Whether the process of this `identity` runs; `unknown` for other hosts and PID namespaces."""
    where, _, numbers = process.partition(" ")
    pid, _, start = numbers.partition(" ")
    if not where or where != place() or not pid.isdigit():
        return "unknown"
    return "alive" if started(int(pid)) == start else "dead"


def stopped(process: str) -> bool:
    """Whether the process that `own` identified is stopped by a signal; False if it cannot be seen from here."""
    where, _, pid = process.rpartition(" ")
    known = bool(where) and where == place() and pid.isdecimal() and len(pid) <= _DIGITS
    return known and halted(int(pid))


def halted(pid: int) -> bool:
    """Whether a process of this PID namespace is stopped by a signal."""
    return _stat(pid)[:1] == ["T"]


def started(pid: int) -> str:
    """Start time of a process in clock ticks; empty if it has ended."""
    state, *rest = _stat(pid) or ["X"]
    return "" if state in "ZX" else rest[18]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
