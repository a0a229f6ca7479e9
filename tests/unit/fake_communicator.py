"""Replaces `xvcomm.comm.communicator` by the minimum that `init()` needs. Running this file installs it.

The communicator has its own tests; without it ranks start fast and share no memory.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

from xvcomm.abc.store import Store
from xvcomm.config import Config
from xvcomm.rendezvous.store import join_barrier
from xvcomm.types.deadline import Deadline


class Communicator:
    """Ranks that have joined, and their store."""

    def __init__(self, store: Store, rank: int, size: int, close: Callable[[], None]) -> None:
        self.store, self.rank, self.size, self.close = store, rank, size, close

    @classmethod
    def join(
        cls, store: Store, rank: int, size: int, *, config: Config, deadline: Deadline, on_close: Callable[[], None]
    ) -> Communicator:
        """Exchange keys with the other ranks, and check each rank's number."""
        infos = join_barrier(store, rank, size, b"rank%d" % rank, deadline)
        assert infos == [b"rank%d" % other for other in range(size)]
        return cls(store, rank, size, on_close)


module = types.ModuleType("xvcomm.comm.communicator")
module.Communicator = Communicator
sys.modules["xvcomm.comm.communicator"] = module
