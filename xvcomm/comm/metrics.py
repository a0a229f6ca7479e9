"""What a rank tells of itself in Prometheus' form. It is put together at each request; operations only add to counters.

A program may make communicators without end, for instance in each epoch. So only the first ones have series of their own, and
what was counted of those that are closed is added up here.

Import this only when it is needed: prometheus_client is optional.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

import xvcomm
from xvcomm.trace.counters import BOUNDS, NO_COMMUNICATOR, Count, Counters
from xvcomm.trace.format import POSTED
from xvcomm.trace.operation import ANY_PEER, NO_PEER
from xvcomm.trace.snapshot import RankState, Snapshot
from xvcomm.trace.summary import summarize
from xvcomm.types.opcode import OpCode

if TYPE_CHECKING:
    from xvcomm.engine.context import Context

_RECENT = 64
"""Newest records of each rank of the host that tell how late this one comes."""
_LARGE = 1 << 40
"""Bytes of the collectives whose way is told: short arrays may go another one, and the counts do not tell them apart."""
_NAMED, OTHERS = 64, "others"
"""How many communicators have series of operations of their own; the name of the series of all others together."""
_PENDING, _ENDING_SECONDS = 64, 10.0
"""Closed communicators whose counts are added up without a request, and how long their operations may still be ending."""
_MINE = ("rank", "host", "job")
_OPERATION = (*_MINE, "communicator", "op", "way")
_PATH = (*_MINE, "peer", "scheme", "local", "remote", "number")


class Metrics:
    """A collector for a registry of prometheus_client.

    Args:
        context: of the communicator of all ranks; those made later are told to `follow`.
    """

    def __init__(self, context: Context) -> None:
        self._session = session = context.session
        self._counters = Counters()
        self._info = session.infos[session.rank]
        self._mine = (str(session.rank), self._info.hostname, session.config.job or "")
        self._open: dict[int, Context] = {}
        self._named: set[str] = set()
        self._names: dict[int, str] = {}
        self._ways: dict[int, list[str]] = {}
        self._closed: deque[tuple[int, float]] = deque()  # with the time by which all operations have ended
        self._ended: dict[tuple[str, ...], Count] = {}
        self._carried: Counter[tuple[str, ...]] = Counter()
        self._collecting = threading.Lock()
        session.journal.recorder.count(self._counters)

    def follow(self, context: Context) -> None:
        """Also tell of a communicator that was made; its counts stay when it is closed."""
        ident = context.ident
        peers = (ANY_PEER, NO_PEER, *range(len(context.ranks)))
        self._ways[ident] = [context.way(peer, OpCode.ALL_REDUCE, _LARGE) for peer in peers]
        if len(self._named) < _NAMED:
            self._named.add(context.path)
        self._names[ident] = context.path if context.path in self._named else OTHERS
        self._open[ident] = context
        context.lifecycle.on_close(partial(self._forget, ident))

    def _forget(self, ident: int) -> None:
        if self._open.pop(ident, None) is not None:
            self._closed.append((ident, time.monotonic() + _ENDING_SECONDS))
        if len(self._closed) > _PENDING and self._collecting.acquire(blocking=False):  # a request does it else
            try:
                self._add_up()
            finally:
                self._collecting.release()

    def _add_up(self) -> None:
        """Keep the counts of communicators that are closed by their labels, and nothing else of them."""
        now, closed = time.monotonic(), set[int]()
        while self._closed and self._closed[0][1] < now:
            closed.add(self._closed.popleft()[0])
        closed -= self._open.keys()
        for count in self._counters.take(closed):
            labels = self._labels(count)
            self._ended[labels] = _sum([self._ended[labels], count]) if labels in self._ended else count
        for ident in closed:
            del self._names[ident], self._ways[ident]

    def close(self) -> None:
        """Count nothing more."""
        self._session.journal.recorder.count(None)

    def collect(self) -> Iterator[Any]:
        """All metrics, as prometheus_client calls it; by one thread at a time."""
        with self._collecting:
            self._add_up()
            yield from (*self._about(), *self._operations(), *self._now(), *self._paths(), *self._lateness())

    def _about(self) -> Iterator[Any]:
        info = self._info
        about = GaugeMetricFamily(
            "xvcomm_info", "This rank.", labels=(*_MINE, "version", "device", "island", "size"),
        )  # fmt: skip
        about.add_metric((*self._mine, xvcomm.__version__, info.device, info.island, str(self._session.size)), 1)
        yield about

    def _operations(self) -> Iterator[Any]:
        found: defaultdict[tuple[str, ...], list[Count]] = defaultdict(list)
        for labels, count in self._ended.items():
            found[labels].append(count)
        known = self._names.keys() | {NO_COMMUNICATOR}
        for count in self._counters.read():
            if count.communicator in known:  # else it is being made
                found[self._labels(count)].append(count)
        begun, nbytes, failed = (
            CounterMetricFamily(f"xvcomm_{name}", text, labels=_OPERATION)
            for name, text in (
                ("operations", "Operations that have begun."),
                ("operation_bytes", "Bytes of operations that have begun, on this rank."),
                ("operations_failed", "Operations that have ended by an error."),
            )
        )
        seconds = HistogramMetricFamily(
            "xvcomm_operation_seconds", "Duration of operations that have ended without an error.", labels=_OPERATION
        )
        for labels, count in ((labels, _sum(counts)) for labels, counts in found.items()):
            begun.add_metric(labels, count.begun)
            nbytes.add_metric(labels, count.nbytes)
            failed.add_metric(labels, count.failed)
            seconds.add_metric(labels, _cumulated(count.lengths), count.nanoseconds / 1e9)
        yield from (begun, nbytes, failed, seconds)

    def _labels(self, count: Count) -> tuple[str, ...]:
        """The values of _OPERATION."""
        ways = self._ways.get(count.communicator, [])
        known = 0 <= count.peer - ANY_PEER < len(ways)
        name = self._names.get(count.communicator, OTHERS)
        return *self._mine, name, str(OpCode(count.op)), ways[count.peer - ANY_PEER] if known else ""

    def _now(self) -> Iterator[Any]:
        labels = (*_MINE, "communicator")
        running = GaugeMetricFamily("xvcomm_operations_running", "Operations that have not ended.", labels=labels)
        oldest = GaugeMetricFamily(
            "xvcomm_oldest_operation_seconds", "For how long the oldest of them has been under way.", labels=labels
        )
        aborted = GaugeMetricFamily(
            "xvcomm_aborted", "1: the communicator was aborted; of others, how many were.", labels=labels
        )
        rings = GaugeMetricFamily(
            "xvcomm_ring_bytes", "Memory of the communicator's rings on this rank, in host memory or a GPU's.",
            labels=(*labels, "memory"),
        )  # fmt: skip
        under_way = [record for record in self._session.journal.recorder.history() if record.state == POSTED]
        now = time.time_ns()
        named: defaultdict[str, dict[int, Context]] = defaultdict(dict)
        for ident, context in list(self._open.items()):
            named[self._names[ident]][ident] = context
        for name, contexts in named.items():
            begun = [record.posted for record in under_way if record.communicator in contexts]
            mine = (*self._mine, name)
            running.add_metric(mine, len(begun))
            oldest.add_metric(mine, (now - min(begun, default=now)) / 1e9)
            aborted.add_metric(mine, sum(context.lifecycle.aborted() for context in contexts.values()))
            layouts = [end.layout for context in contexts.values() for end in context.rings.ends()]
            rings.add_metric((*mine, "host"), sum(layout.size for layout in layouts))
            rings.add_metric((*mine, "gpu"), sum(layout.capacity for layout in layouts if layout.apart))
        refused = CounterMetricFamily(
            "xvcomm_refused_connections", "Connections of strangers that were closed.", labels=_MINE
        )
        refused.add_metric(self._mine, sum(transport.refused() for transport in self._session.transports))
        yield from (running, oldest, aborted, rings, refused)

    def _paths(self) -> Iterator[Any]:
        up = GaugeMetricFamily("xvcomm_rail_up", "1: there is a connection to a rank of another host.", labels=_PATH)
        losses = CounterMetricFamily(
            "xvcomm_rail_losses", "Connections that were lost, for which others carry on.", labels=_PATH
        )
        retries = CounterMetricFamily(
            "xvcomm_rail_retries", "Slots that connections have sent again after others were lost.", labels=_PATH
        )
        nbytes = CounterMetricFamily(
            "xvcomm_rail_bytes",
            "Bytes that connections have carried, with their headers.",
            labels=(*_PATH, "direction"),
        )
        for path in (path for transport in self._session.transports for path in transport.paths()):
            place = path.scheme, path.local, path.remote, str(path.number)
            labels = (*self._mine, str(path.rank), *place)
            up.add_metric(labels, int(path.up))
            losses.add_metric(labels, path.losses)
            retries.add_metric(labels, self._risen(path.retries, *labels, "retries"))
            for direction, carried in (("sent", path.sent), ("received", path.received)):
                nbytes.add_metric((*labels, direction), self._risen(carried, *labels, direction))
        yield from (up, losses, retries, nbytes)

    def _risen(self, count: int, *labels: str) -> int:
        """A count of connections that has not fallen: while one is replaced, the old one's part is missing for a moment."""
        self._carried[labels] = max(count, self._carried[labels])
        return self._carried[labels]

    def _lateness(self) -> Iterator[Any]:
        late = GaugeMetricFamily(
            "xvcomm_lateness_seconds", "How long after the first rank of this host it came to the newest collectives.",
            labels=(*_MINE, "quantile"),
        )  # fmt: skip
        session = self._session
        states = {r: RankState(records=tuple(session.journal.newest(r, _RECENT))) for r in session.neighbours}
        found = summarize(Snapshot("", time.time_ns(), session.infos, states)) if len(states) > 1 else None
        for row in found.lateness if found is not None else ():
            if row.rank == session.rank:
                for quantile, seconds in (("0.5", row.late.median), ("0.9", row.late.p90), ("1", row.late.longest)):
                    late.add_metric((*self._mine, quantile), seconds)
        yield late


def _sum(counts: Sequence[Count]) -> Count:
    """Counts of operations with the same labels, together."""
    begun, nbytes, failed, nanoseconds = (
        sum(numbers) for numbers in zip(*((c.begun, c.nbytes, c.failed, c.nanoseconds) for c in counts), strict=True)
    )
    lengths = tuple(sum(numbers) for numbers in zip(*(count.lengths for count in counts), strict=True))
    return Count(NO_COMMUNICATOR, counts[0].op, ANY_PEER, begun, nbytes, failed, nanoseconds, lengths)


def _cumulated(lengths: Sequence[int]) -> list[tuple[str, float]]:
    """Buckets of a histogram: how many did not exceed each bound, in seconds."""
    total, found = 0, []
    for bound, number in zip([*(str(bound / 1e9) for bound in BOUNDS), "+Inf"], lengths, strict=True):
        total += number
        found.append((bound, float(total)))
    return found
