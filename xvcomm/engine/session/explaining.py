"""Explains why a job hangs: collects what its ranks do, finds the cause, prints the report, and writes dumps."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from xvcomm.config import Config
from xvcomm.engine.session.recorders import Recorders
from xvcomm.system.notice import notice
from xvcomm.system.requests import Requests
from xvcomm.system.threads import Daemon
from xvcomm.trace.format import Record
from xvcomm.trace.live import OWN, SNAPSHOT
from xvcomm.trace.report import report
from xvcomm.trace.snapshot import SUFFIX, Group, RankState, Snapshot, encode
from xvcomm.trace.verdict import Verdict, judge
from xvcomm.trace.waits import Waits
from xvcomm.types.deadline import Deadline

_ASKED = 64
"""Most ranks of other hosts of which a report tells: they are asked. This host's are read from shared memory, however many."""
_CLOSE_SECONDS = 5.0
"""How long a rank that leaves waits for a dump that is being written, and for a report."""
_SOONEST_SECONDS, _COMPARE_SECONDS = 1.0, 60.0
"""When clocks are compared first, and how often in the end: each pause is four times as long as the one before."""
_SECONDS = 2.0
"""How long other hosts have to tell what their ranks do, when a report is asked for."""
_LEAST_SECONDS = 0.2
"""Stacks are taken only if so much time is left."""

_logger = logging.getLogger("xvcomm")


class Explanation(NamedTuple):
    """What was found; `text` is the whole report."""

    verdict: Verdict
    text: str


class Explaining:
    """Explains on behalf of one rank.

    Args:
        job: its name.
        rank: this one.
        history: gives its records with what carries them.
        calls_native: whether an operation calls native libraries, as far as this rank knows its communicator.
    """

    def __init__(
        self, recorders: Recorders, config: Config, job: str, rank: int, size: int, history: Callable[[], list[Record]],
        calls_native: Callable[[Record], bool],
    ) -> None:  # fmt: skip
        self._recorders, self._config, self._job, self._rank, self._size = recorders, config, job, rank, size
        self._history, self._calls_native = history, calls_native
        self._requests: Requests | None = None
        self._answering: Daemon | None = None
        self._writing: Daemon | None = None
        self._comparing: Daemon | None = None
        self._pause = _SOONEST_SECONDS
        self._comparison = Deadline.after(self._pause)
        self._dumps: dict[int, RankState] = {}
        self._dead: dict[int, RankState] = {}
        self._lock = threading.RLock()  # reentrant, because a signal handler may close the session at any point
        if config.explain:
            with contextlib.suppress(OSError):  # the program or another job has SIGUSR1
                self._requests = Requests()

    def snapshot(self, first: Sequence[int], deadline: Deadline) -> Snapshot:
        """What the job's ranks do: all of this host, of a large job's other hosts those in `first` and some others."""
        here = self._recorders.neighbours
        elsewhere = dict.fromkeys(rank for rank in (*first, *range(self._size)) if rank not in here)
        found = self._recorders.snapshot([*here, *list(elsewhere)[:_ASKED]], deadline)
        mine = msgspec.structs.replace(found.ranks[self._rank], records=tuple(self._history()))
        return msgspec.structs.replace(found, ranks=found.ranks | {self._rank: mine})

    def tell(self, explanation: Explanation) -> None:
        """Print a report, unless that is turned off."""
        if self._config.explain:
            _logger.error("%s", explanation.text)

    def explain(
        self, deadline: Deadline, first: Sequence[int] = (), record: Record | None = None, group: Group | None = None
    ) -> Explanation:
        """Find what holds up an operation of this rank, or the whole job.

        Args:
            first: ranks of the job that matter most.
            group: the operation's communicator.
        """
        snapshot = self.snapshot(first, deadline)
        if self._config.explain and deadline.left() > _LEAST_SECONDS:
            unclear = [rank for rank, state in snapshot.ranks.items() if state.answered and not state.stopped]
            snapshot = self._recorders.take_stacks(snapshot, unclear, deadline)
        waits = Waits(snapshot, () if group is None else (group,))
        verdict = judge(waits, None if record is None else self._rank, record)
        return Explanation(verdict, report(waits.snapshot, verdict, waits, self._calls_native))

    def look(self) -> None:
        """Let threads do what is due: answer a request of another process of the host, if none is being answered; for dumps,
        compare clocks, which cannot be done any more when rank 0's host is lost.
        """
        if self._config.trace_dir and self._comparison.expired() and self._recorders.compares:
            self._pause = min(4 * self._pause, _COMPARE_SECONDS)
            self._comparison = Deadline.after(self._pause)
            self._comparing = Daemon("xvcomm-clocks", self._recorders.compare_clocks)
            self._comparing.start()
        if self._requests is None or (self._answering is not None and self._answering.is_alive()):
            return
        asked, signalled = self._requests.look((SNAPSHOT, OWN))
        if asked or signalled:
            self._answering = Daemon("xvcomm-explain", partial(self._answer, self._requests, asked, signalled))
            self._answering.start()

    def _answer(self, requests: Requests, asked: list[tuple[bytes, int]], signalled: bool) -> None:
        for kind, number in asked:
            if kind == OWN:
                told = self._recorders.alone(self._rank, self._mine())
            else:
                told = self.snapshot((), Deadline.after(_SECONDS))
            requests.answer(number, encode(told))
        if signalled:
            self.tell(self.explain(Deadline.after(_SECONDS)))

    def close(self) -> None:
        """Answer no more, and finish what is being written. Idempotent."""
        for thread in (self._answering, self._writing, self._comparing):
            if thread is not None:
                thread.join(_CLOSE_SECONDS)
        if self._requests is not None:
            self._requests.close()

    def note_end(self, error: BaseException | None) -> None:
        """An exception ends what the program does in the job, if there is one; `sys.exit()` is a regular end."""
        regular = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is not None and not regular:
            self.dump(f"{type(error).__name__}: {error}")

    def note_death(self, rank: int, *, writes: bool) -> None:
        """The process of another rank of this host has died.

        Args:
            writes: whether it is this rank that writes what dead ones did, also what one that has died since was to write.
        """
        if not self._config.trace_dir:
            return
        self._dead[rank] = msgspec.structs.replace(self._recorders.state(rank), ending="its process has ended")
        if writes:
            while self._dead:
                self._save(*self._dead.popitem())

    def dump(self, ending: str) -> None:
        """Let a thread write what this rank did to XVCOMM_TRACE_DIR, if that is set. Does not wait for the disk.

        Args:
            ending: how it has ended, in words; empty if it goes on.
        """
        if self._config.trace_dir:
            self._save(self._rank, msgspec.structs.replace(self._mine(), ending=ending))

    def _mine(self) -> RankState:
        """All that is kept of this rank, with what carries its operations."""
        return msgspec.structs.replace(self._recorders.state(self._rank), records=tuple(self._history()))

    def _save(self, rank: int, state: RankState) -> None:
        if not state.answered:  # the job is closed
            return
        with self._lock:
            self._dumps[rank] = state
            if self._writing is None or not self._writing.is_alive():
                self._writing = Daemon("xvcomm-dump", self._write)
                self._writing.start()

    def _write(self) -> None:
        folder = Path(self._config.trace_dir or "")
        while True:
            with self._lock:
                if not self._dumps:
                    self._writing = None
                    return
                rank, state = self._dumps.popitem()
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._recorders.dated(rank, state).save(folder / f"{self._job}-rank-{rank}{SUFFIX}")
            except OSError as error:  # that must not make an end worse
                notice(f"cannot write what rank {rank} did to {folder} (XVCOMM_TRACE_DIR): {error.strerror}")
