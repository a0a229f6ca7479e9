"""Works around restrictions of torch for groups written in Python.

`dist.monitored_barrier` and `_set_pg_timeout` accept only Gloo's groups by name; xvcomm's groups implement them too. C++
reaches a method of a Python group only if c10d has a trampoline for it. `all_gather_into_tensor_out` of the functional
collectives, which compiled programs call, ends in `c10d::_allgather_base_` instead, which requires a C++ backend. So the
functional operation gets a Python kernel that calls the group's own method. The operations of c10d itself are not replaced: a
Python kernel for them would hold the interpreter lock while another backend waits for a mutex.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions
from torch._C._distributed_c10d import _create_work_from_future, _register_work, _resolve_process_group
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from xvcomm.adapters.torch.current import device_types
from xvcomm.adapters.torch.group import ProcessGroup
from xvcomm.adapters.torch.works import Work
from xvcomm.trace.callsite import skip_folder

_OPERATION = "all_gather_into_tensor_out"
_libraries: list[Any] = []


def install() -> None:
    """Install the workarounds that this release of torch permits. Idempotent."""
    if _libraries:
        return
    skip_folder(str(Path(torch.__file__).parent))
    # Frames between the program and functions that torch has renamed, or calls at the end of a `with`.
    skip_folder(inspect.getfile(typing_extensions.deprecated))
    skip_folder(contextlib.__file__)
    library = torch.library.Library("_c10d_functional", "IMPL")
    _libraries.append(library)
    _open_monitored_barrier()
    _let_timeouts_be_set()
    _give_builtin_hooks_a_future()
    _give_reducers_a_work_of_cpp()
    _keep_shrunk_groups()
    for kind in device_types():
        library.impl(_OPERATION, _all_gather_into_tensor_out, torch._C._dispatch_key_for_device(kind))


def _all_gather_into_tensor_out(input: Any, group_size: int, group_name: Any, *, out: Any) -> Any:
    """Like torch's own kernel, but with the methods of the group; those of other backends release the interpreter lock."""
    group = _resolve_process_group(group_name) if isinstance(group_name, str) else dist.ProcessGroup.unbox(group_name)
    if isinstance(group, ProcessGroup):
        # A C++ Work: C++ does not keep the Python part of xvcomm's Work alive, without which `wait` would hang.
        work = _create_work_from_future(group.all_gather_single(out, input).get_future())
    else:
        work = group._allgather_base(out, input)
    _register_work(out, work)
    return out


def _let_timeouts_be_set() -> None:
    """Replace `_set_pg_timeout`, which accepts only Gloo's and NCCL's groups."""
    theirs = dist.distributed_c10d._set_pg_timeout

    @functools.wraps(theirs)
    def set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        ours = group or dist.distributed_c10d._get_default_group()
        if isinstance(ours, ProcessGroup):
            ours.set_timeout(timeout)
        else:
            theirs(timeout, group)

    dist.distributed_c10d._set_pg_timeout = set_pg_timeout


def _give_builtin_hooks_a_future() -> None:
    """Replace DDP's built-in FP16 hook in C++, whose future must hold a C++ list, by the equivalent one in Python."""
    theirs = DistributedDataParallel._register_builtin_comm_hook

    @functools.wraps(theirs)
    def register(self: Any, comm_hook_type: Any) -> None:
        if comm_hook_type is dist.BuiltinCommHookType.FP16_COMPRESS and isinstance(self.process_group, ProcessGroup):
            self.logger._set_comm_hook_name(str(comm_hook_type))
            dist._register_comm_hook(self.reducer, self.process_group, fp16_compress_hook)
        else:
            theirs(self, comm_hook_type)

    DistributedDataParallel._register_builtin_comm_hook = register


def _open_monitored_barrier() -> None:
    theirs = dist.monitored_barrier

    @functools.wraps(theirs)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        ours = group or dist.distributed_c10d._get_default_group()
        if isinstance(ours, ProcessGroup):
            ours.monitored_barrier(timeout, wait_all_ranks)
        else:
            theirs(group, timeout, wait_all_ranks)

    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored_barrier


def _keep_shrunk_groups() -> None:
    """Let `shrink_group` return what `ProcessGroup.shrink` does; torch would register that as a C++ backend of a new group."""
    c10d = dist.distributed_c10d
    theirs = getattr(c10d, "_create_shrunk_process_group", None)
    if theirs is None:  # before torch 2.10
        return

    @functools.wraps(theirs)
    def create(new_backend: Any, remaining_ranks: list[int], metadata: dict[str, Any], is_default_group: bool) -> Any:
        if not isinstance(new_backend, ProcessGroup):
            return theirs(new_backend, remaining_ranks, metadata, is_default_group)
        if metadata["bound_device_id"] is not None:
            new_backend.bound_device_id = metadata["bound_device_id"]
        new_backend._set_group_name(metadata["new_group_name"])
        new_backend._set_group_desc(
            "default:shrunken" if is_default_group else f"{metadata['original_group_name']}:shrunk"
        )
        return new_backend

    c10d._create_shrunk_process_group = create


def _give_reducers_a_work_of_cpp() -> None:
    """Give DDP's reducer a C++ Work: it waits for the one that `join` passes when the Python part is gone."""
    theirs = dist.Reducer._set_forward_pass_work_handle

    def set_forward_pass_work_handle(reducer: Any, work: Any, static_world_size: bool) -> None:
        theirs(
            reducer, _create_work_from_future(work.get_future()) if isinstance(work, Work) else work, static_world_size
        )

    dist.Reducer._set_forward_pass_work_handle = set_forward_pass_work_handle
