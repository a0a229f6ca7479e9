"""Says why a job hangs: collects what its ranks do, finds what holds it up, prints the report, and writes dumps."""

from __future__ import annotations

import contextlib
import logging
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
from xvcomm.trace.live import SNAPSHOT
from xvcomm.trace.report import report
from xvcomm.trace.snapshot import SUFFIX, Snapshot, encode
from xvcomm.trace.verdict import Verdict, judge
from xvcomm.trace.waits import Waits
from xvcomm.types.deadline import Deadline

_ASKED = 64
"""Maximum number of ranks of which a report tells."""
_SECONDS = 2.0
"""How long other hosts have to tell what their ranks do, when a report is asked for."""
_LEAST_SECONDS = 0.2
"""Stacks are taken only if so much time is left."""

_logger = logging.getLogger("xvcomm")


class Explanation(NamedTuple):
    """What was found; `text` is the whole report."""

    verdict: Verdict
    text: str

    def tell(self) -> None:
        """Print the report."""
        _logger.error("%s", self.text)


class Explaining:
    """Explains on behalf of one rank.

    Args:
        job: its name.
        rank: this one.
        history: gives its records with what carries them.
    """

    def __init__(
        self, recorders: Recorders, config: Config, job: str, rank: int, size: int, history: Callable[[], list[Record]]
    ) -> None:
        self._recorders, self._config, self._job, self._rank, self._size = recorders, config, job, rank, size
        self._history = history
        self._requests: Requests | None = None
        self._answering: Daemon | None = None
        if config.explain:
            with contextlib.suppress(OSError):  # the program or another job has SIGUSR1
                self._requests = Requests()

    def snapshot(self, first: Sequence[int], deadline: Deadline) -> Snapshot:
        """What the job's ranks do, of a large job only those in `first` and some others."""
        ranks = dict.fromkeys([self._rank, *first, *range(min(self._size, _ASKED))])
        found = self._recorders.snapshot(list(ranks)[:_ASKED], deadline)
        mine = msgspec.structs.replace(found.ranks[self._rank], records=tuple(self._history()))
        return msgspec.structs.replace(found, ranks=found.ranks | {self._rank: mine})

    def explain(self, deadline: Deadline, first: Sequence[int] = (), record: Record | None = None) -> Explanation:
        """Find what holds up an operation of this rank, or the whole job.

        Args:
            first: ranks of the job that matter most.
        """
        snapshot = self.snapshot(first, deadline)
        waits = Waits(snapshot)
        if deadline.left() > _LEAST_SECONDS:
            unclear = [rank for rank, state in snapshot.ranks.items() if state.answered and not state.stopped]
            waits = Waits(self._recorders.take_stacks(snapshot, unclear, deadline))
        verdict = judge(waits, None if record is None else self._rank, record)
        return Explanation(verdict, report(waits.snapshot, verdict, waits))

    def look(self) -> None:
        """Let a thread answer a request of another process of the host, if there is one and none is being answered."""
        if self._requests is None or (self._answering is not None and self._answering.is_alive()):
            return
        if asked := self._requests.look():
            self._answering = Daemon("xvcomm-explain", partial(self._answer, self._requests, asked))
            self._answering.start()

    def _answer(self, requests: Requests, asked: bytes) -> None:
        if asked == SNAPSHOT:
            requests.answer(encode(self.snapshot((), Deadline.after(_SECONDS))))
        else:
            self.explain(Deadline.after(_SECONDS)).tell()

    def close(self) -> None:
        """Answer no more. Idempotent."""
        if self._answering is not None:
            self._answering.join()
        if self._requests is not None:
            self._requests.close()

    def dump(self, rank: int, ending: str) -> None:
        """Write what a rank of this host did to XVCOMM_TRACE_DIR, if that is set.

        Args:
            ending: how it has ended, in words; empty if it goes on.
        """
        if not self._config.trace_dir:
            return
        whole = self._recorders.whole(rank)
        state = msgspec.structs.replace(whole.ranks[rank], ending=ending)
        folder = Path(self._config.trace_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            msgspec.structs.replace(whole, ranks={rank: state}).save(folder / f"{self._job}-rank-{rank}{SUFFIX}")
        except OSError as error:  # that must not make an end worse
            notice(f"cannot write what rank {rank} did to {folder} (XVCOMM_TRACE_DIR): {error.strerror}")
