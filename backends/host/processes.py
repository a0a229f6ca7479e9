"""Reading and writing other processes' memory (process_vm_readv), where the system allows it."""

from __future__ import annotations

import enum
import secrets

import numpy as np
from numba import types
from numba.extending import register_jitable

from xvcomm.atomics import as_pointer, load, store

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
    """What a process knows of others' memory, in its own."""

    REACH = 0  # whether it can read and write it: 0 not tried, 1 yes, -1 no
    WITNESS = 1  # a number that nobody else has here, by which others know that this memory is the one meant
    ROOM = 2
    VECTORS = 4  # a local one, up to four remote ones


# Plain integers: numba reads an enum's members as constants only by way of globals.
_WITNESS, _ROOM, _VECTORS = (8 * int(w) for w in tuple(AccessWord)[1:])
ACCESS_WORDS = AccessWord.VECTORS + 10


def access(allowed: bool, words: int = ACCESS_WORDS) -> np.ndarray:
    """So many words, the first of which are those of `AccessWord`; `allowed` tells whether this process may try at all."""
    memory = np.zeros(words, np.int64)
    memory[AccessWord.REACH] = 0 if allowed else -1
    memory[AccessWord.WITNESS] = secrets.randbits(62) + 1
    return memory


def witness(access: np.ndarray) -> tuple[int, int]:
    """Address and value of the word by which others know this process's memory."""
    return access.ctypes.data + _WITNESS, int(access[AccessWord.WITNESS])


@register_jitable
def now(access: int) -> int:
    """Nanoseconds of a clock that only goes forward."""
    _clock(_MONOTONIC, as_pointer(access + _VECTORS))
    return load(access + _VECTORS) * 1_000_000_000 + load(access + _VECTORS + 8)


@register_jitable
def _vector(access: int, index: int, address: int, count: int) -> None:
    store(access + _VECTORS + 16 * index, address)
    store(access + _VECTORS + 16 * index + 8, count)


@register_jitable
def copy(write: bool, access: int, process: int, mine: int, theirs: int, count: int) -> bool:
    """Copy between this process's memory and another's; False if that cannot be reached."""
    done = 0
    vectors = access + _VECTORS
    while done < count:
        _vector(access, 0, mine + done, count - done)
        _vector(access, 1, theirs + done, count - done)
        if write:
            moved = _write(process, as_pointer(vectors), 1, as_pointer(vectors + 16), 1, 0)
        else:
            moved = _read(process, as_pointer(vectors), 1, as_pointer(vectors + 16), 1, 0)
        if moved <= 0:
            return False
        done += moved
    return True


@register_jitable
def witnessed(access: int, process: int, address: int, value: int) -> bool:
    """Whether a process's memory can be read, and is that of the process meant: numbers differ between namespaces."""
    room = access + _ROOM
    return copy(False, access, process, room, address, 8) and load(room) == value


@register_jitable
def reachable(access: int, process: int, address: int, value: int) -> bool:
    """The same, and whether it can be written."""
    return witnessed(access, process, address, value) and copy(True, access, process, access + _ROOM, address, 8)


@register_jitable
def exposed(access: int, process: int, first: int, first_bytes: int, second: int, second_bytes: int) -> bool:
    """Whether the system lets others into one or two arrays of this process: not if a driver has mapped them.

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
