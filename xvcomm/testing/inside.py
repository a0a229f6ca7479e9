"""What lies behind a communicator, for checks of what its methods do not show. Tests reach into communicators here only."""

from __future__ import annotations

from xvcomm.comm.communicator import Communicator
from xvcomm.engine.context import Context


def context(comm: Communicator) -> Context:
    """The engine's side of a communicator: device, rings, tracker, lifecycle, and the session of the job."""
    return comm._context
