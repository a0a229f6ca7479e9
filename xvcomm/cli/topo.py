"""`xvcomm topo`: draws the hosts of a job with their islands, GPUs, network interfaces and measured connections."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

import xvcomm
from xvcomm.config import Config
from xvcomm.errors import ArgumentError
from xvcomm.types import cluster
from xvcomm.types.cluster import Cluster, Host, Nic, Place, Rail


def topo(
    file: Annotated[Path | None, typer.Argument(help="A topology file to draw, instead of this job.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a topology file, also for XVCOMM_AFFINITY.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw it as SVG into this file.")] = None,
    seconds: Annotated[
        float, typer.Option(min=0, help="Measure each connection, in each direction, for so long; 0: do not.")
    ] = 0.5,
) -> None:
    """Draw hosts, islands, GPUs, network interfaces, their distances on PCIe, and the connections with their speeds.

    Started as the ranks of a job, on its hosts; alone it draws this host. Rank 0 prints.
    """
    found = _read(file) if file is not None else _ask(seconds)
    if found is None:
        return
    for line in lines(found):
        typer.echo(line)
    if out is not None:
        _write(out, cluster.write(found))
    if svg is not None:
        from xvcomm.cli.drawing import draw

        _write(svg, draw(found).encode())


def _read(file: Path) -> Cluster:
    try:
        return cluster.read(file.read_bytes())
    except OSError as error:
        raise ArgumentError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ArgumentError(f"{file} is no topology file, as xvcomm topo --out writes it: {error}") from error


def _write(file: Path, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except OSError as error:
        raise ArgumentError(f"{file} cannot be written: {error.strerror}") from error


def _ask(seconds: float) -> Cluster | None:
    from xvcomm.cli.survey import survey  # imports numba

    with xvcomm.init(device="host") as comm:
        return survey(comm, Config.from_env(), os.environ, seconds)


def lines(found: Cluster) -> Iterator[str]:
    """The cluster as text."""
    ranks = [place for host in found.hosts for place in host.ranks]
    islands = {place.island: 0 for place in ranks}
    for place in ranks:
        islands[place.island] += 1
    yield (
        f"{_count(len(ranks), 'rank')} on {_count(len(found.hosts), 'host')}; islands: "
        + ", ".join(f"{label} x {count}" for label, count in islands.items())
        + ("; a rehearsal" if found.rehearsal else "")
    )
    for host in found.hosts:
        yield ""
        yield from _host(host)
    if found.rails:
        yield ""
        yield "connections, as measured"
        yield from _rails(found.rails)


def _host(host: Host) -> Iterator[str]:
    yield f"host {host.name}"
    yield from (f"  {line}" for line in _columns([_rank(place) for place in host.ranks]))
    yield from (f"  {line}" for line in _columns([_nic(nic) for nic in host.nics]))
    gpus = [place for place in host.ranks if place.distances]
    if gpus:
        names = [nic.name for nic in host.nics]
        rows = [("PCIe", *names)]
        rows += [(f"rank {place.rank}", *(place.distances.get(name, "") for name in names)) for place in gpus]
        yield from (f"  {line}" for line in _columns(rows))


def _rank(place: Place) -> tuple[str, ...]:
    uses = f"uses {', '.join(place.nics)}" if place.nics else ""
    return f"rank {place.rank}", f"island {place.island}", place.device, place.pcie, uses


def _nic(nic: Nic) -> tuple[str, ...]:
    speed = f"{nic.gigabits:g} Gbit/s" if nic.gigabits else "speed unknown"
    node = f"NUMA node {nic.numa_node}" if nic.numa_node >= 0 else ""
    return nic.name, ", ".join(nic.addresses), speed, device_text(nic), nic.pcie, node


def device_text(nic: Nic) -> str:
    """The RDMA device of a network interface, or that it is a device without one."""
    return nic.rdma if nic.is_interface else "InfiniBand"


def _rails(rails: Sequence[Rail]) -> Iterator[str]:
    pairs: dict[tuple[str, str], list[Rail]] = {}
    for rail in rails:
        pairs.setdefault((rail.source, rail.target), []).append(rail)
    for (source, target), its in pairs.items():
        together = sum(rail.speed if rail.share is None else rail.share for rail in its)
        yield f"  {source} to {target}: {speed_text(together)}"
        rows = [(f"{rail.local} to {rail.remote}", rail.scheme, *speeds(rail)) for rail in its]
        yield from (f"    {line}" for line in _columns(rows))


def speeds(rail: Rail) -> tuple[str, str]:
    """The two speeds of a rail, for users; the second is empty in older files."""
    if rail.share is None:
        return speed_text(rail.speed), ""
    return f"{speed_text(rail.speed)} alone", f"{speed_text(rail.share)} with all"


def speed_text(speed: float) -> str:
    """Bytes a second for users, with three digits."""
    unit, name = (1e9, "GB/s") if speed >= 0.9995e9 else (1e6, "MB/s") if speed >= 0.9995e6 else (1e3, "kB/s")
    return f"{speed / unit:.3g} {name}"


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Rows with their cells below each other; empty columns are left out."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width).rstrip()


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
