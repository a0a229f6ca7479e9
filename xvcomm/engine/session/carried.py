"""What connections to other hosts have carried of operations: the flight recorder does not count it, the wires do.

A wire counts by message. The messages of a collective have its number in the rings' ledgers. Those of a message's record are
found in their order: the newest record of a direction belongs to the ring's newest message.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from xvcomm.engine.session.supervised import Supervised
from xvcomm.memory.ring import Message, RingEnd
from xvcomm.trace.format import Record, Share
from xvcomm.trace.operation import NO_PEER
from xvcomm.types.opcode import OpCode

_Bytes = Counter[tuple[str, bool]]
"""By the connection, and whether they were sent."""


def carried(ends: Sequence[RingEnd], records: Sequence[Record], *, in_order: bool) -> dict[Record, tuple[Share, ...]]:
    """The shares of those records of which the wires still know something.

    Args:
        ends: the open rings of a communicator.
        records: of the same, oldest first.
        in_order: whether each message on `ends` has its record, and no other record is there yet.
    """
    wired = [end for end in ends if end.carrier]
    if not wired:
        return {}
    found: defaultdict[Record, _Bytes] = defaultdict(Counter)
    collectives = {(r.op, r.sequence): r for r in records if r.peer == NO_PEER}
    directions: defaultdict[tuple[int, bool], list[RingEnd]] = defaultdict(list)
    for end in wired:
        bytes_of, said = end.carried(), end.described()
        for number, message in said.items():
            record = collectives.get((message.op, message.tag))
            if record is not None:
                _add(found[record], end, bytes_of.get(number, {}))
        if not end.replayed and any(message.op == OpCode.SEND for message in said.values()):
            directions[end.peer, end.producer].append(end)
    for (peer, producer), of_pair in directions.items():
        if in_order and len(of_pair) == 1:  # a record does not say which channel it is of
            (end,) = of_pair
            bytes_of, said = end.carried(), end.described()
            newest = [
                r for r in reversed(records) if r.peer == peer and r.op == (OpCode.SEND if producer else OpCode.RECV)
            ]
            for record, number in zip(newest, range(end.sequence, 0, -1), strict=False):
                if said.get(number) == Message(OpCode.SEND, record.dtype, record.nbytes, record.tag):
                    _add(found[record], end, bytes_of.get(number, {}))
    return {record: _shares(nbytes) for record, nbytes in found.items() if nbytes}


def with_ways(records: Sequence[Record], contexts: Iterable[Supervised]) -> list[Record]:
    """Records with the ways and the shares of those whose communicators are open."""
    of = {context.ident: context for context in contexts}
    shares = {ident: context.carried([r for r in records if r.communicator == ident]) for ident, context in of.items()}
    return [
        replace(r, way=of[r.communicator].way(r.peer, r.op, r.nbytes), shares=shares[r.communicator].get(r, ()))
        if r.communicator in of
        else r
        for r in records
    ]


def _add(counted: _Bytes, end: RingEnd, parts: dict[str, int]) -> None:
    for connection, nbytes in parts.items():
        counted[connection, end.producer] += nbytes


def _shares(counted: _Bytes) -> tuple[Share, ...]:
    connections = sorted({connection for connection, _ in counted})
    return tuple(Share(connection, counted[connection, True], counted[connection, False]) for connection in connections)
