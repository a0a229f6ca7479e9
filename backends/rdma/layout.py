"""How libibverbs lays out what xvcomm reads and writes, by its ABI 1.1, and a check that the loaded library does so.

Requests and completions, which compiled code works on, are in `wire.verbs`.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from typing import Any

import numpy as np

from xvcomm.errors import BackendUnavailable

OPERATIONS = np.dtype([(name, "i8") for name in (
    "query_device", "query_port", "alloc_pd", "dealloc_pd", "reg_mr", "rereg_mr", "dereg_mr", "alloc_mw", "bind_mw", "dealloc_mw",
    "create_cq", "poll_cq", "req_notify_cq", "cq_event", "resize_cq", "destroy_cq", "create_srq", "modify_srq", "query_srq",
    "destroy_srq", "post_srq_recv", "create_qp", "query_qp", "modify_qp", "destroy_qp", "post_send", "post_recv", "create_ah",
    "destroy_ah", "attach_mcast", "detach_mcast", "async_event",
)])  # fmt: skip
"""struct ibv_context_ops: addresses of a provider's functions. Most are placeholders since the ABI was extended."""

_MUTEX_WORDS = {"x86_64": 5, "aarch64": 6}
"""Size of the C library's pthread_mutex_t."""

CONTEXT = np.dtype([
    ("device", "i8"), ("operations", OPERATIONS), ("cmd_fd", "i4"), ("async_fd", "i4"), ("num_comp_vectors", "i4"),
    ("mutex", "i8", _MUTEX_WORDS.get(platform.machine(), 5)), ("abi_compat", "u8"),
], align=True)  # fmt: skip
"""struct ibv_context."""

PROTECTION_DOMAIN = np.dtype([("context", "i8"), ("handle", "u4")], align=True)
"""struct ibv_pd."""

REGION = np.dtype([
    ("context", "i8"), ("pd", "i8"), ("addr", "i8"), ("length", "i8"), ("handle", "u4"), ("lkey", "u4"), ("rkey", "u4"),
], align=True)  # fmt: skip
"""struct ibv_mr."""

CHANNEL = np.dtype([("context", "i8"), ("fd", "i4"), ("refcnt", "i4")], align=True)
"""struct ibv_comp_channel."""

COMPLETION_QUEUE = np.dtype(
    [("context", "i8"), ("channel", "i8"), ("cq_context", "i8"), ("handle", "u4"), ("cqe", "i4")], align=True
)
"""The beginning of struct ibv_cq."""

QUEUE_PAIR = np.dtype([
    ("context", "i8"), ("qp_context", "i8"), ("pd", "i8"), ("send_cq", "i8"), ("recv_cq", "i8"), ("srq", "i8"),
    ("handle", "u4"), ("qp_num", "u4"), ("state", "u4"), ("qp_type", "u4"),
], align=True)  # fmt: skip
"""The beginning of struct ibv_qp."""

EVENT = np.dtype([("element", "i8"), ("type", "u4")], align=True)
"""struct ibv_async_event. The element is the address of a structure, or of 4 bytes the number of a port."""

CAPACITY = np.dtype([(name, "u4") for name in ("send_wr", "recv_wr", "send_sge", "recv_sge", "inline_data")])
"""struct ibv_qp_cap."""

PAIR_INIT = np.dtype([
    ("qp_context", "i8"), ("send_cq", "i8"), ("recv_cq", "i8"), ("srq", "i8"), ("capacity", CAPACITY), ("qp_type", "u4"),
    ("signal_all", "i4"),
], align=True)  # fmt: skip
"""struct ibv_qp_init_attr."""

_ROUTE = np.dtype([
    ("gid", "u8", 2), ("flow_label", "u4"), ("sgid_index", "u1"), ("hop_limit", "u1"), ("traffic_class", "u1"),
], align=True)  # fmt: skip

_ADDRESS = np.dtype([
    ("route", _ROUTE), ("lid", "u2"), ("sl", "u1"), ("path_bits", "u1"), ("static_rate", "u1"), ("is_global", "u1"),
    ("port", "u1"),
], align=True)  # fmt: skip

PAIR_ATTRIBUTES = np.dtype([
    ("state", "u4"), ("cur_state", "u4"), ("path_mtu", "u4"), ("path_mig_state", "u4"), ("qkey", "u4"), ("rq_psn", "u4"),
    ("sq_psn", "u4"), ("dest_qp_num", "u4"), ("access_flags", "u4"), ("capacity", CAPACITY), ("address", _ADDRESS),
    ("alt_address", _ADDRESS), ("pkey_index", "u2"), ("alt_pkey_index", "u2"), ("en_sqd_async_notify", "u1"),
    ("sq_draining", "u1"), ("max_rd_atomic", "u1"), ("max_dest_rd_atomic", "u1"), ("min_rnr_timer", "u1"), ("port_num", "u1"),
    ("timeout", "u1"), ("retry_cnt", "u1"), ("rnr_retry", "u1"), ("alt_port_num", "u1"), ("alt_timeout", "u1"),
    ("rate_limit", "u4"),
], align=True)  # fmt: skip
"""struct ibv_qp_attr."""

_EXTENDED = (1 << 64) - 1
"""ABI_COMPAT of a context since libibverbs 1.1.7: the table of operations is followed by no more than is declared here."""


def at(address: int, dtype: np.dtype[Any]) -> Any:
    """The record of C that lies at an address, to read or write in place."""
    return np.frombuffer(memoryview((ctypes.c_char * dtype.itemsize).from_address(address)), dtype)[0]


def refused(what: str) -> BackendUnavailable:
    """The error where the library lays out its structures in another way."""
    return BackendUnavailable(
        f"libibverbs does not lay out its structures as xvcomm knows them: {what}; use rdma-core 44 to 65 on x86_64 or aarch64, "
        "or the transport tcp, and report this"
    )


def check_context(address: int, name: str, vectors: int) -> None:
    """Compare an open device's context with what is known of it from elsewhere.

    Args:
        address: of the struct ibv_context.
        name: of the device.
        vectors: its completion vectors.

    Raises:
        BackendUnavailable: they differ: no request may be posted.
    """
    if platform.machine() not in _MUTEX_WORDS:
        raise refused(f"this machine is {platform.machine()}")
    context = at(address, CONTEXT)
    if context["abi_compat"] != _EXTENDED:
        raise refused(f"the context of {name} has not got the extended ABI where it should be")
    if context["num_comp_vectors"] != vectors:
        raise refused(
            f"{name} has {vectors} completion vectors, and {context['num_comp_vectors']} where they should be"
        )
    for field, kind in (("cmd_fd", "uverbs"), ("async_fd", "infiniband")):
        if kind not in _opened(int(context[field])):
            raise refused(f"{field} of the context of {name} is {context[field]}, no descriptor of its device")
    for field in ("poll_cq", "req_notify_cq", "post_send", "post_recv"):
        function = int(context["operations"][field])
        if not any(begin <= function < end for begin, end in _code()):
            raise refused(f"{field} of {name} is {function:#x}, no code")


def check_fields(what: str, address: int, dtype: np.dtype[Any], **expected: int) -> None:
    """Compare fields of a structure that the library has just made with what they must be.

    Raises:
        BackendUnavailable: they differ: no request may be posted.
    """
    found = at(address, dtype)
    for field, value in expected.items():
        if int(found[field]) != value:
            raise refused(f"{what} has {field} {int(found[field]):#x} instead of {value:#x}")


def _opened(descriptor: int) -> str:
    """What a descriptor of this process is open on."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def _code() -> Iterator[tuple[int, int]]:
    """Where executable memory of this process begins and ends."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            place, rights, *_ = line.split()
            if "x" in rights:
                begin, _, end = place.partition("-")
                yield int(begin, 16), int(end, 16)
