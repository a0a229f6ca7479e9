"""The layouts of libibverbs' structures, compared with its header on a host that has it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.rdma

LAYOUTS = {
    "ibv_context": "CONTEXT", "ibv_pd": "PROTECTION_DOMAIN", "ibv_comp_channel": "CHANNEL", "ibv_cq": "COMPLETION_QUEUE",
    "ibv_qp": "QUEUE_PAIR", "ibv_sge": "PART", "ibv_send_wr": "REQUEST", "ibv_recv_wr": "RECEIVE", "ibv_wc": "COMPLETION",
    "ibv_qp_cap": "CAPACITY", "ibv_qp_init_attr": "PAIR_INIT", "ibv_qp_attr": "PAIR_ATTRIBUTES", "ibv_async_event": "EVENT",
}  # fmt: skip
BEGINNINGS = ("ibv_cq", "ibv_qp")
IN_C = {
    "ibv_context": "device ops cmd_fd async_fd num_comp_vectors mutex abi_compat",
    "ibv_send_wr": "wr_id next sg_list num_sge opcode send_flags imm_data wr.rdma.remote_addr wr.rdma.rkey",
    "ibv_recv_wr": "wr_id next sg_list num_sge",
    "ibv_sge": "addr length lkey",
    "ibv_wc": "wr_id status opcode vendor_err byte_len imm_data qp_num src_qp wc_flags pkey_index slid sl dlid_path_bits",
    "ibv_qp_attr": "qp_state ah_attr.grh.dgid ah_attr.grh.sgid_index ah_attr.dlid ah_attr.is_global alt_ah_attr timeout",
    "ibv_context_ops": "poll_cq req_notify_cq post_send post_recv",
    "ibv_async_event": "element event_type",
}
OURS = {
    "ibv_context": "device operations cmd_fd async_fd num_comp_vectors mutex abi_compat",
    "ibv_send_wr": "id next parts part_count opcode flags immediate target.address target.key",
    "ibv_recv_wr": "id next parts part_count",
    "ibv_sge": "address length key",
    "ibv_wc": "id status opcode vendor_error bytes immediate qp_num src_qp flags pkey_index slid sl path_bits",
    "ibv_qp_attr": "state address.route.gid address.route.sgid_index address.lid address.is_global alt_address timeout",
    "ibv_context_ops": "poll_cq req_notify_cq post_send post_recv",
    "ibv_async_event": "element type",
}


def offset(dtype: np.dtype[Any], path: str) -> int:
    """Where a field of a field lies."""
    total = 0
    for name in path.split("."):
        dtype, place, *_ = dtype.fields[name]  # type: ignore[index, assignment]
        total += place
    return total


def test_layouts_are_those_of_the_header(tmp_path: Path) -> None:
    from xvcomm.backends.rdma import layout
    from xvcomm.wire import verbs

    lines = [f'printf("%zu\\n", sizeof(struct {name}));' for name in LAYOUTS if name not in BEGINNINGS]
    lines += [
        f'printf("%zu\\n", offsetof(struct {name}, {f}));' for name, fields in IN_C.items() for f in fields.split()
    ]
    source = tmp_path / "layouts.c"
    text = (
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\nint main(void) {\n%s\nreturn 0;\n}\n"
    )
    source.write_text(text % "\n".join(lines))
    program = tmp_path / "layouts"
    subprocess.run(["gcc", "-w", "-I", os.environ["RXE_HEADERS"], "-o", program, source], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    in_c = [int(word) for word in printed.split()]

    known = vars(layout) | vars(verbs)
    dtypes = {name: known[ours] for name, ours in LAYOUTS.items()} | {"ibv_context_ops": layout.OPERATIONS}
    ours = [dtypes[name].itemsize for name in LAYOUTS if name not in BEGINNINGS]
    ours += [offset(dtypes[name], field) for name, fields in OURS.items() for field in fields.split()]
    assert ours == in_c
