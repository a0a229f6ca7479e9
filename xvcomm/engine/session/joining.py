"""What the ranks of a job tell each other when they join."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from xvcomm.abc.peer_memory import PeerMemory
from xvcomm.abc.transport import Capabilities
from xvcomm.config import Config
from xvcomm.engine.session.ring_sizes import RingSizes
from xvcomm.errors import ConfigError, ResourceError
from xvcomm.memory.segment import unusable
from xvcomm.types.topology import RankInfo


class Place(msgspec.Struct, frozen=True):
    """Where a process can serve a successor of the job's store.

    Attributes:
        address: see `Standby`; empty if it cannot.
        local: whether only ranks of its host reach it.
    """

    address: str = ""
    local: bool = True


class Joining(msgspec.Struct, frozen=True):
    """What a rank publishes when it joins.

    Attributes:
        offers: capabilities of its transports.
        job: prefix of the names of its shared memory, unique to this session.
        processes: its PID namespace.
        byte: byte that its process has locked; see `Presence`.
        memory: which devices its device has peer access to.
        serves: whether the job's store ends with its process.
        successor: where its process can serve a successor of the store.
        rings: what its settings ask for.
        key: see `Membership`; rank 0's is the job's.
    """

    info: RankInfo
    offers: list[Capabilities]
    job: str
    processes: str
    byte: int
    memory: PeerMemory | None
    serves: bool
    successor: Place
    rings: RingSizes
    key: bytes


decode = msgspec.msgpack.Decoder(Joining).decode


def host_identity(folder: str, label: str | None = None) -> str:
    """An identifier that is equal for two processes exactly if they can share memory: boot id and tmpfs.

    Args:
        folder: of shared memory.
        label: stands for the host in a rehearsal, see `XVCOMM_HOST`.

    Raises:
        ConfigError: the folder does not exist, or this process may not write to it.
        ResourceError: the same for the default folder.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    wrong = unusable(folder)
    if wrong and folder != Config().shm_dir:
        raise ConfigError(
            f"XVCOMM_SHM_DIR={folder!r}: {wrong}; unset it, or set it to a folder that this process can write to"
        )
    if wrong:
        raise ResourceError(
            f"{folder}, where ranks of one host share memory: {wrong}; mount a tmpfs there (mount -t tmpfs -o mode=1777 tmpfs "
            f"{folder}, docker run --tmpfs {folder}:mode=1777,size=1g), or set XVCOMM_SHM_DIR to a folder, preferably on a "
            "tmpfs, to which all ranks of the host can write"
        )
    place = os.stat(folder)
    return f"{boot}/{place.st_dev}/{place.st_ino}" + (f"/{label}" if label else "")
