"""The operations of a snapshot on one clock, and which of them belong together: sends and receives, instances of a collective."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from xvcomm.trace.format import DONE, FAILED, POSTED, Record
from xvcomm.trace.operation import NO_PEER
from xvcomm.trace.snapshot import Group, Snapshot
from xvcomm.types.opcode import OpCode

_EVERY = "0"
"""Path of the communicator of all ranks."""
_CLOCKS_DIFFER = 1_000_000
"""Nanoseconds by which the clocks of two hosts may seem to differ once they are aligned."""


@dataclass(frozen=True, slots=True)
class Span:
    """An operation of one rank.

    Attributes:
        rank: its number in the job.
        begin, end: nanoseconds since the epoch by the reader's clock; of what is in progress the end is the snapshot's time.
        peer: the rank at the other end by its number in the job; None if there is none, or it is not known.
    """

    rank: int
    record: Record
    begin: int
    end: int
    peer: int | None = None

    @property
    def length(self) -> int:
        """Nanoseconds."""
        return self.end - self.begin


def groups(snapshot: Snapshot) -> dict[int, Group]:
    """The communicators that any rank has told of, and that of all ranks, by their numbers in records."""
    ident = zlib.crc32(_EVERY.encode()) & 0x7FFFFFFF
    found = {ident: Group(ident, _EVERY, tuple(info.rank for info in snapshot.infos))}
    for state in snapshot.ranks.values():
        for group in state.groups:
            if group.ranks or group.ident not in found:
                found[group.ident] = group
    return found


def spans(snapshot: Snapshot, known: Mapping[int, Group]) -> list[Span]:
    """All operations, by rank, those of a rank as it has begun them.

    Args:
        known: from `groups`.
    """
    found = []
    for rank, state in sorted(snapshot.ranks.items()):
        for record in state.records:
            begin = record.posted - state.ahead
            end = snapshot.taken if record.state == POSTED else record.ended - state.ahead
            group = known.get(record.communicator)
            there = group is not None and 0 <= record.peer < len(group.ranks)
            peer = group.ranks[record.peer] if group is not None and there else None
            found.append(Span(rank, record, begin, max(begin, end), peer))
    return found


def instances(every: Iterable[Span]) -> list[list[Span]]:
    """What ranks know of each collective, in the order in which they came to it; the collectives in order of their begin."""
    found: defaultdict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in every:
        if span.record.peer == NO_PEER:
            found[span.record.communicator, span.record.sequence].append(span)
    ordered = [sorted(members, key=lambda span: (span.begin, span.rank)) for members in found.values()]
    return sorted(ordered, key=lambda members: members[0].begin)


def messages(snapshot: Snapshot, every: Iterable[Span]) -> list[tuple[Span, Span]]:
    """Sends and the receives that match them.

    Between two ranks messages of a communicator and a tag match in order. Where flight recorders have dropped the oldest, the
    newest that are done are taken for the same, unless a receive would have ended before its send began or had another size.
    Then the nearest way without that is taken, first one in which the sender is further ahead.
    """
    sends: defaultdict[tuple[int, int, int, int], list[Span]] = defaultdict(list)
    receives: defaultdict[tuple[int, int, int, int], list[Span]] = defaultdict(list)
    for span in every:
        record = span.record
        if span.peer is not None and record.op == OpCode.SEND:
            sends[record.communicator, span.rank, span.peer, record.tag].append(span)
        elif span.peer is not None and record.op == OpCode.RECV:
            receives[record.communicator, span.peer, span.rank, record.tag].append(span)
    hosts = {info.rank: info.host for info in snapshot.infos}
    found: list[tuple[Span, Span]] = []
    for stream in sends.keys() & receives.keys():
        _, sender, receiver, _ = stream
        complete = not any(snapshot.ranks[rank].dropped for rank in (sender, receiver))
        apart = 0 if hosts.get(sender) == hosts.get(receiver) else _CLOCKS_DIFFER
        found += _matched(sends[stream], receives[stream], complete, apart)
    return sorted(found, key=lambda pair: (pair[0].begin, pair[0].rank, pair[1].rank))


def _matched(
    sends: Sequence[Span], receives: Sequence[Span], complete: bool, apart: int
) -> Iterable[tuple[Span, Span]]:
    """Pairs of one stream; none if no way to pair them is possible.

    Args:
        complete: whether both begin with the stream's first message.
        apart: nanoseconds by which both ranks' clocks may differ.
    """
    newest = len(receives) - _open(receives) - (len(sends) - _open(sends))
    possible = range(1 - len(sends), len(receives))
    ordered = sorted(possible, key=lambda shift: (complete and shift != 0, abs(shift - newest), newest - shift))
    for shift in ordered:
        pairs = _shifted(sends, receives, shift)
        # what is received was sent; but the records of a sender may have been read earlier
        unsent = () if complete and shift == 0 else receives[max(0, len(sends) + shift) :]
        if all(_fit(*pair, apart) for pair in pairs) and not any(r.record.state == DONE for r in unsent):
            return pairs
    return ()


def _open(members: Sequence[Span]) -> int:
    """How many of the newest are in progress."""
    return next((i for i, span in enumerate(reversed(members)) if span.record.state != POSTED), len(members))


def _shifted(sends: Sequence[Span], receives: Sequence[Span], shift: int) -> list[tuple[Span, Span]]:
    """Pairs of each send and the receive that comes so much later in its row."""
    return list(zip(sends[max(0, -shift) :], receives[max(0, shift) :], strict=False))


def _fit(send: Span, receive: Span, apart: int) -> bool:
    """Whether a receive may have got what a send has sent."""
    sent, received = send.record, receive.record
    alike = sent.dtype == received.dtype and sent.nbytes == received.nbytes
    return (alike or FAILED in (sent.state, received.state)) and receive.end + apart >= send.begin
