"""A vendor's GPUs as a backend: a device, and the collective library of an island."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator

from xvcomm.abc.backend import Backend
from xvcomm.abc.collective import Collective
from xvcomm.abc.device import Device
from xvcomm.abc.store import Store
from xvcomm.backends.ccl.collective import CclCollective
from xvcomm.backends.ccl.joining import version_text
from xvcomm.backends.gpu.device import GpuDevice, choose
from xvcomm.backends.gpu.peer_memory import apart
from xvcomm.backends.gpu.vendor import Library, Runtime, VendorError
from xvcomm.config import Config
from xvcomm.errors import BackendUnavailable
from xvcomm.types.deadline import Deadline

_NOT_LOADED = (ImportError, OSError, AttributeError, VendorError)
"""Exceptions of the vendor's libraries, or of their Python bindings, that cannot be loaded or fail."""


class GpuBackend(Backend):
    """Base class of the CUDA and ROCm backends."""

    def __init__(self) -> None:
        self._device: GpuDevice | None = None

    @abstractmethod
    def runtime(self) -> Runtime:
        """Load and return the vendor's runtime."""

    @abstractmethod
    def library(self, architecture: str) -> Library:
        """Load and return the vendor's collective library, for GPUs of one architecture."""

    def devices(self) -> int:
        return self.runtime().count()

    def peer_memory(self) -> str:
        pairs = apart(self.runtime())
        if not pairs:
            return "all devices have peer access"
        names = ", ".join(f"{a} and {b}" for a, b in pairs)
        return f"rings in host memory between devices without peer access: {names}"

    def lacks(self) -> tuple[str, str] | None:
        """See `Backend.lacks`: the collective library, which is not needed for an island of one GPU beside other islands."""
        try:
            self.library(self.runtime().architecture(0)).version()
        except _NOT_LOADED as error:
            reason = f"no jobs of this vendor's GPUs alone, and no islands of several: {type(error).__name__}: {error}"
            return reason, f"reinstall xvcomm[{self.kind}]"
        return None

    def driver(self) -> str:
        """Version of the kernel's driver; empty if it tells none."""
        return ""

    def versions(self) -> dict[str, str]:
        found = {"driver": self.driver()}
        with contextlib.suppress(*_NOT_LOADED):
            library = self.library(self.runtime().architecture(0))
            found[library.name] = version_text(library.version())
        return {name: version for name, version in found.items() if version}

    def device(self, config: Config) -> Device:
        with self._loading():
            runtime = self.runtime()
            index = choose(config, runtime.count(), runtime.current())
            self._device = GpuDevice(runtime, index, config)
        return self._device

    def collective(
        self, config: Config, job: str, me: int, members: int, name: str, store: Store, deadline: Deadline
    ) -> Collective:
        device = self._device
        assert device is not None
        with self._loading():
            library, bus = self.library(device.capabilities().architecture), device.runtime.bus(device.index)
        return CclCollective(config, me, members, name, store, deadline, library, device.runtime, device, bus)

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        """Convert exceptions of the vendor's libraries, or of their Python bindings, to BackendUnavailable."""
        try:
            yield
        except _NOT_LOADED as error:
            raise BackendUnavailable(
                f"{self.kind}: {type(error).__name__}: {error}; reinstall xvcomm[{self.kind}], and see `xvcomm doctor`"
            ) from error
