"""What the job's store tells of ranks on other hosts, also of those to which this one has no wire: deaths, departures, aborts."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Container, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue

import msgspec

from xvcomm.abc.store import Notices, Store
from xvcomm.abc.transport import Transport
from xvcomm.errors import StoreError, XvcommError
from xvcomm.system import heartbeat
from xvcomm.system.threads import Daemon
from xvcomm.types.deadline import Deadline, poll

_WHY = "its process has ended: its connection to the job's store is closed"
_POST_SECONDS, _SOON_SECONDS, _AGAIN_SECONDS, _TRIES, _FLUSH_SECONDS = 2.0, 0.025, 0.5, 10, 1.5
_MET = 256
"""Of so many ranks the addresses are asked for ahead of need: the store may be lost together with them."""
_PLACE = "deaths"


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank has stopped a communicator.

    Attributes:
        path: of the communicator, see `Context`.
        word: see `Reason`.
        why: in words.
    """

    path: str
    word: int
    why: str


class Departure(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank has closed a communicator.

    Attributes:
        path: as of `Stop`.
        called: how many collectives it had called there before.
    """

    path: str
    called: int


class _Notice(msgspec.Struct, frozen=True, array_like=True):
    """Of a rank: what became of communicators, and whether it has left in good order; or its host does not answer; else it has
    died.
    """

    rank: int
    left: bool = False
    silent: bool = False
    news: tuple[Stop | Departure, ...] = ()


_decode_notice = msgspec.msgpack.Decoder(_Notice).decode


def died(store: Store, read: int) -> tuple[set[int], int]:
    """The ranks that have died according to notices of a job of which this process is none.

    Args:
        store: of that job.
        read: how many of its notices this process has read before.

    Returns:
        The ranks, and how many notices it has read now.
    """
    notices = [_decode_notice(notice) for notice in store.posted(_PLACE, read)]
    return {n.rank for n in notices if not (n.left or n.silent or n.news)}, read + len(notices)


class Elsewhere:
    """Follows the store's notices in a daemon thread, and posts this rank's in another one.

    A store that does not notice the end of a process, for instance a folder, tells nothing. One whose host does not answer tells
    nothing either: then a rank of another host is tried, if possible the one that serves the store.

    Args:
        store: of the job.
        rank: of this process in the whole job, as all ranks here.
        neighbours: the ranks of this host, which learn of each other in shared memory.
        server: the rank with which the store ends, if it does.
        others: the ranks of other hosts, of which the first is tried.
        timeout: seconds without a sign of a host after which it is lost.
        deadline: until the store must be followed.
        transport: what joins this rank with another, which is told of those that have left or whose host does not answer.
        losses: the ranks that are lost: once the store cannot be reached either, what waits for its answers ends.
        lost: called for a rank of another host that has died, with the reason.
        told: called for a rank of another host that has stopped or closed a communicator.
    """

    def __init__(
        self, store: Store, rank: int, neighbours: Collection[int], server: int | None, others: Sequence[int], timeout: float,
        deadline: Deadline, transport: Callable[[int], Transport], losses: Container[int], lost: Callable[[int, str], None],
        told: Callable[[int, Stop | Departure], None],
    ) -> None:  # fmt: skip
        self._rank, self._neighbours, self._server, self._others = rank, neighbours, server, others
        self._tried = others[0]
        self._transport, self._losses, self._lost, self._told, self._over = transport, losses, lost, told, False
        self._patience, self._doubts = max(heartbeat.LEAST_SECONDS, timeout / 2), False
        died, silent = (msgspec.msgpack.encode(_Notice(rank, silent=silent)) for silent in (False, True))
        self._begin = partial(store.notices, _PLACE, died, silent, self._patience, deadline)
        self._begun: Future[Notices | None] = Future()
        self._met = threading.Event()
        self._news = deque[Stop | Departure]()  # that are not posted
        # None: there are news. Else nothing is posted any more: True if this rank leaves.
        self._outbox: SimpleQueue[bool | None] = SimpleQueue()
        self._threads = [Daemon("xvcomm-elsewhere", self._follow), Daemon("xvcomm-announcer", self._announce)]
        for thread in self._threads:
            thread.start()

    def ready(self) -> None:
        """Wait until the store is followed, until the deadline at the latest.

        Raises:
            DeadlineExceeded, StoreError: it does not answer, or cannot be reached.
        """
        self._begun.result()

    def meet(self) -> None:
        """All ranks have started: learn how those of other hosts are reached. What is posted goes out after that."""
        self._met.set()

    @property
    def tells(self) -> bool:
        """Whether the store tells of other hosts, as far as it is `ready`."""
        return self._begun.done() and self._following() is not None

    def _following(self) -> Notices | None:
        """What is followed, once that has begun; None if the store tells nothing."""
        return None if self._begun.exception() is not None else self._begun.result()

    def post(self, news: Stop | Departure) -> None:
        """Tell the ranks of all other hosts that this one has stopped or closed a communicator. Does not wait for the store."""
        self._news.append(news)
        self._outbox.put(None)

    def unposted(self) -> list[Stop]:
        """The stops of communicators that the others have not been told, as far as known, once this is joined.

        A departure may be of a rank that shrinks, and that must first say in the next store that it has come.
        """
        return [news for news in list(self._news) if isinstance(news, Stop)]

    def flush(self) -> None:
        """Wait until all news are posted; not for long, and no longer once the store has ended."""
        if self._met.is_set():
            poll(lambda: not (self._news and self._threads[0].is_alive()) or None, Deadline.after(_FLUSH_SECONDS))

    def look(self) -> None:
        """Try another host if the store's does not answer; call it regularly. Never blocks."""
        notices = self._following() if self._begun.done() else None
        if notices is None:
            return
        silence = notices.silence()
        doubts = silence > self._patience
        if doubts and not self._doubts:
            self._transport(self._tried).doubt(self._tried, silence)
        self._doubts = doubts
        # Of this host its process is only slow or stopped.
        if doubts and self._tried in self._losses and self._server not in self._neighbours:
            notices.give_up()

    def _announce(self) -> None:
        notices = self._following()
        if notices is None:
            return
        self._met.wait()
        if not self._over:
            self._meet_others()
        failed, end = 0, None
        while end is None:
            again = min(_SOON_SECONDS * 2**failed, _AGAIN_SECONDS)
            end = self._next(again if self._news and failed < _TRIES else None)
            news, leaves = tuple(self._news), end is True
            if news or leaves:
                notice = _Notice(self._rank, left=leaves, news=news)
                failed += 1
                with contextlib.suppress(XvcommError):
                    notices.post(msgspec.msgpack.encode(notice), Deadline.after(_POST_SECONDS))
                    failed = 0  # else it may have gone out nevertheless: to hear it twice is harmless
                    for _ in news:
                        self._news.popleft()

    def _meet_others(self) -> None:
        by: dict[Transport, list[int]] = {}
        for rank in self._others[:_MET]:
            by.setdefault(self._transport(rank), []).append(rank)
        for transport, ranks in by.items():
            with contextlib.suppress(XvcommError):
                transport.meet(ranks)

    def _next(self, seconds: float | None) -> bool | None:
        """Wait for news, or for the end, which is given. All that has come is posted together: a slow store gets few notices.

        Args:
            seconds: to wait at most; without end if None.
        """
        try:
            item = self._outbox.get(timeout=seconds)
            while item is None:
                item = self._outbox.get_nowait()
        except Empty:
            return None
        return item

    def _follow(self) -> None:
        try:
            notices = self._begin()
        except BaseException as error:
            self._begun.set_exception(error)
            return
        self._begun.set_result(notices)
        if notices is not None:
            self._hear(notices)

    def _hear(self, notices: Notices) -> None:
        store_ends = False
        while True:
            try:
                notice = _decode_notice(notices.next())
            except XvcommError as error:
                if isinstance(error, StoreError) and self._server is not None and not (store_ends or self._over):
                    self._lose(self._server)
                return
            store_ends = store_ends or (notice.left and notice.rank == self._server)
            if notice.rank in self._neighbours:
                continue
            for news in notice.news:
                self._told(notice.rank, news)
            if notice.left:
                self._transport(notice.rank).part(notice.rank)
            elif notice.silent:
                self._transport(notice.rank).doubt(notice.rank, self._patience)
            elif not notice.news:
                self._lose(notice.rank)

    def _lose(self, rank: int) -> None:
        if rank not in self._neighbours:
            self._lost(rank, _WHY)

    def close(self) -> None:
        """Leave in good order, and end the threads. Idempotent.

        All that was sent to ranks of other hosts must be there: they expect nothing more of a rank that has left.
        """
        if self._over:
            return
        self._over = True
        self._met.set()
        notices = self._following()
        self._outbox.put(True)
        if notices is not None:
            notices.leave()  # beside the post: a store that is stopped delays both
        self.join()

    def abandon(self, *, served: bool) -> None:
        """Follow the store no more, because this rank moves to another one: it does not leave. `join` once the store is closed.
        Idempotent.

        Args:
            served: whether the store may still answer, so that others learn nothing wrong when it is closed.
        """
        if self._over:
            return
        self._over = True
        self._met.set()
        self._outbox.put(False)
        if served and (notices := self._following()) is not None:
            notices.leave()

    def join(self) -> None:
        """Wait for the end of the threads."""
        for thread in reversed(self._threads):
            thread.join()
