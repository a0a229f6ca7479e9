"""Replaces another backend: scripts that use NCCL or Gloo run on xvcomm unchanged."""

from __future__ import annotations

import functools
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch.distributed import distributed_c10d as c10d

from xvcomm.errors import ConfigError

_TIMEOUT = timedelta(minutes=10)
_CLASSES = {"nccl": "ProcessGroupNCCL", "gloo": "ProcessGroupGloo"}


class Options(SimpleNamespace):
    """Options that scripts set for NCCL or Gloo; stored, but unused except for the timeout, whose default is NCCL's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(**{
            "is_high_priority_stream": False, "_timeout": c10d.default_pg_nccl_timeout, "config": SimpleNamespace(),
            "split_from": None, **kwargs,
        })  # fmt: skip


def install(backend: str) -> None:
    """Make `torch.distributed` create groups of xvcomm when a program requests `backend`, `"nccl"` or `"gloo"`.

    `get_backend` continues to return the requested name. Idempotent.

    Raises:
        ConfigError: another name.
    """
    name = _CLASSES.get(backend)
    if name is None:
        raise ConfigError(f"XVCOMM_REPLACE={backend!r}: xvcomm can replace {' and '.join(_CLASSES)}")
    theirs = getattr(c10d, name, None)
    if getattr(theirs, "replaced", None) is not None:
        return
    stand_in = _stand_in(backend, theirs)
    setattr(c10d, name, stand_in)
    if backend == "nccl":
        # Scripts create its options by this name.
        import torch.distributed as dist

        dist.ProcessGroupNCCL = stand_in
        c10d._NCCL_AVAILABLE = True
        # None if torch was built without NCCL; torch warns about a default that is None, and about one that differs from the
        # options'.
        c10d.default_pg_nccl_timeout = c10d.default_pg_nccl_timeout or _TIMEOUT
        _accept_hooks()
        _name_a_version()


def refuse_groups(reason: ConfigError) -> None:
    """Raise this error, converted for torch, when the program creates a process group."""

    def new_process_group_helper(*_: Any, **__: Any) -> Any:
        from xvcomm.adapters.torch.errors import as_torch

        raise as_torch(reason)

    c10d._new_process_group_helper = new_process_group_helper


def _name_a_version() -> None:
    """Let torch query NCCL's version, which it does to log an error, even if it was built without NCCL.

    Otherwise the query's own error would replace the logged one.
    """
    import torch

    if not hasattr(torch._C, "_nccl_version"):
        torch.cuda.nccl.version = lambda: (0, 0, 0)


def _accept_hooks() -> None:
    """Let DDP accept hooks that require NCCL 2.10, even if torch was built without NCCL."""
    from torch.nn.parallel import DistributedDataParallel

    check = DistributedDataParallel._check_comm_hook

    def check_comm_hook(self: Any, hook: Any) -> None:
        @functools.wraps(hook)
        def anonymous(state: Any, bucket: Any) -> Any: ...

        anonymous.__name__ = "hook"  # torch checks the name
        check(self, anonymous)

    DistributedDataParallel._check_comm_hook = check_comm_hook


def _stand_in(backend: str, theirs: Any) -> Any:
    """A class that replaces c10d's; the group's module is imported on use, because that takes long."""

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            from xvcomm.adapters.torch.group import ProcessGroup

            return isinstance(instance, ProcessGroup) or (theirs is not None and isinstance(instance, theirs))

        def __getattr__(cls, name: str) -> Any:
            if name.startswith("__") or theirs is None:
                raise AttributeError(name)
            return getattr(theirs, name)

    class StandIn(metaclass=Meta):
        """Creates a group of xvcomm."""

        replaced = theirs or backend

        def __new__(cls, store: Any, rank: int, size: int, options: Any = None, timeout: Any = None) -> Any:
            from xvcomm.adapters.torch.creation import make

            return make(store, rank, size, timeout or getattr(options, "_timeout", options), backend)

    StandIn.Options = Options  # type: ignore[attr-defined]
    StandIn.__name__ = StandIn.__qualname__ = _CLASSES[backend]
    return StandIn
