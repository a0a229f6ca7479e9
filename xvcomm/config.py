"""Settings from `XVCOMM_*` variables. No other module reads these variables."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from xvcomm.errors import ConfigError

_ADDRESS = re.compile(r"[^:]*:\d{1,5}|\[.*\]:\d{1,5}")
_JOB = re.compile(r"[A-Za-z0-9._-]{1,100}")  # it becomes part of file names


def _var(
    default: Any, doc: str, *, least: float = -math.inf, most: float = math.inf, unit: int = 1, secret: bool = False
) -> Any:
    metadata = {"doc": doc, "least": least, "most": most, "unit": unit}
    return field(default=default, repr=not secret, metadata=metadata)


def _flag(default: int | None, doc: str) -> Any:
    return _var(default, doc, least=0, most=1)


def _pages(default: int, doc: str) -> Any:
    return _var(default, f"{doc}; a multiple of 4096.", least=4096, unit=4096)


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of one process. Field `ring_slots` is read from `XVCOMM_RING_SLOTS`, and so on for each field."""

    rank: int | None = _var(None, "Rank of this process; overrides the launcher's.", least=0)
    size: int | None = _var(None, "Number of ranks; overrides the launcher's.", least=1)
    local_rank: int | None = _var(None, "Rank among the ranks of this host; overrides the launcher's.", least=0)
    local_size: int | None = _var(None, "Number of ranks on this host; overrides the launcher's.", least=1)
    store: str | None = _var(
        None, "Address of the store for the rendezvous of the ranks: `tcp://host:port` or `file:///path`."
    )
    rejoin: int = _flag(
        0,
        "1: this process joins a job that runs, in the place of a rank that was lost, when the other ranks call `grow`; "
        "`xvcomm run --max-restarts` sets it.",
    )
    rejoin_timeout: float = _var(
        3600.0,
        "Seconds for which a process with `XVCOMM_REJOIN=1` waits for that, unless the job ends before.",
        least=0,
    )
    secret: str | None = _var(
        None, "Shared secret of the job, the same on all ranks; `xvcomm run` generates one.", secret=True
    )
    secret_file: str | None = _var(
        None,
        "File with that secret, for launchers that write variables into command lines, which lists of processes show. "
        "`XVCOMM_SECRET` comes first.",
    )
    job: str | None = _var(None, "Name of the job, part of the names of its shared memory files; generated if unset.")
    island: str | None = _var(
        None, "Island label of this rank, instead of the detected one; such a job is a rehearsal."
    )
    device: str | None = _var(None, "Device type of this rank: `host`, `cuda` or `rocm`; detected if unset.")
    device_index: int | None = _var(
        None, "Index of this rank's device among the host's devices of that type; the local rank if unset.", least=0
    )
    host: str | None = _var(
        None,
        "Host label of this rank: ranks with different ones behave as if on different hosts; such a job is a rehearsal.",
    )
    nics: str | None = _var(
        None,
        "Network interfaces between hosts: names, beginnings of names, addresses or networks, separated by commas; `^` in front "
        "excludes them, `=` in front (`=eth1`, `^=eth1`) takes whole names only. RDMA devices, `mlx5_0` or `mlx5_0:1`, stand for "
        "their interfaces, and those of InfiniBand for themselves; a list of these alone leaves TCP the interfaces that it has "
        "without a list. If unset, what `NCCL_SOCKET_IFNAME`, "
        "`GLOO_SOCKET_IFNAME`, `UCX_NET_DEVICES` or `NCCL_IB_HCA` names; else all but loopback, bridges and link-local "
        "addresses.",
    )
    ports: str | None = _var(
        None, "Port or range of ports, `29600-29699`, on which ranks listen for ranks of other hosts; any if unset."
    )
    tcp_congestion: str | None = _var(
        None,
        "TCP's congestion control between hosts, `cubic` for instance. If unset the system's; but to hosts that answer within a "
        "millisecond `cubic`, or `reno` where it is not allowed, in place of `bbr`, which makes pauses between packets.",
    )
    tls: int = _flag(
        0,
        "1: encrypt what goes between hosts, by TLS 1.3 with keys derived from the job's secret; the same on all ranks. Needs "
        "OpenSSL, no certificates.",
    )
    rdma: int | None = _flag(
        None,
        "1: hosts send over RDMA where both have devices, and over TCP where those fail; 0: over TCP only. If unset, 1, but 0 if "
        "`NCCL_IB_DISABLE` is 1. Not with XVCOMM_TLS, because RDMA is not encrypted. XVCOMM_NICS chooses the devices, by "
        "themselves or by their network interfaces.",
    )
    device_direct: int = _flag(
        1, "0: rings between GPUs of two hosts are in host memory, also where network cards reach the GPUs' memory."
    )
    affinity: str | None = _var(
        None,
        'File in JSON that gives RDMA devices to GPUs by PCIe address, `{"0000:65:00.0": ["mlx5_0"]}`, or one that `xvcomm topo` '
        "has written. GPUs that it does not name use the devices that are nearest to them on PCIe if these reach their memory, "
        "else all.",
    )
    rdma_pairs: int = _var(
        2,
        "Queue pairs of a network interface to each rank of other hosts, as far as 32 connections allow.",
        least=1,
        most=8,
    )
    rdma_traffic_class: int | None = _var(
        None,
        "Traffic class of RoCE packets, as the network's operator defines them; its upper 6 bits are the DSCP. InfiniBand's have "
        "one if they have a GRH. If unset, what `NCCL_IB_TC` says, else 0.",
        least=0,
        most=255,
    )
    rdma_service_level: int | None = _var(
        None, "Service level of RDMA packets, the same way; if unset, what `NCCL_IB_SL` says, else 0.", least=0, most=15
    )
    rdma_relaxed_ordering: int | None = _flag(
        None,
        "0: payload reaches memory in order on PCIe; 1: in any order, if the device can do that (relaxed ordering); if unset, "
        "what `NCCL_IB_PCI_RELAXED_ORDERING` says, else 1. Frames come in order.",
    )
    rdma_grh: int = _flag(
        0,
        "1: packets of InfiniBand have a GRH within a subnet, too. They have one anyway between subnets, and where a port "
        "requires it.",
    )
    rdma_partition_key: int | None = _var(
        None,
        "Partition of an InfiniBand subnet, by its key of 16 bits, `0x8001`; if unset the first one in the port's table.",
        least=1,
        most=0xFFFF,
    )
    rdma_timeout: int = _var(
        14, "An RDMA device waits 4.096 us * 2**this for an answer, and then repeats the packet.", least=1, most=31
    )
    rdma_retries: int = _var(
        6,
        "So many times it repeats, before the queue pair fails and other connections carry. Not 7, with which some devices "
        "repeat for ever.",
        least=1,
        most=6,
    )
    peer_timeout: float = _var(
        10.0, "Seconds without a sign of another host after which its ranks count as lost.", least=0.1
    )
    wire_threads: int = _var(
        0,
        "Threads of a rank that carry data between hosts; 0: three quarters of its share of the host's cores, at most 12.",
        least=0,
    )
    wire_slots: int = _var(16, "Slots of a ring between host ranks of different hosts.", least=4)
    wire_slot_bytes: int = _pages(256 << 10, "Bytes per slot of such a ring")
    replace: str | None = _var(None, "Backend of `torch.distributed` that xvcomm replaces: `nccl` or `gloo`.")
    timeout: float = _var(300.0, "Timeout of an operation in seconds, after which it raises DeadlineExceeded.", least=0)
    shm_dir: str = _var("/dev/shm", "Folder for shared memory files; should be a tmpfs, otherwise transfers are slow.")
    ring_lanes: int = _var(1, "Lanes of a ring between two host ranks, at most 64.", least=1, most=64)
    ring_slots: int = _var(96, "Slots per lane of a ring between two host ranks.", least=2)
    ring_slot_bytes: int = _pages(16 << 10, "Bytes per slot of a ring between two host ranks")
    gpu_ring_lanes: int = _var(
        8,
        "Lanes of a ring with a GPU at one or both ends, at most 64; for collectives 1.5 times, between hosts twice as many.",
        least=1,
        most=64,
    )
    gpu_ring_slots: int = _var(4, "Slots per lane of such a ring.", least=2)
    gpu_ring_slot_bytes: int = _pages(
        256 << 10, "Bytes per slot of such a ring, a quarter of it for collectives on one host"
    )
    peer_memory: int = _flag(
        1, "1: place rings between GPUs of one island in GPU memory where the GPUs have peer access; 0: never."
    )
    peer_ring_lanes: int = _var(16, "Lanes of a ring in GPU memory, at most 64.", least=1, most=64)
    peer_ring_slots: int = _var(4, "Slots per lane of a ring in GPU memory.", least=2)
    peer_ring_slot_bytes: int = _pages(256 << 10, "Bytes per slot of a ring in GPU memory")
    compiled_launch: int = _flag(
        1,
        "1: operations of a shape that has run before are launched by compiled code; 0: Python launches all of them, "
        "with the same results, to find out which of the two is at fault.",
    )
    kernel_cache: str | None = _var(
        None,
        "Folder for compiled kernels, which no other user may be able to write; if unset `~/.cache/xvcomm`, or "
        "`/tmp/xvcomm-UID` if that cannot be written.",
    )
    stage_bytes: int = _pages(256 << 10, "Bytes that a rank stages at a time in host collectives")
    process_memory: int = _flag(
        1,
        "1: host ranks read and write each other's arrays (process_vm_readv) where the system permits it and it is "
        "faster; 0: never.",
    )
    segment_bytes: int = _var(
        4 << 20, "Bytes of one segment of a hierarchical collective on each link between islands.", least=4096
    )
    gpu_segment_bytes: int = _var(48 << 20, "The same if any rank has a GPU.", least=4096)
    metrics: str | None = _var(
        None,
        "Address and port, `:9400` or `10.0.0.1:9400`, on which the rank with local rank 0 serves metrics for Prometheus; the "
        "others of its host take the next ports. With port 0 each takes any. Needs the extra `metrics`.",
    )
    ranges: int = _flag(
        0, "1: operations of GPUs are ranges in their vendor's profiler, by NVTX or ROCTx, with name and size."
    )
    spin_us: float = _var(20.0, "Microseconds to spin before yielding the CPU core.", least=0)
    trace_records: int = _var(512, "Number of operations that the flight recorder keeps.", least=16)
    trace_dir: str | None = _var(
        None,
        "Folder to which ranks write their flight recorders at abnormal ends, for `xvcomm explain` and `xvcomm trace`; nothing "
        "is written if unset.",
    )
    explain: int = _flag(1, "0: no report at deadlines, and none on SIGUSR1.")

    def __post_init__(self) -> None:
        if self.job is not None and not _JOB.fullmatch(self.job):
            raise ConfigError(f"XVCOMM_JOB={self.job!r}: up to 100 letters, digits, and . _ - are allowed")
        if self.metrics is not None and not _ADDRESS.fullmatch(self.metrics):
            raise ConfigError(
                f"XVCOMM_METRICS={self.metrics!r}: expected an address and a port, like ':9400' or '10.0.0.1:9400'"
            )
        for f in fields(self):
            unit = f.metadata["unit"]
            if unit > 1 and getattr(self, f.name) % unit:
                raise ConfigError(f"XVCOMM_{f.name.upper()}={getattr(self, f.name)}: must be a multiple of {unit}")

    def port_range(self) -> range:
        """The ports on which ranks may listen for other hosts; port 0 stands for any free one.

        Raises:
            ConfigError: XVCOMM_PORTS is no port and no range.
        """
        if not self.ports:
            return range(1)
        first, _, last = self.ports.partition("-")
        try:
            found = range(int(first), int(last or first) + 1)
        except ValueError:
            found = range(0)
        if not found or found[0] < 1 or found[-1] > 65535:
            raise ConfigError(f"XVCOMM_PORTS={self.ports!r}: expected a port, 29600, or a range, 29600-29699")
        return found

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Config:
        """Read the settings from the environment; empty variables count as unset.

        Raises:
            ConfigError: a variable has an invalid value, or an unknown `XVCOMM_*` variable is set; names the variable and what
                is allowed. Or the file with the secret has none.
        """
        env = os.environ if env is None else env
        known = {f"XVCOMM_{f.name.upper()}": f for f in fields(cls)}
        unknown = sorted(k for k in env if k.startswith("XVCOMM_") and k not in known)
        if unknown:
            raise ConfigError(f"unknown variable {unknown[0]}; known are {', '.join(known)}")
        values: dict[str, Any] = {}
        for variable, f in known.items():
            text = env.get(variable, "")
            if text:
                values[f.name] = _parse(variable, text, str(f.type), f.metadata["least"], f.metadata["most"])
        if "secret_file" in values and "secret" not in values:
            values["secret"] = _secret_of(values["secret_file"])
        return cls(**values)


def _parse(variable: str, text: str, kind: str, least: float, most: float) -> Any:
    convert: Any = int if kind.startswith("int") else float if kind.startswith("float") else str
    try:
        value = int(text, 16) if convert is int and text.lower().startswith("0x") else convert(text)
    except ValueError:
        raise ConfigError(f"{variable}={text!r}: expected {convert.__name__}") from None
    if convert is not str and not least <= value <= most:  # false for nan, too
        limit = f" and at most {most:g}" if most < math.inf else ""
        raise ConfigError(f"{variable}={text!r}: must be at least {least:g}{limit}")
    return value


def _secret_of(file: str) -> str:
    """The text of a file, without the end of its line."""
    try:
        text = Path(file).read_text(errors="surrogateescape").strip()
    except OSError as error:
        raise ConfigError(f"XVCOMM_SECRET_FILE={file!r} cannot be read: {error.strerror}") from error
    if not text:
        raise ConfigError(f"XVCOMM_SECRET_FILE={file!r} is empty: write the output of `openssl rand -hex 16` into it")
    return text


def replacement() -> str | None:
    """`XVCOMM_REPLACE` alone. It is read when torch is imported, where an error about another variable would be out of place."""
    return os.environ.get("XVCOMM_REPLACE") or None


def rejoins() -> bool:
    """`XVCOMM_REJOIN` alone, read for the same reason."""
    return os.environ.get("XVCOMM_REJOIN", "0") not in ("", "0")


def kernel_cache() -> str | None:
    """`XVCOMM_KERNEL_CACHE` alone, read for the same reason: kernels are compiled when modules are imported."""
    return os.environ.get("XVCOMM_KERNEL_CACHE") or None


def table() -> list[tuple[str, str, str]]:
    """Every variable as (name, default, description), in order; the docs and `xvcomm doctor` print it."""
    return [
        (f"XVCOMM_{f.name.upper()}", "" if f.default is None else str(f.default), f.metadata["doc"])
        for f in fields(Config)
    ]
