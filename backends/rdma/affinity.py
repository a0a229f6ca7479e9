"""Which RDMA devices are near to a GPU, by their places on PCIe, or by a file of the user's."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from xvcomm.backends.rdma import sysfs
from xvcomm.errors import ConfigError
from xvcomm.types import cluster

PCIE = Path("/sys/bus/pci/devices")
_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""A host bridge or a device of PCIe in a path of sysfs."""


class Distance(enum.IntEnum):
    """What lies between two devices, as `nvidia-smi topo -m` tells them apart."""

    SWITCH = 0  # PIX, PXB
    HOST_BRIDGE = 1  # PHB
    NUMA_NODE = 2  # NODE
    SYSTEM = 3  # SYS
    UNKNOWN = 4

    @property
    def text(self) -> str:
        """For users: `the same switch`."""
        return {
            Distance.SWITCH: "the same switch",
            Distance.HOST_BRIDGE: "the same host bridge",
            Distance.NUMA_NODE: "the same NUMA node",
            Distance.SYSTEM: "another NUMA node",
            Distance.UNKNOWN: "an unknown distance",
        }[self]


def nearest(
    gpu: str, names: Sequence[str], file: str | None, host: str = "", pcie: Path = PCIE, root: Path = sysfs.ROOT
) -> tuple[list[str], dict[str, str]]:
    """The RDMA devices that a GPU should use, and why not the others.

    Args:
        gpu: PCIe address.
        names: of the devices that can be used.
        file: in JSON, the devices of GPUs by PCIe address, or a file of `xvcomm topo`; without, and for GPUs that it does not
            name, the nearest ones.
        host: this host's name in a file of `xvcomm topo`.

    Raises:
        ConfigError: the file cannot be read, or names none of the devices.
    """
    wanted = assigned(file, gpu, host)
    if not names:
        return [], {}
    if wanted is not None:
        near = [name for name in names if name in wanted]
        if not near:
            raise ConfigError(
                f"{file} (XVCOMM_AFFINITY) gives {', '.join(wanted) or 'no device'} to the GPU {gpu}; "
                f"devices that can be used: {', '.join(names)}"
            )
        return near, {name: f"{file} does not give it to the GPU {gpu}" for name in names if name not in near}
    found = {name: distance(gpu, name, pcie, root) for name in names}
    least = min(found.values(), default=Distance.UNKNOWN)
    near = [name for name in names if found[name] == least]
    why = f"{', '.join(near)} is nearer to the GPU {gpu}: {least.text}"
    return near, {name: f"{why}, instead of {found[name].text}" for name in names if name not in near}


def assigned(file: str | None, gpu: str, host: str) -> list[str] | None:
    """The devices that a file gives to a GPU; None if it does not name the GPU, or there is no file.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not file:
        return None
    try:
        given = _given(Path(file).read_bytes(), host)
    except (OSError, ValueError) as error:
        example = '{"0000:65:00.0": ["mlx5_0"]}'
        raise ConfigError(
            f"XVCOMM_AFFINITY must name a file such as {example}, or one of xvcomm topo; {file}: {error}"
        ) from error
    return next((names for address, names in given.items() if _normal(address) == _normal(gpu)), None)


def _given(text: bytes, host: str) -> Mapping[str, list[str]]:
    """RDMA devices by the GPUs' addresses, from a file of either form."""
    if "hosts" not in msgspec.json.decode(text, type=dict[str, msgspec.Raw]):
        return msgspec.json.decode(text, type=dict[str, list[str]])
    ranks = [rank for found in cluster.read(text).hosts if found.name == host for rank in found.ranks]
    return {rank.pcie: rank.nics for rank in ranks if rank.pcie and rank.nics}


def _normal(address: str) -> str:
    """A PCIe address as sysfs has it: HIP leaves the function out, and CUDA writes longer domains."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if "." in rest else f"{domain[-4:]}:{rest}.0"


def _node(device: Path) -> int:
    """Its NUMA node; -1 if the kernel does not know."""
    try:
        return int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def distance(gpu: str, name: str, pcie: Path = PCIE, root: Path = sysfs.ROOT) -> Distance:
    """What lies between a GPU and an RDMA device."""
    ours, theirs = pcie / _normal(gpu), root / name / "device"
    if not ours.exists() or not sysfs.place(name, root).pcie:
        return Distance.UNKNOWN
    shared = Path(os.path.commonpath([ours.resolve(), theirs.resolve()])).parts
    bridges = [part for part in shared if _BRIDGE.fullmatch(part)]
    if len(bridges) > 1:
        return Distance.SWITCH
    if bridges:
        return Distance.HOST_BRIDGE
    nodes = [_node(path) for path in (ours, theirs)]
    return Distance.NUMA_NODE if nodes[0] == nodes[1] >= 0 else Distance.SYSTEM
