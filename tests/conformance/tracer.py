"""Stops a thread of another process at the entry of a system call, using ptrace."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable

_SEIZE, _INTERRUPT, _SYSCALL, _DETACH, _SYSCALL_INFO = 0x4206, 0x4207, 24, 17, 0x420E
_TRACESYSGOOD = 1
_ENTRY = 1
_WALL = 0x40000000
_SYSGOOD_TRAP, _EVENT_STOP = 0x85, 128
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)


class _SyscallInfo(ctypes.Structure):
    """`struct ptrace_syscall_info` at an entry: the same on every architecture."""

    _fields_ = (
        ("op", ctypes.c_uint8), ("pad", ctypes.c_uint8 * 3), ("arch", ctypes.c_uint32), ("instruction", ctypes.c_uint64),
        ("stack", ctypes.c_uint64), ("number", ctypes.c_uint64), ("args", ctypes.c_uint64 * 6),
    )  # fmt: skip


def _ptrace(request: int, process: int, address: int = 0, data: int = 0) -> None:
    if _libc.ptrace(request, process, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace({request:#x}): {os.strerror(number)}")


class Held:
    """A process that runs until its main thread enters a matching system call, and is stopped there.

    Args:
        process: its process id.
        wanted: called with number and arguments of a system call; returns whether it matches.

    Raises:
        OSError: the system does not allow this process to trace the other one.
    """

    def __init__(self, process: int, wanted: Callable[[int, list[int]], bool]) -> None:
        self.there = threading.Event()
        """Set once it stands there."""
        self._go_on, self._attached = threading.Event(), threading.Event()
        self._failure: OSError | None = None
        # All requests must come from the thread that attached.
        self._thread = threading.Thread(target=self._trace, args=(process, wanted))
        self._thread.start()
        self._attached.wait()
        if self._failure is not None:
            raise self._failure

    def release(self) -> None:
        """Continue it, untraced."""
        self._go_on.set()
        self._thread.join()

    def _trace(self, process: int, wanted: Callable[[int, list[int]], bool]) -> None:
        try:
            _ptrace(_SEIZE, process, 0, _TRACESYSGOOD)
        except OSError as failure:
            self._failure = failure
            self._attached.set()
            return
        _ptrace(_INTERRUPT, process)
        os.waitpid(process, _WALL)
        self._attached.set()
        signal = 0
        while True:
            _ptrace(_SYSCALL, process, 0, signal)
            _, status = os.waitpid(process, _WALL)
            if not os.WIFSTOPPED(status):
                return
            stopped_by = os.WSTOPSIG(status)
            signal = 0 if stopped_by == _SYSGOOD_TRAP or status >> 16 == _EVENT_STOP else stopped_by
            if stopped_by == _SYSGOOD_TRAP:
                info = _SyscallInfo()
                _ptrace(_SYSCALL_INFO, process, ctypes.sizeof(info), ctypes.addressof(info))
                if info.op == _ENTRY and wanted(info.number, list(info.args)):
                    break
        self.there.set()
        self._go_on.wait()
        _ptrace(_DETACH, process)


READ, WRITE = {"x86_64": (310, 311), "aarch64": (270, 271)}[platform.machine()]
"""System call numbers of process_vm_readv and process_vm_writev."""


def hold_in_copy(process: int, *calls: int) -> Held:
    """Stop a process where its main thread copies from or to this process's memory.

    Args:
        calls: READ, WRITE; by default both.
    """
    me, kinds = os.getpid(), calls or (READ, WRITE)
    return Held(process, lambda number, args: number in kinds and args[0] == me)
