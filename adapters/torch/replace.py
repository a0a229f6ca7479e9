"""Stands in for another backend: scripts that ask for NCCL or Gloo run on xvcomm, unchanged."""

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
    """What scripts set for NCCL or Gloo; kept, and not used but for the timeout, whose default is NCCL's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(**{
            "is_high_priority_stream": False, "_timeout": c10d.default_pg_nccl_timeout, "config": SimpleNamespace(),
            "split_from": None, **kwargs,
        })  # fmt: skip


def install(backend: str) -> None:
    """Let `torch.distributed` make groups of xvcomm wherever a program asks for `backend`, `"nccl"` or `"gloo"`.

    `get_backend` goes on to say the name that was asked for. Idempotent.

    Raises:
        ConfigError: another name.
    """
    name = _CLASSES.get(backend)
    if name is None:
        raise ConfigError(f"XVCOMM_REPLACE={backend!r}: xvcomm can stand in for {' and '.join(_CLASSES)}")
    theirs = getattr(c10d, name, None)
    if getattr(theirs, "replaced", None) is not None:
        return
    stand_in = _stand_in(backend, theirs)
    setattr(c10d, name, stand_in)
    if backend == "nccl":
        # Scripts make its options by this name.
        import torch.distributed as dist

        dist.ProcessGroupNCCL = stand_in
        c10d._NCCL_AVAILABLE = True
        # None where torch was built without NCCL; torch warns of a default that is none, and of one that options do not share.
        c10d.default_pg_nccl_timeout = c10d.default_pg_nccl_timeout or _TIMEOUT
        _accept_hooks()
        _name_a_version()


def refuse_groups(reason: ConfigError) -> None:
    """Raise this error, as one of torch's too, wherever the program makes a process group."""

    def new_process_group_helper(*_: Any, **__: Any) -> Any:
        from xvcomm.adapters.torch.errors import as_torch

        raise as_torch(reason)

    c10d._new_process_group_helper = new_process_group_helper


def _name_a_version() -> None:
    """Let torch be asked for NCCL's version, as it does to log an error, also where it was built without NCCL.

    Else that question's own error takes the other one's place.
    """
    import torch

    if not hasattr(torch._C, "_nccl_version"):
        torch.cuda.nccl.version = lambda: (0, 0, 0)


def _accept_hooks() -> None:
    """Let DDP take the hooks that it wants NCCL 2.10 or newer for, also where torch was built without it."""
    from torch.nn.parallel import DistributedDataParallel

    check = DistributedDataParallel._check_comm_hook

    def check_comm_hook(self: Any, hook: Any) -> None:
        @functools.wraps(hook)
        def anonymous(state: Any, bucket: Any) -> Any: ...

        anonymous.__name__ = "hook"  # torch goes by the name
        check(self, anonymous)

    DistributedDataParallel._check_comm_hook = check_comm_hook


def _stand_in(backend: str, theirs: Any) -> Any:
    """A class in place of c10d's; made here, because the group's own module takes long to import."""

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            from xvcomm.adapters.torch.group import ProcessGroup

            return isinstance(instance, ProcessGroup) or (theirs is not None and isinstance(instance, theirs))

        def __getattr__(cls, name: str) -> Any:
            if name.startswith("__") or theirs is None:
                raise AttributeError(name)
            return getattr(theirs, name)

    class StandIn(metaclass=Meta):
        """Makes a group of xvcomm."""

        replaced = theirs or backend

        def __new__(cls, store: Any, rank: int, size: int, options: Any = None, timeout: Any = None) -> Any:
            from xvcomm.adapters.torch.group import make

            return make(store, rank, size, timeout or getattr(options, "_timeout", options), backend)

    StandIn.Options = Options  # type: ignore[attr-defined]
    StandIn.__name__ = StandIn.__qualname__ = _CLASSES[backend]
    return StandIn
