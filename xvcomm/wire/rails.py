"""A rail as Python knows it: the connection or queue pair behind the carrier's record, and how long the other host is silent."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass

from xvcomm.system import heartbeat
from xvcomm.types.route import Ends
from xvcomm.wire.connections import queued
from xvcomm.wire.pairing import PairRail
from xvcomm.wire.tls import Channel

SILENT_SECONDS = 3.0
"""How long a process that leaves waits for one of which nothing comes; the carrier of one that runs sends signs of life."""
STALL_SECONDS = 0.35
"""A rail is replaced if the other host has acknowledged nothing for this long, and another rail of the link works; longer where
acknowledgements take long."""
_ROUND_TRIPS = 4
"""What the kernel takes to send again what was lost twice, beside the shortest timeout of TCP, 0.2 s, which is in STALL_SECONDS:
it asks after two, its timeout is one longer than that, and the answer takes one."""


@dataclass(eq=False)
class Rail:
    """A connection, its TLS or the queue pair beside it, and since when the other host has acknowledged nothing, by our looks."""

    connection: socket.socket
    ends: Ends
    channel: Channel | None = None
    rdma: PairRail | None = None
    path: int = 0
    acknowledged: int = 0
    waits: float = math.inf

    @property
    def scheme(self) -> str:
        """Of the rail, for the user."""
        return "tcp" if self.rdma is None else "rdma"

    @property
    def patience(self) -> float:
        """How long the other host may acknowledge nothing; devices repeat what is lost by themselves, and tell of failures."""
        if self.rdma is not None:
            return SILENT_SECONDS
        return STALL_SECONDS + _ROUND_TRIPS * heartbeat.round_trip(self.connection)

    @property
    def answers(self) -> bool:
        """Whether the other host answers, though its process may take nothing more; False if a device knows that alone."""
        return self.rdma is None and heartbeat.answers(self.connection)

    def progress(self, sent: int) -> tuple[int, int]:
        """What the other host has acknowledged and has not, of so many bytes; of RDMA in requests."""
        if self.rdma is not None:
            return self.rdma.posted.progress()
        unseen = queued(self.connection)
        return sent - unseen, unseen
