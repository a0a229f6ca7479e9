"""A snapshot as a timeline in the trace-event format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

Ranks are its processes. Each has tracks for each communicator's collectives, messages out and messages in, and one for each
connection to another host. Arrows lead from sends to receives, and along a collective from the first rank to come to the last.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from xvcomm.trace.format import Record, State
from xvcomm.trace.operation import NO_PEER
from xvcomm.trace.snapshot import Group, RankState, Snapshot
from xvcomm.trace.spans import Span, groups, instances, messages, spans
from xvcomm.types.dtype import BY_CODE
from xvcomm.types.opcode import OpCode
from xvcomm.types.topology import RankInfo

Event = dict[str, Any]
_APART = 2
"""Nanoseconds at the least between two events of a track: readers round microseconds, and what overlaps they drop."""


def timeline(snapshot: Snapshot) -> dict[str, Any]:
    """The trace as a JSON object; its times are microseconds since the oldest operation began."""
    known = groups(snapshot)
    every = spans(snapshot, known)
    start = min((span.begin for span in every), default=snapshot.taken)
    tracks = _Tracks()
    for span in every:
        tracks.add(span, _kind(span.record), known)
    events = [
        *(event for info in snapshot.infos for event in _process(info, snapshot.ranks.get(info.rank))),
        *tracks.events(start, known),
        *_arrows(tracks, start, messages(snapshot, every), instances(every)),
    ]
    about = {"job": snapshot.job, "began": start, "taken": snapshot.taken}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}


class _Tracks:
    """Places operations on tracks so that those of a track do not overlap; where they would, it gets another one beside it."""

    def __init__(self) -> None:
        self._members: defaultdict[tuple[int, str], list[tuple[Span, str]]] = defaultdict(list)
        self._placed: dict[int, tuple[int, int]] = {}

    def add(self, span: Span, kind: str, known: Mapping[int, Group]) -> None:
        """Put an operation on the track of its communicator and kind, and on those of its connections."""
        record = span.record
        self._members[span.rank, f"{_communicator(record, known)} {kind}"].append((span, kind))
        for share in record.shares:
            self._members[span.rank, f"rail {share.connection}"].append((span, share.connection))

    def events(self, start: int, known: Mapping[int, Group]) -> Iterator[Event]:
        """The operations, and the names of their tracks."""
        numbers = itertools.count(1)
        for order, ((rank, name), members) in enumerate(self._members.items()):
            lanes = _lanes(span for span, _ in members)
            threads = [next(numbers) for _ in range(max(lanes) + 1)]
            for lane, thread in enumerate(threads):
                title = name if lane == 0 else f"{name}, {lane + 1}"
                yield _named("thread_name", rank, thread, name=title)
                yield _named("thread_sort_index", rank, thread, sort_index=order)
            for (span, kind), lane in zip(members, lanes, strict=True):
                connection = kind if name.startswith("rail ") else ""
                if not connection:
                    self._placed[id(span)] = rank, threads[lane]
                yield _operation(span, start, threads[lane], connection or kind, _arguments(span, connection, known))

    def place(self, span: Span) -> tuple[int, int]:
        """Rank and thread of an operation."""
        return self._placed[id(span)]


def _lanes(members: Iterable[Span]) -> list[int]:
    """A number for each, so that those with the same do not overlap; as few numbers as possible."""
    members = list(members)
    lanes = [0] * len(members)
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    for i in sorted(range(len(members)), key=lambda i: members[i].begin):
        while busy and busy[0][0] + _APART <= members[i].begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lanes[i] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (members[i].end, lanes[i]))
    return lanes


def _kind(record: Record) -> str:
    if record.peer == NO_PEER:
        return "collectives"
    return "messages out" if record.op == OpCode.SEND else "messages in"


def _communicator(record: Record, known: Mapping[int, Group]) -> str:
    group = known.get(record.communicator)
    return f"communicator {group.name}" if group is not None else f"communicator {record.communicator:x}, closed"


def _process(info: RankInfo, state: RankState | None) -> Iterator[Event]:
    name = f"rank {info.rank} {info.hostname} {info.device}"
    yield _named("process_name", info.rank, 0, name=name)
    yield _named("process_sort_index", info.rank, 0, sort_index=info.rank)
    known = state is not None and state.answered
    notes = [state.ending, "stopped by a signal" if state.stopped else ""] if state is not None else []
    labels = ", ".join(filter(None, [*notes, "" if known else "did not answer"]))
    if labels:
        yield _named("process_labels", info.rank, 0, labels=labels)


def _named(what: str, rank: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": _pid(rank), "tid": thread, "ts": 0, "args": args}


def _pid(rank: int) -> int:
    return rank + 1  # to readers, process 0 is the system's idle process


def _operation(span: Span, start: int, thread: int, category: str, args: Event) -> Event:
    record = span.record
    mark = "" if record.state == State.DONE else f" ({State(record.state).words})"
    return {
        "ph": "X", "name": f"{OpCode(record.op)}{mark}", "cat": category, "pid": _pid(span.rank), "tid": thread,
        "ts": _microseconds(span.begin - start), "dur": _microseconds(span.length), "args": args,
    }  # fmt: skip


def _arguments(span: Span, connection: str, known: Mapping[int, Group]) -> Event:
    """What is known of an operation; on the track of a connection what that has carried of it."""
    record = span.record
    dtype = BY_CODE.get(record.dtype)
    found = {
        "op": str(OpCode(record.op)),
        "sequence": record.sequence,
        "communicator": _communicator(record, known).removeprefix("communicator "),
        "bytes": record.nbytes,
        "dtype": str(dtype) if dtype else None,
        "peer": f"rank {span.peer}" if span.peer is not None else None,
        "tag": record.tag if record.peer != NO_PEER else None,
        "call site": record.call_site,
        "state": State(record.state).words,
        "way": record.way or None,
    }
    shares = {
        share.connection: {"sent": share.sent, "received": share.received}
        for share in record.shares
        if connection in ("", share.connection)
    }
    return {key: value for key, value in found.items() if value is not None} | ({"shares": shares} if shares else {})


def _arrows(
    tracks: _Tracks, start: int, pairs: Iterable[tuple[Span, Span]], collectives: Iterable[list[Span]]
) -> Iterator[Event]:
    numbers = itertools.count(1)
    for send, receive in pairs:
        number = next(numbers)
        # within the receive, also if clocks differ a little: at its end readers find none any more
        arrival = max(receive.begin, min(send.begin, receive.end - 1))
        yield _arrow("s", "message", number, tracks.place(send), send.begin - start)
        yield _arrow("f", "message", number, tracks.place(receive), arrival - start)
    for members in collectives:
        if len(members) > 1:
            number = next(numbers)
            phases = ["s", *"t" * (len(members) - 2), "f"]
            for phase, span in zip(phases, members, strict=True):
                yield _arrow(phase, "collective", number, tracks.place(span), span.begin - start)


def _arrow(phase: str, name: str, number: int, place: tuple[int, int], at: int) -> Event:
    rank, thread = place
    made = {
        "ph": phase, "name": name, "cat": name, "id": number, "pid": _pid(rank), "tid": thread, "ts": _microseconds(at),
    }  # fmt: skip
    return made | ({"bp": "e"} if phase == "f" else {})


def _microseconds(nanoseconds: int) -> float:
    return nanoseconds / 1000
