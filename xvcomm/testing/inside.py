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
    found: Network = _tcp(comm).network
    return found


def _tcp(comm: Communicator) -> Any:
    return next(t for t in context(comm).session.transports if t.capabilities().scheme == "tcp")


def forget_routes(comm: Communicator) -> None:
    """Let this process, which may have looked up already how others are reached, do so again."""
    tcp = _tcp(comm)
    tcp.places.clear()
    tcp.network._process.routes.cache_clear()
