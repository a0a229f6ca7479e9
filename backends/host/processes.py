"""Access to other processes' memory (process_vm_readv), if the system permits it."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from typing import Any

import numpy as np
from numba import types

from xvcomm.jit.atomics import as_pointer, full_fence, load_acquire, store_release
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, python_type

_read = types.ExternalFunction(
    "process_vm_readv",
    types.int64(types.int32, types.voidptr, types.uint64, types.voidptr, types.uint64, types.uint64),
)
_write = types.ExternalFunction(
    "process_vm_writev",
    types.int64(types.int32, types.voidptr, types.uint64, types.voidptr, types.uint64, types.uint64),
)

VECTOR = np.dtype([("address", "i8"), ("length", "i8")])
"""The system's `iovec`."""

ACCESS = np.dtype([
    ("reach", "i8"),  # whether it can read and write it: 0 not tried, 1 yes, -1 no
    ("room", "i8"),  # for what `verified` reads
    ("local", VECTOR),
    ("remote", VECTOR, 4),
])  # fmt: skip
"""Private to a process: what it needs to access others' memory."""

PROCESS = np.dtype([
    ("pid", "i8"),
    ("nonce", "i8"),  # address of a random number there, by which others verify that they access this process's memory
    ("value", "i8"),  # its value; 0 until the process has come
])  # fmt: skip
"""How others find a process's memory; in memory that they map."""

TOUCH = np.dtype([
    ("entered", "i8"),  # whether the copying process may be accessing the other's memory
    ("remote", VECTOR),  # what it copies there; the kernel reads it
])  # fmt: skip
"""A copy between the arrays of two processes; in memory that both map."""

Access = python_type(ACCESS)

_nonces: dict[int, ctypes.c_int64] = {}


def _nonce() -> ctypes.c_int64:
    """A random number of this process, which stays where it is until the process ends.

    Others read it and write it back when they try what they may do, also when the end of a ring here that offered it is closed.
    """
    own = os.getpid()  # a forked child has one of its own
    if own not in _nonces:
        page = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        made = ctypes.c_int64.from_buffer(page)
        made.value = secrets.randbits(62) + 1
        _nonces.setdefault(own, made)
    return _nonces[own]


def introduce(process: Any, access: Any, allowed: bool) -> None:
    """Let others find this process's memory; `allowed`: whether this process may try to access theirs."""
    access.reach, nonce = 0 if allowed else -1, _nonce()
    process.pid, process.nonce = os.getpid(), ctypes.addressof(nonce)
    process.value = nonce.value


@register_jitable
def _set(vector: Any, address: int, length: int) -> None:
    vector.address, vector.length = address, length


@register_jitable
def _transfer(write: bool, access: Any, pid: int, mine: int, remote: int, count: int) -> int:
    """One system call; `remote` is the address of the remote iovec. Returns the bytes copied, or -1."""
    _set(access.local, mine, count)
    local = as_pointer(address_of(access, "local"))
    if write:
        return int(_write(pid, local, 1, as_pointer(remote), 1, 0))
    return int(_read(pid, local, 1, as_pointer(remote), 1, 0))


@register_jitable
def copy(
    write: bool, access: Any, pid: int, mine: int, theirs: int, count: int, touch: Any, offer: int, least: int, abort: int
) -> bool:  # fmt: skip
    """Copy between this process's array and another's, as long as the other process offers it.

    The owner may withdraw its offer at any time (`revoke`). This process may be stopped between its check of the offer and the
    system call, for longer than the owner waits: therefore the kernel reads the remote iovec from shared memory, where the
    owner has set its length to 0 by then.

    Args:
        write: copy to the other process.
        access: this process's `ACCESS`.
        mine, theirs: addresses of the two arrays.
        touch: this process's `TOUCH`.
        offer: address of a word that is `least` or more while the other process offers its array.
        least: see `offer`.
        abort: address of a word that is nonzero once everything stops.

    Returns:
        False if the array is not offered any more, everything stops, or the other process's memory is not accessible.
    """
    done, entered = 0, address_of(touch, "entered")
    while done < count:
        _set(touch.remote, theirs + done, count - done)
        store_release(entered, 1)
        full_fence()
        moved = 0
        if load_acquire(offer) >= least and load_acquire(abort) == 0:
            moved = _transfer(write, access, pid, mine + done, address_of(touch, "remote"), count - done)
        if moved <= 0:
            break
        done += moved
    offered = load_acquire(offer) >= least
    store_release(entered, 0)
    return done == count and offered


@register_jitable
def revoke(touch: Any) -> None:
    """Prevent a copy that another process has announced in its `TOUCH` from starting. The offer was withdrawn before."""
    full_fence()
    touch.remote.length = 0
    full_fence()


@register_jitable
def entered(touch: Any) -> bool:
    """Whether another process may be in this one's memory at the moment."""
    return load_acquire(address_of(touch, "entered")) != 0


@register_jitable
def verified(access: Any, process: Any) -> bool:
    """Whether a process's memory can be read, and belongs to the right process: pids differ between namespaces."""
    remote, room = address_of(access, "remote"), address_of(access, "room")
    _set(access.remote[0], process.nonce, 8)
    return _transfer(False, access, process.pid, room, remote, 8) == 8 and access.room == process.value


@register_jitable
def reachable(access: Any, process: Any) -> bool:
    """Like `verified`, and whether the memory can be written."""
    if not verified(access, process):
        return False
    remote, room = address_of(access, "remote"), address_of(access, "room")
    return _transfer(True, access, process.pid, room, remote, 8) == 8


@register_jitable
def exposed(access: Any, process: Any, first: int, first_bytes: int, second: int, second_bytes: int) -> bool:
    """Whether the system lets other processes access one or two arrays of this process: not if a driver has mapped them.

    `process` is this one; `second_bytes` is 0 if there is only one array.
    """
    ends = 2
    _set(access.remote[0], first, 1)
    _set(access.remote[1], first + first_bytes - 1, 1)
    if second_bytes != 0:
        ends = 4
        _set(access.remote[2], second, 1)
        _set(access.remote[3], second + second_bytes - 1, 1)
    _set(access.local, address_of(access, "room"), ends)
    local, remote = as_pointer(address_of(access, "local")), as_pointer(address_of(access, "remote"))
    return _read(process.pid, local, 1, remote, ends, 0) == ends
