"""`xvcomm doctor`: what this machine supports, what is unavailable and why, and how to fix it."""

from __future__ import annotations

import json
import os
import platform
import resource
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from xvcomm.abc.transport import Interface
from xvcomm.backends.rdma import report as rdma
from xvcomm.cli import cluster, reach
from xvcomm.cli.facts import installed
from xvcomm.config import Config, table
from xvcomm.engine.session import plugins, watchdog
from xvcomm.engine.session.presence import NOWHERE, Presence
from xvcomm.errors import ConfigError, XvcommError
from xvcomm.jit.cache import REMEDY, kernel_cache
from xvcomm.rendezvous.environment import discover

_PACKAGES = (
    "xvcomm", "numpy", "numba", "ml_dtypes", "msgspec", "torch", "jax", "mpi4py",
)  # fmt: skip
_LEAST_SHM = 64 << 20
_LEAST_FILES = 1024
_LIMITS = {
    "open files (nofile)": resource.RLIMIT_NOFILE,
    "locked memory (memlock)": resource.RLIMIT_MEMLOCK,
    "processes (nproc)": resource.RLIMIT_NPROC,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem and its remedy; `fatal` if it prevents jobs on host memory."""

    what: str
    remedy: str
    fatal: bool


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the command shows; `backends` and `transports` contain name, usable, reason and remedy."""

    machine: dict[str, str]
    versions: dict[str, str]
    shared_memory: dict[str, Any]
    limits: dict[str, str]
    backends: list[dict[str, Any]]
    transports: list[dict[str, Any]]
    interfaces: list[Interface]
    rdma: list[dict[str, Any]]
    direct: list[dict[str, Any]]
    variables: list[dict[str, str]]
    problems: list[Problem]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Also show settings that are not set.")] = False,
    hosts: Annotated[
        bool, typer.Option("--reach", help="Show which hosts reach each other; start it as a job's ranks.")
    ] = False,
    ranks: Annotated[
        bool, typer.Option("--cluster", help="Show what differs between the ranks of a job; start it as these.")
    ] = False,
) -> None:
    """Examine this machine: cores, memory, limits, versions, backends and transports, and the settings.

    Exits with code 1 if jobs on host memory cannot work here; with --reach, if two hosts do not reach each other; with --cluster,
    if ranks differ or a connection is blocked.
    """
    if ranks:
        raise typer.Exit(0 if cluster.cluster(os.environ, as_json) else 1)
    if hosts:
        raise typer.Exit(0 if reach.reach(os.environ, as_json) else 1)
    report = examine(os.environ)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    else:
        show(report, Console(), every)
    raise typer.Exit(1 if any(p.fatal for p in report.problems) else 0)


def examine(env: Mapping[str, str]) -> Report:
    """Collect the report; changes nothing."""
    problems: list[Problem] = []
    try:
        config = Config.from_env(env)
    except ConfigError as error:
        problems.append(Problem(str(error), "correct or unset the variable", fatal=True))
        config = Config()
    machine = _machine() | {"compiled kernels": _kernels(config, problems)}
    try:
        launcher = discover(env, config)
        machine["launcher"] = f"{launcher.name}: rank {launcher.rank} of {launcher.size}"
    except ConfigError as error:
        problems.append(Problem(str(error), "start the ranks with a launcher, or unset the variable", fatal=True))
    backends = [_found(f) | _devices(f) for f in plugins.backends()]
    transports = [_found(f) for f in plugins.transports()]
    problems += _missing("backend", "host", backends) + _missing("transport", "shm", transports)
    shared_memory = _shared_memory(Path(config.shm_dir), problems)
    interfaces = _interfaces(config, env, problems)
    return Report(
        machine=machine,
        versions=_versions(),
        shared_memory=shared_memory,
        limits=_limits(problems),
        backends=backends,
        transports=transports,
        interfaces=interfaces,
        rdma=[asdict(device) for device in rdma.examine(config, env, interfaces)],
        direct=_direct(config, env, interfaces),
        variables=_variables(env),
        problems=problems,
    )


def _found(found: plugins.Found) -> dict[str, Any]:
    return {"name": found.name, "usable": found.usable, "reason": found.reason, "remedy": found.remedy}


def _direct(config: Config, env: Mapping[str, str], interfaces: Sequence[Interface]) -> list[dict[str, Any]]:
    """How far RDMA devices come with the memory of each vendor's first GPU."""
    rows = []
    for found in plugins.backends():
        if not found.usable or found.name == "host":
            continue
        from xvcomm.backends.rdma import direct  # loads numba, which a host without GPUs need not

        try:
            trials = direct.examine(config, env, interfaces, plugins.backend(found.name).device(config))
        except XvcommError as error:
            rows.append({"gpu": found.name, "device": "", "direction": "", "grade": "", "reason": str(error)})
            continue
        rows += [{"gpu": found.name} | asdict(trial) for trial in trials]
    return rows


def _interfaces(config: Config, env: Mapping[str, str], problems: list[Problem]) -> list[Interface]:
    """The network interfaces that transports use between hosts, and the others."""
    found = [
        interface
        for transport in plugins.transports()
        if transport.usable
        for interface in transport.load().interfaces(config, env)
    ]
    if not any(interface.used for interface in found):
        what = "no network interface can be used: jobs on several hosts cannot run"
        problems.append(Problem(what, "set XVCOMM_NICS to one of those below", fatal=False))
    return found


def _devices(found: plugins.Found) -> dict[str, Any]:
    """Number of devices of a backend, their access to each other's memory, and unsupported features with their remedy."""
    if not found.usable:
        return {"devices": 0, "peer_memory": "", "lacks": ""}
    backend = found.load()()
    count, (lacks, remedy) = backend.devices(), backend.lacks() or ("", "")
    return {
        "devices": count, "peer_memory": backend.peer_memory() if count > 1 else "", "lacks": lacks, "remedy": remedy
    }  # fmt: skip


def _remarks(found: Mapping[str, Any]) -> str:
    return found["reason"] or "; ".join(filter(None, (found.get("lacks"), found.get("peer_memory"))))


def _missing(kind: str, name: str, found: list[dict[str, Any]]) -> list[Problem]:
    for one in found:
        if one["name"] == name:
            return [] if one["usable"] else [Problem(f"{kind} {name}: {one['reason']}", one["remedy"], fatal=True)]
    return [
        Problem(f"{kind} {name} is not registered", "install xvcomm again: pip install --force-reinstall xvcomm", True)
    ]


def _kernels(config: Config, problems: list[Problem]) -> str:
    """Folder of compiled kernels, and why a preferred one is not used."""
    kept = kernel_cache(config.kernel_cache)
    if not kept.writable:
        what = f"compiled kernels cannot be stored ({kept.remarks}): every process compiles them again"
        problems.append(Problem(what, REMEDY, fatal=False))
        return f"{kept} (read only)" if kept.folder else str(kept)
    return f"{kept} ({kept.remarks})" if kept.remarks else str(kept)


def _machine() -> dict[str, str]:
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 0
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processor": cpu_model(),
        "cores": str(present) if usable == present else f"{usable} of {present} (affinity of this process)",
        "NUMA nodes": str(max(1, len(nodes))),
        "memory": size_text(memory),
        "network": ", ".join(sorted(p.name for p in Path("/sys/class/net").glob("*"))) or "none",
    }


def cpu_model() -> str:
    """CPU model from /proc/cpuinfo, or the machine's architecture."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _versions() -> dict[str, str]:
    packages = *_PACKAGES, *plugins.packages()
    return {"python": platform.python_version(), **dict.fromkeys(packages, "not installed"), **installed(packages)}


def _shared_memory(folder: Path, problems: list[Problem]) -> dict[str, Any]:
    try:
        stat = os.statvfs(folder)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="xvcomm-doctor-"):
            pass
    except OSError as error:
        remedy = "mount a tmpfs there, or set XVCOMM_SHM_DIR to a writable folder"
        problems.append(Problem(f"shared memory: {error}", remedy, fatal=True))
        return {"folder": str(folder), "usable": False}
    kind, free = _filesystem(folder), stat.f_bavail * stat.f_frsize
    if kind != "tmpfs":
        problems.append(Problem(f"{folder} is {kind}, not tmpfs: slow", "set XVCOMM_SHM_DIR to a tmpfs", fatal=False))
    if free < _LEAST_SHM:
        remedy = f"free or enlarge it: mount -o remount,size=2G {folder} (docker run --shm-size=2g)"
        problems.append(Problem(f"{folder} has only {size_text(free)} free", remedy, fatal=False))
    left = [file.name for file in folder.glob("xvcomm-*")]
    return {
        "folder": str(folder),
        "usable": True,
        "filesystem": kind,
        "bytes": stat.f_blocks * stat.f_frsize,
        "free": free,
        "deaths_noticed_by": _watching(folder, problems),
        "xvcomm_files": sorted(left),
    }


def _watching(folder: Path, problems: list[Problem]) -> str:
    """How a rank detects that another rank of its host has died."""
    refused, locked = watchdog.refusal(), Presence.take(str(folder)).byte != NOWHERE
    locks = f"locks on {folder}, checked ten times per second"
    if not refused:
        return f"process descriptors (pidfd_open); {locks}, between PID namespaces" if locked else "process descriptors"
    if locked:
        return f"{locks} ({refused})"
    remedy = (
        "allow pidfd_open in the container's seccomp filter, or set XVCOMM_SHM_DIR to a tmpfs, which supports locks"
    )
    what = f"the death of a rank is noticed only at a deadline: {refused}, and {folder} does not support locks"
    problems.append(Problem(what, remedy, fatal=False))
    return "nothing"


def _filesystem(folder: Path) -> str:
    real, best, kind = folder.resolve(), -1, "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, what, *_ = line.split(" ")
        if real.is_relative_to(where) and len(where) > best:
            best, kind = len(where), what
    return kind


def _limits(problems: list[Problem]) -> dict[str, str]:
    limits = {}
    for name, number in _LIMITS.items():
        soft, hard = (
            "unlimited" if v == resource.RLIM_INFINITY else size_text(v) if "memory" in name else str(v)
            for v in resource.getrlimit(number)
        )
        limits[name] = soft if soft == hard else f"{soft} (up to {hard})"
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < _LEAST_FILES:
        problems.append(Problem(f"only {files} open files allowed", f"ulimit -n {_LEAST_FILES}", fatal=False))
    return limits


def _variables(env: Mapping[str, str]) -> list[dict[str, str]]:
    rows = []
    for name, default, doc in table():
        value = env.get(name, "")
        shown = "(set)" if value and name == "XVCOMM_SECRET" else value
        rows.append({"name": name, "value": shown, "default": default, "meaning": doc})
    return rows


def size_text(count: float) -> str:
    """Bytes as text: `256 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def show(report: Report, console: Console, every: bool = False) -> None:
    """Print the verdict and the problems, then the report as tables.

    Args:
        every: also show settings that are not set.
    """
    _show_verdict(report, console)
    shm = dict(report.shared_memory)
    if shm["usable"]:
        shm = {**shm, "bytes": size_text(shm["bytes"]), "free": size_text(shm["free"])}
        shm["xvcomm_files"] = ", ".join(shm["xvcomm_files"]) or "none"
    console.print(_pairs("Machine", report.machine.items()))
    console.print(_pairs("Versions", report.versions.items()))
    console.print(_pairs("Shared memory", ((k.replace("_", " "), str(v)) for k, v in shm.items())))
    console.print(_pairs("Limits", report.limits.items()))
    for title, found in (("Backends", report.backends), ("Transports", report.transports)):
        rows = ((f["name"], _usable(f), _remarks(f), f["remedy"]) for f in found)
        console.print(text_table(title, ("name", "usable", "remarks", "remedy"), rows))
    rows = ((i.name, i.address, "yes" if i.used else "no", i.reason) for i in report.interfaces)
    console.print(text_table("Network interfaces between hosts", ("name", "address", "used", "reason"), rows))
    _show_rdma(report.rdma, console)
    if report.direct:
        columns = ("gpu", "device", "direction", "grade", "reason")
        rows = (tuple(trial[column] for column in columns) for trial in report.direct)
        console.print(text_table("RDMA devices and GPU memory (docs/rdma.md explains the grades)", columns, rows))
    shown = [v for v in report.variables if every or v["value"]]
    if shown:
        settings = ((v["name"], v["value"], v["default"], v["meaning"]) for v in shown)
        console.print(text_table("Settings", ("variable", "value", "default", "meaning"), settings))
    if len(shown) < len(report.variables):
        console.print(f"{len(report.variables) - len(shown)} settings are not set; --all shows them.", highlight=False)


def _show_rdma(devices: list[dict[str, Any]], console: Console) -> None:
    """Each port of each RDMA device; one line if there is none."""
    if not devices:
        console.print("RDMA: this host has no device.", highlight=False)
        return
    columns = ("device", "port", "GIDs", "used", "reason", "remedy")
    rows = (row for device in devices for row in _ports(device))
    console.print(text_table("RDMA devices between hosts", columns, rows))


def _ports(device: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    node = f"NUMA node {device['numa_node']}" if device["numa_node"] >= 0 else ""
    firmware = f"firmware {device['firmware']}" if device["firmware"] else ""
    what = "\n".join(filter(None, (device["name"], device["pcie"], node, device["card"], firmware)))
    for port in device["ports"]:
        obstacles = device["obstacles"] + port["obstacles"]
        mtu = f"MTU {port['mtu']}" if port["mtu"] else ""
        state = "\n".join(filter(None, (f"{port['number']}: {port['state']}", port["link"], mtu)))
        gids = "\n".join(f"{g['index']}: {g['address']} {g['version']} {g['interface']}".rstrip() for g in port["gids"])
        reasons, remedies = (";\n".join(filter(None, (o[key] for o in obstacles))) for key in ("reason", "remedy"))
        used = f"for {', '.join(port['interfaces'])}"
        yield what, state, gids, "no" if obstacles else "yes", reasons or used, remedies
        what = ""


def _show_verdict(report: Report, console: Console) -> None:
    if any(p.fatal for p in report.problems):
        console.print("[red]Jobs on host memory cannot run here.[/]")
    else:
        console.print("[green]Jobs on host memory can run here.[/]")
    for problem in report.problems:
        colour = "red" if problem.fatal else "yellow"
        console.print(
            f"[{colour}]problem[/]: {escape(problem.what)}\n  remedy: {escape(problem.remedy)}", highlight=False
        )


def _usable(found: dict[str, Any]) -> str:
    """Yes or no, and the number of devices if there are several."""
    count = found.get("devices", 1)
    return "no" if not found["usable"] else f"yes, {count} devices" if count > 1 else "yes"


def _pairs(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    grid = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    for name, value in rows:
        grid.add_row(name, Text(value))
    return grid


def text_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table of texts, which are shown as they are."""
    made = Table(*columns, title=title, title_justify="left")
    for row in rows:
        made.add_row(*map(Text, row))
    return made
