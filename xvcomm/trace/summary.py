"""A snapshot in figures: time and bytes of operations, which ranks come late to collectives, what connections carry."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from xvcomm.trace.format import DONE, FAILED, POSTED
from xvcomm.trace.snapshot import Group, Snapshot
from xvcomm.trace.spans import Span, groups, instances, spans
from xvcomm.types.opcode import OpCode

_LISTED = 10
"""Collectives that are listed one by one."""


class Times(msgspec.Struct, frozen=True):
    """Durations in seconds: the middle one, what nine tenths do not exceed, the longest; 0 where there are none."""

    median: float = 0.0
    p90: float = 0.0
    longest: float = 0.0


class Operations(msgspec.Struct, frozen=True):
    """All calls of one operation that were carried in one way, of all ranks.

    Attributes:
        way: what carries it, see `Record`; empty where it is not known.
        done, running, failed: number of calls by state.
        nbytes, seconds: of those that are done, in sum over the ranks.
        times: of those that are done.
    """

    op: str
    way: str
    done: int
    running: int
    failed: int
    nbytes: int
    seconds: float
    times: Times

    @property
    def bandwidth(self) -> float:
        """Bytes a second of a call, on average; 0 if no time has passed."""
        return self.nbytes / self.seconds if self.seconds else 0.0


class Lateness(msgspec.Struct, frozen=True):
    """How late one rank comes to collectives.

    Attributes:
        collectives: to how many it has come, as all others of which anything is known have.
        last: how often it was the last.
        late: time after the first rank, over all collectives.
        awaited: seconds for which all others together waited for this rank alone.
    """

    rank: int
    hostname: str
    device: str
    collectives: int
    last: int
    late: Times
    awaited: float


class Latest(msgspec.Struct, frozen=True):
    """A collective to which a rank came late: `rank` so many seconds after `first`; where it was called."""

    op: str
    sequence: int
    communicator: str
    rank: int
    first: int
    late: float
    call_site: str


class Rail(msgspec.Struct, frozen=True):
    """What a connection to another host has carried.

    Attributes:
        hostname: of the host on this side.
        connection: see `Share`.
        sent, received: bytes.
        seconds: for which operations that it has carried were under way.
    """

    hostname: str
    connection: str
    sent: int
    received: int
    seconds: float


class Device(msgspec.Struct, frozen=True):
    """How far an RDMA device came with the memory of a rank's GPU.

    Attributes:
        gpu: the rank's kind of device.
        device, writes, reads: see `Grades`.
    """

    rank: int
    hostname: str
    gpu: str
    device: str
    writes: str
    reads: str


class Summary(msgspec.Struct, frozen=True):
    """Everything.

    Attributes:
        ranks, size: of how many ranks anything is known; number of ranks.
        seconds: from the begin of the oldest operation to the snapshot.
        latest: the collectives to which a rank came latest, the worst first.
    """

    job: str
    ranks: int
    size: int
    seconds: float
    operations: tuple[Operations, ...]
    lateness: tuple[Lateness, ...]
    latest: tuple[Latest, ...]
    rails: tuple[Rail, ...]
    devices: tuple[Device, ...] = ()


def summarize(snapshot: Snapshot) -> Summary:
    """The figures of a snapshot. Clocks are aligned as far as it tells; between hosts some microseconds stay."""
    known = groups(snapshot)
    every = spans(snapshot, known)
    start = min((span.begin for span in every), default=snapshot.taken)
    met = list(_met(every))
    return Summary(
        snapshot.job, len(snapshot.ranks), len(snapshot.infos), _seconds(snapshot.taken - start),
        tuple(_operations(every)), tuple(_lateness(snapshot, met)), tuple(_latest(met, known)),
        tuple(_rails(snapshot, every)), tuple(_devices(snapshot)),
    )  # fmt: skip


def _operations(every: Iterable[Span]) -> list[Operations]:
    """By operation and way, those that took longest first."""
    of: defaultdict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in every:
        of[span.record.op, span.record.way].append(span)
    found = []
    for (op, way), members in of.items():
        done = [span for span in members if span.record.state == DONE]
        running, failed = (sum(span.record.state == state for span in members) for state in (POSTED, FAILED))
        nbytes, lengths = sum(span.record.nbytes for span in done), [span.length for span in done]
        found.append(
            Operations(
                str(OpCode(op)), way, len(done), running, failed, nbytes, _seconds(sum(lengths)), _times(lengths)
            )
        )
    return sorted(found, key=lambda row: (-row.seconds, row.op, row.way))


def _met(every: Sequence[Span]) -> Iterable[list[Span]]:
    """Collectives to which all ranks have come of which the communicator's collectives are known, two at the least."""
    members: defaultdict[int, set[int]] = defaultdict(set)
    found = instances(every)
    for instance in found:
        members[instance[0].record.communicator].update(span.rank for span in instance)
    return (i for i in found if len(i) > 1 and len(i) == len(members[i[0].record.communicator]))


def _lateness(snapshot: Snapshot, met: Iterable[Sequence[Span]]) -> Iterable[Lateness]:
    late: defaultdict[int, list[int]] = defaultdict(list)
    last: defaultdict[int, int] = defaultdict(int)
    awaited: defaultdict[int, int] = defaultdict(int)
    for instance in met:
        for span in instance:
            late[span.rank].append(span.begin - instance[0].begin)
        alone = instance[-1].begin - instance[-2].begin
        if alone:
            last[instance[-1].rank] += 1
            awaited[instance[-1].rank] += alone * (len(instance) - 1)
    for info in snapshot.infos:
        rank, behind = info.rank, late[info.rank]
        if behind:
            yield Lateness(
                rank, info.hostname, info.device, len(behind), last[rank], _times(behind), _seconds(awaited[rank])
            )


def _latest(met: Iterable[Sequence[Span]], known: Mapping[int, Group]) -> Iterable[Latest]:
    worst = sorted(met, key=lambda instance: instance[0].begin - instance[-1].begin)
    for first, *_, last in worst[:_LISTED]:
        record = last.record
        group = known.get(record.communicator)
        if last.begin > first.begin:
            yield Latest(
                str(OpCode(record.op)), record.sequence, group.name if group is not None else "", last.rank, first.rank,
                _seconds(last.begin - first.begin), record.call_site,
            )  # fmt: skip


def _rails(snapshot: Snapshot, every: Iterable[Span]) -> Iterable[Rail]:
    hostnames = {info.rank: info.hostname for info in snapshot.infos}
    sent: defaultdict[tuple[str, str], int] = defaultdict(int)
    received: defaultdict[tuple[str, str], int] = defaultdict(int)
    busy: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for span in every:
        for share in span.record.shares:
            rail = hostnames.get(span.rank, ""), share.connection
            sent[rail] += share.sent
            received[rail] += share.received
            busy[rail].append((span.begin, span.end))
    for rail in sorted(busy):
        yield Rail(*rail, sent[rail], received[rail], _seconds(_covered(busy[rail])))


def _devices(snapshot: Snapshot) -> Iterable[Device]:
    for info in snapshot.infos:
        state = snapshot.ranks.get(info.rank)
        for one in state.grades if state is not None else ():
            yield Device(info.rank, info.hostname, info.device, one.device, one.writes, one.reads)


def _covered(intervals: Iterable[tuple[int, int]]) -> int:
    """How much time intervals cover, each moment counted once."""
    total, until = 0, -math.inf
    for begin, end in sorted(intervals):
        if end > until:
            total += int(end - max(begin, until))
            until = end
    return total


def _times(lengths: Iterable[int]) -> Times:
    """Of durations in nanoseconds."""
    ordered = sorted(lengths)
    if not ordered:
        return Times()
    middle, most = ((len(ordered) * share + 9) // 10 - 1 for share in (5, 9))
    return Times(_seconds(ordered[middle]), _seconds(ordered[most]), _seconds(ordered[-1]))


def _seconds(nanoseconds: int) -> float:
    return nanoseconds / 1e9
