"""The open communicators of a session, and what they learn of the ranks of the job: losses, departures, news of other hosts."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

from xvcomm.engine.session.elsewhere import Departure, Stop
from xvcomm.engine.session.journal import Journal
from xvcomm.engine.session.supervised import Supervised
from xvcomm.memory.ring import Reason
from xvcomm.trace.format import Record
from xvcomm.trace.snapshot import Group
from xvcomm.trace.stages import Progress, stages

_NEWS = 256
"""How many aborts and departures on other hosts are kept, of communicators that this rank may not have made yet."""


class Supervision:
    """Tells every communicator of a session what becomes of the ranks of the job. Ranks are numbers of the whole job.

    Attributes:
        lost: the ranks that have died or cannot be reached, with the last words of each.
        left: the ranks that have left in good order, as far as the communicators were told.
    """

    def __init__(self, journal: Journal) -> None:
        self.lost, self.left = dict[int, str](), set[int]()
        self._journal, self._contexts = journal, set[Supervised]()
        self._lock = threading.RLock()  # reentrant, because a signal handler may close communicators at any point
        self._news: deque[tuple[int, Stop | Departure]] = deque(maxlen=_NEWS)

    def add(self, context: Supervised) -> None:
        """Watch a communicator from now on; it learns what is known already."""
        with self._lock:
            self._contexts.add(context)
            ranks = tuple(map(int, context.ranks))
            self._journal.recorder.note_group(Group(context.ident, context.path, ranks))
            gone, known = [*self.lost, *self.left], list(self._news)
        for rank in gone:
            context.lifecycle.lose(rank)
        for rank, news in known:
            if news.path == context.path:
                context.lifecycle.hear(rank, news)

    def remove(self, context: Supervised) -> None:
        """Stop watching a communicator that is closed."""
        with self._lock:
            self._contexts.discard(context)
            self._journal.recorder.erase_group(context.ident)

    def contexts(self) -> list[Supervised]:
        """The communicators that are not closed."""
        with self._lock:
            return list(self._contexts)

    def note_lost(self, rank: int, words: str) -> None:
        """A rank is lost; `lose` tells the communicators."""
        with self._lock:
            self.lost[rank] = words

    def note_left(self, rank: int) -> None:
        """A rank has left in good order: tell the communicators."""
        with self._lock:
            self.left.add(rank)
        self.lose(rank)

    def lose(self, rank: int) -> None:
        """Stop every communicator that contains a rank which is lost; one that has left in good order ends what waits for it."""
        self.watch_over(lambda context: context.lifecycle.lose(rank))

    def hear(self, rank: int, news: Stop | Departure) -> None:
        """A rank of another host has stopped or closed a communicator."""
        with self._lock:
            self._news.append((rank, news))
        for context in self.contexts():
            if context.path == news.path:
                context.lifecycle.hear(rank, news)

    def departed(self, path: str) -> set[int]:
        """The ranks of other hosts that have closed a communicator, as far as was told a short time ago."""
        with self._lock:
            return {rank for rank, news in self._news if isinstance(news, Departure) and news.path == path}

    def watch_over(self, look: Callable[[Supervised], None]) -> None:
        """Call `look` for every communicator; abort the one for which it fails, or nobody would learn of its failures."""
        for context in self.contexts():
            try:
                look(context)
            except Exception as error:
                why = f"a thread that watches over the job failed: {type(error).__name__}: {error}"
                context.lifecycle.abort(Reason.ABORTED.word(context.rank, context.rank), why)

    def calls_native(self, record: Record) -> bool:
        """Whether an operation calls native libraries, as far as its communicator is known."""
        context = next((c for c in self.contexts() if c.ident == record.communicator), None)
        return context is None or context.planner.calls_native(record.op, record.nbytes)

    def note_stages(self) -> None:
        """Note in the flight recorder how far operations are that have not ended."""
        found: list[Progress] = []
        for context in self.contexts():
            with contextlib.suppress(Exception):  # a report that knows less is no reason to abort
                found.append(context.progress())
        if known := stages(found):  # there is no recorder before there are communicators
            self._journal.recorder.note_stages(known)

    def after_fork(self) -> None:
        """Close every communicator in a forked child, without notifying the other ranks."""
        self._lock = threading.RLock()  # the copied lock may be held by a thread that the child does not have
        for context in self._contexts:
            context.after_fork()
