"""Whose memory an array lies in, by DLPack's device types: what backends say of themselves, for the floors below them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import ClassVar, Protocol

from xvcomm.errors import ArrayError

_CPU = 1  # kDLCPU


class Vendor(Protocol):
    """What a backend says of its memory; see `abc.backend.Backend`."""

    kind: ClassVar[str]
    dlpack_device: ClassVar[int]
    dlpack_host: ClassVar[tuple[int, ...]]
    torch_device: ClassVar[str]
    xla_platform: ClassVar[str]

    @classmethod
    def serves(cls, library: ModuleType) -> bool:
        """See `Backend.serves`."""


class _Vendors:
    """The vendors that are known so far.

    Attributes:
        discover: registers those of all installed backends; they are loaded only when an array of none that is known comes.
    """

    def __init__(self) -> None:
        self.by_kind: dict[str, type[Vendor]] = {}
        self.kinds = {_CPU: "host"}
        self.discover: Callable[[], None] = lambda: None


_vendors = _Vendors()


def register(vendor: type[Vendor]) -> None:
    """Know a vendor's memory. Of two that claim one device type the first keeps it."""
    _vendors.by_kind.setdefault(vendor.kind, vendor)
    _vendors.kinds.setdefault(vendor.dlpack_device, vendor.kind)
    for pinned in vendor.dlpack_host:
        _vendors.kinds.setdefault(pinned, "host")


def on_unknown(discover: Callable[[], None]) -> None:
    """Call `discover`, which registers vendors, when no registered one matches a device type, a kind or a framework's build."""
    _vendors.discover = discover


def kind_of(device_type: int) -> str:
    """The kind of device whose memory has a DLPack device type.

    Raises:
        ArrayError: no installed backend has such memory.
    """
    if device_type not in _vendors.kinds:
        _vendors.discover()
    found = _vendors.kinds.get(device_type)
    if found is None:
        raise ArrayError(f"DLPack device type {device_type} is not one that xvcomm knows; install a backend for it")
    return found


def of(kind: str) -> type[Vendor]:
    """The vendor of a kind of device.

    Raises:
        ArrayError: no backend of this kind is installed.
    """
    if kind not in _vendors.by_kind:
        _vendors.discover()
    try:
        return _vendors.by_kind[kind]
    except KeyError:
        raise ArrayError(f"no backend for device {kind!r} is installed; `xvcomm doctor` lists those that are") from None


def kind_where(holds: Callable[[type[Vendor]], bool]) -> str | None:
    """The first kind of device whose vendor meets a condition, or None; those of this process's devices come first."""
    for look in (_vendors.discover, lambda: None):
        for kind, vendor in _vendors.by_kind.items():
            if holds(vendor):
                return kind
        look()
    return None


def kind_in(library: ModuleType) -> str:
    """The kind of device that a framework's build is for.

    Raises:
        ArrayError: no installed backend serves it.
    """
    found = kind_where(lambda vendor: vendor.serves(library))
    if found is None:
        raise ArrayError(f"no backend serves the GPUs that this build of {library.__name__} is for; install one")
    return found
