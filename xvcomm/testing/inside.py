"""What lies behind a communicator, where its methods do not show it. Tests and commands reach into communicators here only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xvcomm.comm.communicator import Communicator
from xvcomm.engine.context import Context

if TYPE_CHECKING:
    from xvcomm.wire.network import Network


def context(comm: Communicator) -> Context:
    """The engine's side of a communicator: device, rings, tracker, lifecycle, and the session of the job."""
    return comm._context


def network(comm: Communicator) -> Network:
    """The links of this process to those of other hosts, in a job that has some."""
    tcp: Any = next(t for t in context(comm).session.transports if t.capabilities().scheme == "tcp")
    found: Network = tcp.network
    return found


def forget_routes(comm: Communicator) -> None:
    """Let this process, which may have looked up already how others are reached, do so again."""
    routes: Any = network(comm)._process.routes
    routes.cache_clear()
