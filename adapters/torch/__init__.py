"""PyTorch: the backend `xvcomm` of `torch.distributed`.

    torch.distributed.init_process_group("xvcomm")

No import is needed: torch finds the backend when it is imported, by the entry point `torch.backends`. Tensors may lie in
host memory and on CUDA or ROCm GPUs, and ranks on any mix of islands. `"cpu:gloo,cuda:xvcomm"` works too; xvcomm then
serves both. `XVCOMM_REPLACE=nccl` runs scripts that ask for NCCL on xvcomm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from xvcomm.comm.communicator import Communicator

__all__ = ["BACKEND", "communicator", "register"]

BACKEND = "xvcomm"


def register() -> None:
    """Make the backend known to `torch.distributed`, and let it replace what `XVCOMM_REPLACE` names.

    Called by torch when it is imported. Idempotent. Where `XVCOMM_REPLACE` names a backend that cannot be replaced, torch is
    imported all the same, and making a process group raises ConfigError.
    """
    import torch.distributed as dist

    from xvcomm.config import replacement

    if not dist.is_available() or BACKEND in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    replaced = replacement()
    if replaced:
        from xvcomm.adapters.torch.replace import install, refuse_groups
        from xvcomm.errors import ConfigError

        try:
            install(replaced)
        except ConfigError as error:
            refuse_groups(error)


def communicator(group: dist.ProcessGroup | None = None, *, device: torch.device | str | None = None) -> Communicator:
    """The communicator that carries a process group's operations, for its `history()` and `check()`. Never blocks.

    It belongs to the group, which closes it. Its own operations count as the group's: all ranks must call them alike.

    Args:
        group: of torch; None is the default group.
        device: of the tensors, `"cpu"` or `"cuda"`. None is that of the ranks themselves: their GPUs where all or some have
            one, else host memory. Where all have GPUs, tensors in host memory have a communicator of their own.

    Raises:
        ArgumentError: the group is not of xvcomm's, is not initialised, does not hold this rank, or has no such device.
    """
    from xvcomm.adapters.torch.group import communicator

    return communicator(group, device)


def _create(options: object, backend_options: object) -> object:
    """What torch calls to make a group."""
    # Here, because it imports the core's compiled code, which `import torch` must not wait for.
    from xvcomm.adapters.torch.group import create

    return create(options, backend_options)
