"""Access to other processes' memory (process_vm_readv), if the system permits it."""

from __future__ import annotations

import enum
import secrets

import numpy as np
from numba import types
from numba.extending import register_jitable

from xvcomm.jit.atomics import as_pointer, full_fence, load, load_acquire, store, store_release

_read = types.ExternalFunction(
    "process_vm_readv",
    types.int64(types.int32, types.voidptr, types.uint64, types.voidptr, types.uint64, types.uint64),
)
_write = types.ExternalFunction(
    "process_vm_writev",
    types.int64(types.int32, types.voidptr, types.uint64, types.voidptr, types.uint64, types.uint64),
)
_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.voidptr))
_MONOTONIC = 1


class AccessWord(enum.IntEnum):
    """A process's private words about its access to other processes' memory."""

    REACH = 0  # whether it can read and write it: 0 not tried, 1 yes, -1 no
    NONCE = 1  # a random number by which others verify that they access this process's memory
    ROOM = 2
    VECTORS = 4  # a local iovec, up to four remote ones


class TouchWord(enum.IntEnum):
    """Words in shared memory about a copy between the arrays of two processes."""

    TOUCHES = 0  # whether the copying process may be accessing the other's memory
    ADDRESS = 1  # an iovec that the kernel reads: what it copies there
    LENGTH = 2


# Plain integers: numba treats an enum's members as constants only if they are globals.
_NONCE, _ROOM, _VECTORS = (8 * int(w) for w in tuple(AccessWord)[1:])
_ADDRESS, _LENGTH = (8 * int(w) for w in tuple(TouchWord)[1:])
ACCESS_WORDS = AccessWord.VECTORS + 10


def access(allowed: bool, words: int = ACCESS_WORDS) -> np.ndarray:
    """An array of `words` words that begins with those of `AccessWord`; `allowed` tells whether this process may try at all."""
    memory = np.zeros(words, np.int64)
    memory[AccessWord.REACH] = 0 if allowed else -1
    memory[AccessWord.NONCE] = secrets.randbits(62) + 1
    return memory


def nonce(access: np.ndarray) -> tuple[int, int]:
    """Address and value of the word by which others verify that they access this process's memory."""
    return access.ctypes.data + _NONCE, int(access[AccessWord.NONCE])


@register_jitable
def now(access: int) -> int:
    """Nanoseconds of a monotonic clock."""
    _clock(_MONOTONIC, as_pointer(access + _VECTORS))
    return load(access + _VECTORS) * 1_000_000_000 + load(access + _VECTORS + 8)


@register_jitable
def _vector(access: int, index: int, address: int, count: int) -> None:
    store(access + _VECTORS + 16 * index, address)
    store(access + _VECTORS + 16 * index + 8, count)


@register_jitable
def _transfer(write: bool, access: int, process: int, mine: int, remote: int, count: int) -> int:
    """One system call; `remote` is the address of the remote iovec. Returns the bytes copied, or -1."""
    _vector(access, 0, mine, count)
    local = as_pointer(access + _VECTORS)
    if write:
        return int(_write(process, local, 1, as_pointer(remote), 1, 0))
    return int(_read(process, local, 1, as_pointer(remote), 1, 0))


@register_jitable
def copy(
    write: bool, access: int, process: int, mine: int, theirs: int, count: int, touch: int, offer: int, least: int, abort: int
) -> bool:  # fmt: skip
    """Copy between this process's array and another's, as long as the other process offers it.

    The owner may withdraw its offer at any time (`revoke`). This process may be stopped between its check of the offer and the
    system call, for longer than the owner waits: therefore the kernel reads the remote iovec from shared memory, where the
    owner has set its length to 0 by then.

    Args:
        write: copy to the other process.
        access: address of this process's `AccessWord`s.
        process: pid of the other process.
        mine, theirs: addresses of the two arrays.
        count: bytes.
        touch: address of this process's `TouchWord`s.
        offer: address of a word that is `least` or more while the other process offers its array.
        least: see `offer`.
        abort: address of a word that is nonzero once everything stops.

    Returns:
        False if the array is not offered any more, everything stops, or the other process's memory is not accessible.
    """
    done = 0
    while done < count:
        store(touch + _ADDRESS, theirs + done)
        store(touch + _LENGTH, count - done)
        store_release(touch, 1)
        full_fence()
        moved = 0
        if load_acquire(offer) >= least and load_acquire(abort) == 0:
            moved = _transfer(write, access, process, mine + done, touch + _ADDRESS, count - done)
        if moved <= 0:
            break
        done += moved
    offered = load_acquire(offer) >= least
    store_release(touch, 0)
    return done == count and offered


@register_jitable
def revoke(touch: int) -> None:
    """Prevent a copy that another process has announced in its `TouchWord`s from starting. The offer was withdrawn before."""
    full_fence()
    store(touch + _LENGTH, 0)
    full_fence()


@register_jitable
def verified(access: int, process: int, address: int, value: int) -> bool:
    """Whether a process's memory can be read, and belongs to the right process: pids differ between namespaces."""
    room, remote = access + _ROOM, access + _VECTORS + 16
    _vector(access, 1, address, 8)
    return _transfer(False, access, process, room, remote, 8) == 8 and load(room) == value


@register_jitable
def reachable(access: int, process: int, address: int, value: int) -> bool:
    """Like `verified`, and whether the memory can be written."""
    if not verified(access, process, address, value):
        return False
    return _transfer(True, access, process, access + _ROOM, access + _VECTORS + 16, 8) == 8


@register_jitable
def exposed(access: int, process: int, first: int, first_bytes: int, second: int, second_bytes: int) -> bool:
    """Whether the system lets other processes access one or two arrays of this process: not if a driver has mapped them.

    `second_bytes` is 0 if there is only one.
    """
    remote = 1
    _vector(access, 1, first, 1)
    _vector(access, 2, first + first_bytes - 1, 1)
    if second_bytes != 0:
        remote = 3
        _vector(access, 3, second, 1)
        _vector(access, 4, second + second_bytes - 1, 1)
    wanted = remote + 1
    _vector(access, 0, access + _ROOM, wanted)
    vectors = access + _VECTORS
    return _read(process, as_pointer(vectors), 1, as_pointer(vectors + 16), wanted, 0) == wanted
