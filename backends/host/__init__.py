"""Host memory: movers and native collectives in numba, over shared memory. This backend works on every machine."""

from __future__ import annotations

from xvcomm.abc.backend import Backend
from xvcomm.abc.collective import Collective
from xvcomm.abc.device import Device
from xvcomm.abc.store import Store
from xvcomm.config import Config
from xvcomm.types.deadline import Deadline

__all__ = ["HostBackend"]


class HostBackend(Backend):
    """Ranks with arrays in host memory."""

    kind = native = "host"
    dlpack_device = 1
    torch_device = xla_platform = "cpu"

    def refusal(self) -> tuple[str, str] | None:
        """See `Backend.refusal`; host memory is always available."""
        return None

    def device(self, config: Config) -> Device:
        from xvcomm.backends.host.device import HostDevice

        return HostDevice(config)

    def collective(
        self, config: Config, job: str, me: int, members: int, name: str, store: Store, deadline: Deadline
    ) -> Collective:
        from xvcomm.backends.host.collective import HostCollective

        return HostCollective(config, job, me, members, name, store, deadline)
