"""Processes that use a store, as others on the host see them."""

from __future__ import annotations

import os
from pathlib import Path

_DIGITS = 10  # of a process number at most


def place() -> str:
    """This host since it started, and the namespace of its process numbers; empty where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def own() -> str:
    """This process, for `stopped`."""
    return f"{place()} {os.getpid()}"


def stopped(process: str) -> bool:
    """Whether a process, as it called itself by `own`, is stopped by a signal; False where this cannot be seen from here."""
    where, _, pid = process.rpartition(" ")
    known = bool(where) and where == place() and pid.isdecimal() and len(pid) <= _DIGITS
    return known and _stat(int(pid))[:1] == ["T"]


def started(pid: int) -> str:
    """When a process started, in ticks; empty if it has ended."""
    state, *rest = _stat(pid) or ["X"]
    return "" if state in "ZX" else rest[18]


def _stat(pid: int) -> list[str]:
    """State and all that follows in /proc; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
