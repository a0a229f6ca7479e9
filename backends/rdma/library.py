"""libibverbs itself, for what pyverbs does not offer: its functions, and their errors as xvcomm's."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import Any

from xvcomm.errors import BackendUnavailable, ResourceError

REGISTERING = (
    "raise the limit of locked memory: `ulimit -l unlimited` (memlock in /etc/security/limits.conf), LimitMEMLOCK=infinity for "
    "what a service of systemd starts; in containers --ulimit memlock=-1, in Kubernetes LimitMEMLOCK=infinity for containerd"
)
"""What helps where memory cannot be locked."""
_REMEDIES = {
    errno.ENOMEM: REGISTERING,
    errno.EFAULT: "devices write to what is registered, and this process may not: a file mapped read-only must be copied first",
}


@cache
def libibverbs() -> Any:
    """libibverbs: the one that pyverbs has loaded.

    Raises:
        BackendUnavailable: it does not load.
    """
    try:
        found = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    except OSError as error:
        raise BackendUnavailable(f"libibverbs does not load: {error}; apt-get install libibverbs1") from error
    address, number = ctypes.c_void_p, ctypes.c_int
    word = ctypes.c_uint64
    for name, result, arguments in (
        ("ibv_fork_init", number, []),
        ("ibv_get_device_name", ctypes.c_char_p, [address]),
        ("ibv_create_comp_channel", address, [address]),
        ("ibv_destroy_comp_channel", number, [address]),
        ("ibv_create_cq", address, [address, number, address, address, number]),
        ("ibv_destroy_cq", number, [address]),
        ("ibv_create_qp", address, [address, address]),
        ("ibv_modify_qp", number, [address, address, number]),
        ("ibv_destroy_qp", number, [address]),
        ("ibv_reg_mr_iova2", address, [address, address, ctypes.c_size_t, word, ctypes.c_uint]),
        ("ibv_reg_dmabuf_mr", address, [address, word, word, word, number, number]),
        ("ibv_dereg_mr", number, [address]),
        ("ibv_get_async_event", number, [address, address]),
        ("ibv_ack_async_event", None, [address]),
    ):
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def address_of(function: Any) -> int:
    """Address of a C function."""
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def reason(number: int) -> str:
    """An errno in words, with what helps."""
    return "; ".join(filter(None, [os.strerror(number), _REMEDIES.get(number)]))


def checked(what: str, device: str, address: int | None) -> int:
    """The address of what a device was asked for.

    Raises:
        ResourceError: it is null; says what was asked for.
    """
    if not address:
        raise ResourceError(f"{device} gives no {what}: {reason(ctypes.get_errno())}")
    return address


def check(what: str, device: str, number: int) -> None:
    """Check what a function of libibverbs returned.

    Raises:
        ResourceError: it is an errno.
    """
    if number:
        raise ResourceError(f"{device} does not {what}: {os.strerror(abs(number))}")


def keep_registered_memory_over_forks() -> None:
    """Let processes fork after memory was registered. To be called before that, as often as one likes.

    After a fork, the process that writes first to a shared page gets a copy of it. If that is the parent, the device keeps the
    page that it knows, and sends old bytes, or writes what is never seen. Linux since 5.12 copies registered pages for the
    child at the fork; libibverbs asks the kernel whether it does, and then `ibv_fork_init` does nothing, so that it can be
    called on every kernel. On others it keeps registered pages out of children, which must not touch them.

    Raises:
        ResourceError: another library has registered memory without it.
    """
    if number := libibverbs().ibv_fork_init():
        raise ResourceError(
            f"forks are not safe beside RDMA here: ibv_fork_init: {os.strerror(abs(number))}; set RDMAV_FORK_SAFE=1 before the "
            "process starts, or use Linux 5.12 or newer"
        )
