"""What each rank tells of itself, and whether ranks of one vendor agree."""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
from contextlib import suppress
from pathlib import Path

import msgspec

import xvcomm
from xvcomm.backends.ccl.backend import GpuBackend
from xvcomm.backends.ccl.joining import version_text
from xvcomm.backends.gpu.vendor import Runtime
from xvcomm.cli.bench.memory import HostMemory, Memory, TorchMemory, memory_of
from xvcomm.cli.certify.contract import Finding, Result, Section, Table
from xvcomm.cli.certify.control import Control
from xvcomm.cli.certify.job import Facts, Job
from xvcomm.cli.facts import installed
from xvcomm.comm.communicator import Communicator
from xvcomm.config import Config
from xvcomm.engine.session import plugins
from xvcomm.errors import BackendUnavailable
from xvcomm.testing.graphs import CAPTURES
from xvcomm.testing.inside import context

_CAPTURED_BY = {"cuda": "cupy", "rocm": "rocm.bindings"}
_MOST_ROWS = 64


def facts_of(comm: Communicator) -> Facts:
    """This rank's facts."""
    own = context(comm).device
    able, runtime = own.capabilities(), getattr(own, "runtime", None)
    config, topology = Config.from_env(os.environ), comm.topology
    memory: Memory | None = None
    with suppress(BackendUnavailable):
        memory = memory_of(comm)
    return Facts(
        hostname=socket.gethostname(),
        host=topology.hosts[comm.rank],
        kind=able.kind,
        device=memory.name if memory else f"{able.kind} {able.index}, {able.architecture}",
        gpu=runtime.bus(able.index) if isinstance(runtime, Runtime) else "",
        island=topology.island_of(comm.rank).label,
        rehearsal=config.island is not None or config.host is not None,
        asynchronous=able.asynchronous,
        native=_native(comm, able.architecture),
        versions=_versions(able.kind),
        pid=os.getpid(),
        graphs=able.kind in CAPTURES and importlib.util.find_spec(_CAPTURED_BY[able.kind]) is not None,
        torch=_torch(memory),
        memory=memory is not None,
        rdma=any(Path("/sys/class/infiniband").glob("*")),
    )


def _native(comm: Communicator, architecture: str) -> str:
    """Name and version of the library that joins this rank's island."""
    backend = plugins.backend(comm.device)
    if not isinstance(backend, GpuBackend):
        return f"{backend.native} of xvcomm {xvcomm.__version__}"
    try:
        library = backend.library(architecture)
        return f"{library.name} {version_text(library.version())}"
    except (ImportError, OSError, RuntimeError) as error:
        return f"{backend.native} is missing: {error}"


def _versions(kind: str) -> dict[str, str]:
    ours = {"xvcomm": xvcomm.__version__, "python": platform.python_version()}
    return {**ours, **installed(plugins.backend(kind).packages)}


def _torch(memory: Memory | None) -> str:
    """Why torch cannot train on this rank's device, or an empty text."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: pip install xvcomm[torch]"
    if isinstance(memory, HostMemory | TorchMemory):
        return ""
    return "the torch that is installed is not built for this device; see docs/install.md"


def _run(comm: Communicator, control: Control, job: Job, result: Result) -> None:
    result.planned = 1
    told = control.collect(msgspec.to_builtins(facts_of(comm)))
    result.done = 1
    every = {rank: msgspec.convert(note, Facts) for rank, note in told}
    result.findings += compare(every)
    columns = ["rank", "host", "device", "island", "native library", "versions"]
    table = Table("Ranks" if len(every) <= _MOST_ROWS else f"The first {_MOST_ROWS} of {len(every)} ranks", columns)
    for rank, each in list(every.items())[:_MOST_ROWS]:
        versions = ", ".join(f"{name} {version}" for name, version in each.versions.items())
        table.rows.append([str(rank), each.hostname, each.device, each.island, each.native, versions])
    result.tables.append(table)


def compare(every: dict[int, Facts]) -> list[Finding]:
    """What differs between ranks and should not: versions of xvcomm over all, of a vendor's libraries among its ranks."""
    found = []
    for kind in sorted({each.kind for each in every.values()}):
        ranks = {rank: each for rank, each in every.items() if each.kind == kind}
        names = sorted({name for each in ranks.values() for name in each.versions} - {"xvcomm", "python"})
        by_name = {"native library": {rank: each.native for rank, each in ranks.items()}}
        by_name |= {name: {rank: each.versions.get(name, "none") for rank, each in ranks.items()} for name in names}
        found += [_differ(f"{kind}: {name}", versions) for name, versions in by_name.items()]
    for name in ("xvcomm", "python"):
        found.append(_differ(name, {rank: each.versions.get(name, "none") for rank, each in every.items()}))
    return [finding for finding in found if finding is not None]


def _differ(name: str, versions: dict[int, str]) -> Finding | None:
    """A finding if ranks have several versions; that of Python is a note."""
    by_version: dict[str, list[int]] = {}
    for rank, version in versions.items():
        by_version.setdefault(version, []).append(rank)
    if len(by_version) < 2:
        return None
    told = "; ".join(f"{version} on {_ranks(ranks)}" for version, ranks in by_version.items())
    remedy = "install one version on all hosts, or put the ranks into different islands by XVCOMM_ISLAND"
    return Finding(f"several versions of {name}: {told}", remedy, wrong=name != "python")


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"


SECTION = Section("versions", "Versions: one of each library on all ranks", 0.2, lambda _: "", _run)
