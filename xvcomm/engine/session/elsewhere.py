"""Deaths of ranks on other hosts, as the job's store tells them: also of ranks to which this one has no wire."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection

import msgspec

from xvcomm.abc.store import Store
from xvcomm.errors import StoreError, XvcommError
from xvcomm.system.threads import Daemon
from xvcomm.types.deadline import Deadline

_WHY = "its process has ended: its connection to the job's store is closed"
_POST_SECONDS = 2.0


class _Notice(msgspec.Struct, frozen=True, array_like=True):
    """A rank has died; or, with `left`, rank 0 has left in good order, and the store will end with it."""

    rank: int
    left: bool = False


class Elsewhere:
    """A daemon thread that waits for the store's notices that a rank has died.

    A store that does not notice the end of a process, for instance a folder, tells nothing.

    Args:
        store: of the job.
        rank: of this process in the whole job, as all ranks here.
        neighbours: the ranks of this host, which are watched more closely.
        served_by_first: whether the store ends with rank 0.
        lost: called for a rank of another host that has died, with the reason.
    """

    def __init__(
        self, store: Store, rank: int, neighbours: Collection[int], served_by_first: bool,
        lost: Callable[[int, str], None],
    ) -> None:  # fmt: skip
        self._rank, self._neighbours, self._served_by_first = rank, neighbours, served_by_first
        self._lost, self._over = lost, False
        self._notices = store.notices("deaths", msgspec.msgpack.encode(_Notice(rank)))
        self._thread = Daemon("xvcomm-elsewhere", self._run)
        if self._notices is not None:
            self._thread.start()

    def _run(self) -> None:
        assert self._notices is not None
        store_ends = False
        while True:
            try:
                notice = msgspec.msgpack.decode(self._notices.next(), type=_Notice)
            except XvcommError as error:
                if isinstance(error, StoreError) and self._served_by_first and not (store_ends or self._over):
                    self._tell(0)
                return
            if notice.left:
                store_ends = True
            else:
                self._tell(notice.rank)

    def _tell(self, rank: int) -> None:
        if rank not in self._neighbours:
            self._lost(rank, _WHY)

    def close(self) -> None:
        """Leave in good order, and end the thread. Idempotent."""
        if self._over or self._notices is None:
            return
        self._over = True
        if self._served_by_first and self._rank == 0:
            with contextlib.suppress(XvcommError):
                self._notices.post(msgspec.msgpack.encode(_Notice(0, left=True)), Deadline.after(_POST_SECONDS))
        self._notices.leave()
        self._thread.join()
