"""What torch asks a group about itself. The base class would ask its C++ backends, which do not exist here."""

from __future__ import annotations

import itertools
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from xvcomm.adapters.torch.joining import Planes
from xvcomm.system.forking import forks


class Identity(dist.ProcessGroup):
    """Names, numbers and capabilities of a group, and its communicators.

    Attributes:
        options: what torch reads of a backend's options.
    """

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = True

    def __init__(self, planes: Planes, store: Any, rank: int, size: int, timeout: float, backend: str) -> None:
        # If the store is passed, pybind11 creates an object without a Python part.
        super().__init__(rank, size)
        self.planes = planes
        self._store, self._rank, self._size = store, rank, size
        self._backend = backend
        self._group_name = self._group_desc = ""
        self._forks = forks()
        self._sequence = self._splits = self._monitored = 0
        self._numbers = itertools.count(1)  # atomic, so that threads need no lock
        self.options = SimpleNamespace(
            _timeout=timedelta(seconds=timeout), global_ranks_in_group=[], group_name="", backend=backend,
            is_high_priority_stream=False,
        )  # fmt: skip

    @property
    def _device_types(self) -> list[torch.device]:
        gpu = self.planes.gpu
        return [torch.device(kind) for kind in (["cpu"] if gpu is None else ["cpu", gpu.place.type])]

    def _get_backend(self, device: torch.device) -> Identity:
        return self

    def get_group_store(self) -> Any:
        """The store that torch made for the group."""
        return self._store

    def getBackendName(self) -> str:
        """For torch's C++, the name that the group was requested by, except for Gloo's.

        DDP's logger asks a group of that name for its number of threads, which only a real Gloo group can answer.
        """
        return "xvcomm" if self._backend == "gloo" else self._backend

    def _get_backend_name(self) -> str:
        return self._backend

    name = _get_backend_name

    def getRank(self) -> int:
        """Rank of this process in the group."""
        return self._rank

    rank = getRank

    def getSize(self) -> int:
        """Number of ranks."""
        return self._size

    size = getSize

    def setGroupName(self, name: str) -> None:
        """Called by torch once the group is made."""
        self._group_name = self.options.group_name = name

    def getGroupName(self) -> str:
        """The name that torch gave it."""
        return self._group_name

    def setGroupDesc(self, desc: str) -> None:
        """Called by torch once the group is made."""
        self._group_desc = desc

    def getGroupDesc(self) -> str:
        """The description that torch gave it."""
        return self._group_desc

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """False: the group has no allocator of its own."""
        return False

    def eager_connect_single_device(self, device: torch.device) -> None:
        """No-op: groups connect when they are created."""

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        pass

    def _enable_collectives_timing(self) -> None:
        pass

    def __reduce__(self) -> Any:
        raise TypeError("a process group cannot be pickled; pass its ranks, and call new_group in the other process")
