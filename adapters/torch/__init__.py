"""PyTorch: the backend `xvcomm` of `torch.distributed`.

    torch.distributed.init_process_group("xvcomm")

No import is needed: torch finds the backend through the entry point `torch.backends` when it is imported. Tensors may be in
host memory and on CUDA or ROCm GPUs, and ranks in any mix of islands. `"cpu:gloo,cuda:xvcomm"` works too; xvcomm then serves
both. `XVCOMM_REPLACE=nccl` runs scripts that use NCCL on xvcomm.
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
    """Register the backend with `torch.distributed`, and let it replace the backend that `XVCOMM_REPLACE` names.

    Called by torch when it is imported. Idempotent. If `XVCOMM_REPLACE` names an unsupported backend, the import of torch still
    succeeds, and creating a process group raises ConfigError.
    """
    import torch.distributed as dist

    from xvcomm.adapters.torch.current import device_types
    from xvcomm.config import rejoins, replacement

    if not dist.is_available() or BACKEND in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=device_types())
    if rejoins():
        from xvcomm.adapters.torch.restarted import refuse

        refuse(BACKEND)
    replaced = replacement()
    if replaced:
        from xvcomm.adapters.torch.replace import install, refuse_groups
        from xvcomm.errors import ConfigError

        try:
            install(replaced)
        except ConfigError as error:
            refuse_groups(error)


def communicator(group: dist.ProcessGroup | None = None, *, device: torch.device | str | None = None) -> Communicator:
    """The communicator that carries out a process group's operations, for its `history()` and `check()`. Never blocks.

    The group owns and closes it. Operations called on it count as the group's: all ranks must call them in the same order.

    Args:
        group: of torch; None is the default group.
        device: device type of the tensors, such as `"cpu"` or `"cuda"`. By default that of the ranks: GPUs if any rank has one,
            else host memory. If all ranks have GPUs, tensors in host memory use a separate communicator.

    Raises:
        ArgumentError: the group is not of xvcomm, is not initialized, does not contain this rank, or does not serve the device.
    """
    from xvcomm.adapters.torch.creation import communicator

    return communicator(group, device)


def _create(options: object, backend_options: object) -> object:
    """Called by torch to create a group."""
    # Imported here because it loads compiled code, which would slow down `import torch`.
    from xvcomm.adapters.torch.creation import create

    return create(options, backend_options)
