"""xvcomm among Ray's actors: `join` makes a communicator of them, `Group` is a backend of `ray.util.collective`.

Copy it beside your program, and let the actors have it: `ray.init(runtime_env={"working_dir": "."})`.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from typing import Any

import ray
from ray.experimental import internal_kv
from ray.util.collective import types
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup

import xvcomm

NAME = "XVCOMM"
_OPS = {
    types.ReduceOp.SUM: "sum", types.ReduceOp.PRODUCT: "prod", types.ReduceOp.MIN: "min", types.ReduceOp.MAX: "max",
}  # fmt: skip


def join(group: str, rank: int, size: int, timeout: float = 60.0, **options: Any) -> xvcomm.Communicator:
    """The communicator of `size` actors; each calls this with its rank. A group's name may be used again once all have joined.

    The address of rank 0, and a secret, travel by Ray's own store. Options are those of `xvcomm.init`.
    """
    key = f"xvcomm/{group}".encode()
    if rank == 0:
        host = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        place = {"store": f"tcp://{host}:{port}", "secret": os.environ.get("XVCOMM_SECRET") or secrets.token_hex(16)}
        internal_kv._internal_kv_put(key, json.dumps(place), overwrite=True)
    else:
        end = time.monotonic() + timeout
        while (found := internal_kv._internal_kv_get(key)) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"rank 0 of {group} has not come within {timeout} s")
            time.sleep(0.02)
        place = json.loads(found)
    env = {**os.environ, "XVCOMM_SECRET": place["secret"]}
    try:
        return xvcomm.init(rank=rank, size=size, store=place["store"], env=env, timeout=timeout, **options)
    finally:
        if rank == 0:
            internal_kv._internal_kv_del(key)


class Group(BaseGroup):
    """`create_collective_group(actors, ..., backend="xvcomm")`; call `register` in the driver and in each actor before."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self.comm = join(group_name, rank, world_size)

    @classmethod
    def backend(cls) -> str:
        return NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    def destroy_group(self) -> None:
        self.comm.close()

    def allreduce(self, tensor: Any, allreduce_options: Any) -> None:
        self.comm.all_reduce(tensor[0], op=_OPS[allreduce_options.reduceOp])

    def barrier(self, barrier_options: Any = None) -> None:
        self.comm.barrier()

    def reduce(self, tensor: Any, reduce_options: Any) -> None:
        self.comm.reduce(tensor[0], op=_OPS[reduce_options.reduceOp], root=reduce_options.root_rank)

    def broadcast(self, tensor: Any, broadcast_options: Any) -> None:
        self.comm.broadcast(tensor[0], root=broadcast_options.root_rank)

    def allgather(self, tensor_list: Any, tensor: Any, allgather_options: Any) -> None:
        for rank, part in enumerate(tensor_list[0]):
            if rank == self.rank:
                part[...] = tensor[0]
            self.comm.broadcast(part, root=rank)

    def reducescatter(self, tensor: Any, tensor_list: Any, reducescatter_options: Any) -> None:
        for rank, part in enumerate(tensor_list[0]):
            self.comm.reduce(part, op=_OPS[reducescatter_options.reduceOp], root=rank)
        tensor[0][...] = tensor_list[0][self.rank]

    def send(self, tensor: Any, send_options: Any) -> None:
        self.comm.send(tensor[0], send_options.dst_rank)

    def recv(self, tensor: Any, recv_options: Any) -> None:
        self.comm.recv(tensor[0], recv_options.src_rank)


def register() -> None:
    """Make the backend known in this process; may be repeated."""
    try:
        register_collective_backend(NAME, Group)
    except ValueError:  # it is known
        pass
