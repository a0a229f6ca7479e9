"""`xvcomm plan`: prints the steps of a rank for a collective, and the predicted time."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from xvcomm.cli.bench.command import parse_size
from xvcomm.cli.doctor import size_text
from xvcomm.config import Config
from xvcomm.errors import ArgumentError
from xvcomm.schedule.cost import Links, Prediction, estimate
from xvcomm.schedule.layout import ROOTED, WHOLE
from xvcomm.schedule.steps import Collective, Request
from xvcomm.types.dtype import DTYPES
from xvcomm.types.topology import Topology, parse_islands

if TYPE_CHECKING:
    from xvcomm.engine.planner import Plan


def plan(
    op: Annotated[Collective, typer.Argument(help="The collective.")] = Collective.ALL_REDUCE,
    islands: Annotated[str, typer.Option(help="Islands in rank order, for instance cuda:2,rocm:2.")] = "cuda:2,rocm:2",
    ranks: Annotated[int | None, typer.Option(min=1, help="Scale the islands to this total number of ranks.")] = None,
    size: Annotated[str, typer.Option("--bytes", help="Bytes of the larger of input and output.")] = "256M",
    dtype: Annotated[str, typer.Option(help="Element type.")] = "float32",
    rank: Annotated[int, typer.Option(min=0, help="Rank whose steps are printed.")] = 0,
    root: Annotated[int, typer.Option(min=0, help="Root, if the collective has one.")] = 0,
    steps: Annotated[int, typer.Option(min=0, help="Maximum number of steps to print.")] = 40,
    native: Annotated[
        float, typer.Option(min=0.001, help="Bandwidth within an island, GB/s per rank and direction.")
    ] = 300,
    border: Annotated[
        float, typer.Option(min=0.001, help="Bandwidth of a rank's link to other islands, GB/s per direction.")
    ] = 50,
    hosts: Annotated[
        str | None, typer.Option(help="Hosts in rank order, for instance x:2,y:2; one host if left out.")
    ] = None,
    wire: Annotated[
        float, typer.Option(min=0.001, help="Bandwidth of a host's network interfaces together, GB/s per direction.")
    ] = 25,
) -> None:
    """Print the steps of one rank and the predicted time of the collective; starts no ranks and moves no data."""
    labels = scale(parse_islands(islands), ranks)
    places = ("host",) * len(labels) if hosts is None else scale(parse_islands(hosts), ranks)
    if len(places) != len(labels):
        raise ArgumentError(f"--hosts {hosts} has {len(places)} ranks, --islands {islands} has {len(labels)}")
    topology = Topology.from_labels(labels, places)
    if max(rank, root) >= topology.size:
        raise ArgumentError(f"rank {max(rank, root)} does not exist: there are {topology.size} ranks")
    request = make_request(op, topology.size, parse_size(size), dtype, root)
    from xvcomm.engine.planner import Planner  # imports numba

    planner = Planner(topology, rank, Config.from_env(), gpus=any(label != "host" for label in labels))
    begin = time.perf_counter()
    made = planner.plan(request)
    took = time.perf_counter() - begin
    links = Links(native_bandwidth=native * 1e9, border_bandwidth=border * 1e9, wire_bandwidth=wire * 1e9)
    for line in describe(topology, made, steps):
        typer.echo(line)
    typer.echo("")
    for line in costs(request, estimate(request, topology, made.segment, links, made.exchange), links):
        typer.echo(line)
    typer.echo(f"planned in {took * 1e3:.1f} ms; cached for the next call")


def scale(labels: tuple[str, ...], ranks: int | None) -> tuple[str, ...]:
    """Labels of `ranks` ranks with the same islands in the same proportions.

    Raises:
        ArgumentError: there are fewer ranks than islands.
    """
    if ranks is None or ranks == len(labels):
        return labels
    names = list(dict.fromkeys(labels))
    if ranks < len(names):
        raise ArgumentError(f"{ranks} ranks cannot form {len(names)} islands; ask for more ranks")
    ends, seen = [0], 0
    for index, name in enumerate(names, start=1):
        seen += labels.count(name)
        ends.append(min(max(ends[-1] + 1, ranks * seen // len(labels)), ranks - len(names) + index))
    return tuple(name for name, begin, end in zip(names, ends, ends[1:], strict=False) for _ in range(end - begin))


def make_request(op: Collective, ranks: int, size: int, dtype: str, root: int) -> Request:
    """A collective of `size` bytes with equal parts for all ranks.

    Raises:
        ArgumentError: the dtype is unknown.
    """
    itemsize = {d.name: d.itemsize for d in DTYPES}.get(dtype)
    if itemsize is None:
        raise ArgumentError(f"unknown dtype {dtype!r}; known are {', '.join(d.name for d in DTYPES)}")
    elements = size // itemsize
    where = root if op in ROOTED else -1
    if op in WHOLE:
        return Request(op, itemsize, count=elements, root=where)
    if op is Collective.ALL_TO_ALL:
        alike = (elements // ranks,) * ranks
        return Request(op, itemsize, counts=alike, recv_counts=alike)
    return Request(
        op, itemsize, counts=tuple(elements // ranks + (r < elements % ranks) for r in range(ranks)), root=where
    )


def describe(topology: Topology, made: Plan, steps: int) -> list[str]:
    """The topology and the plan, limited to `steps` steps."""
    islands = ", ".join(f"{i.label} x {i.size}" for i in topology.islands)
    ranks = Counter(topology.hosts)
    hosts = "; hosts: " + ", ".join(f"{name} x {count}" for name, count in ranks.items()) if len(ranks) > 1 else ""
    head, *lines = made.explain()
    more = len(lines) - steps
    return [
        f"{topology.size} ranks: {islands}{hosts}",
        head,
        *lines[:steps],
        *([f"      ... {more} more"] if more > 0 else []),
    ]


def costs(request: Request, prediction: Prediction, links: Links) -> list[str]:
    """The prediction as text."""
    size = (request.count or sum(request.counts)) * request.itemsize
    rate = size / prediction.seconds / 1e9 if prediction.seconds else 0.0
    lanes = ", ".join(f"{lane.value} {seconds * 1e6:.0f} us" for lane, seconds in prediction.busy.items())
    return [
        f"predicted: {prediction.seconds * 1e6:.1f} us for {size_text(size)}, {rate:.2f} GB/s; slowest is rank {prediction.rank}",
        f"busy on it: {lanes}",
        f"model: {links.native_bandwidth / 1e9:g} GB/s within an island, "
        f"{links.border_bandwidth / 1e9:g} GB/s per link between islands, {links.wire_bandwidth / 1e9:g} GB/s per host",
    ]
