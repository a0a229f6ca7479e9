"""Moves transfers in the background: one daemon thread per process, asleep while there are none."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from xvcomm.abc.device import RingStalled, RingStopped
from xvcomm.backends.host.batch import Batch
from xvcomm.jit.atomics import READY, budget_of_more
from xvcomm.system.forking import ProcessFuture
from xvcomm.system.threads import Daemon
from xvcomm.types.deadline import Deadline


@dataclass(slots=True)
class _Job:
    """Transfers that were submitted together."""

    future: Future[None]
    rows: list[int]
    deadline: Deadline


class Engine:
    """Takes batches from any thread and progresses all of them concurrently."""

    def __init__(self, spins: int) -> None:
        self._spins = spins
        self._incoming: list[tuple[Batch, Future[None], Deadline]] = []
        self._arrived = threading.Condition()
        self._wake = np.zeros(1, np.int64)
        self._thread: Daemon | None = None
        self._batch = Batch(spins)
        self._jobs: list[_Job] = []

    def submit(self, batch: Batch, deadline: Deadline) -> Future[None]:
        """Take over all transfers of a batch, which is empty afterwards. The future raises what `Batch.finish` would."""
        future: ProcessFuture[None] = ProcessFuture()
        future.help = partial(self._help, future)
        taken = Batch(self._spins)
        taken.take(batch)
        self._hand_over((taken, future, deadline))
        return future

    def _hand_over(self, entry: tuple[Batch, Future[None], Deadline]) -> None:
        """Queue the entry for the thread."""
        with self._arrived:
            self._incoming.append(entry)
            self._wake[0] += 1
            if self._thread is None:
                self._thread = Daemon("xvcomm-mover", self._run)
            self._thread.start()
            self._arrived.notify()

    def _help(self, future: Future[None], timeout: float | None) -> bool:
        """Move a batch that the thread has not started, in a thread that waits for it; at the timeout requeue the rest."""
        with self._arrived:
            mine = next((entry for entry in self._incoming if entry[1] is future), None)
            if mine is None:
                return False
            self._incoming.remove(mine)
        batch, _, deadline = mine
        patience = Deadline.after(timeout)
        soonest = min(deadline, patience, key=Deadline.left)
        try:
            while batch.drive(budget=budget_of_more(soonest)) != READY:
                if deadline.expired():
                    raise RingStalled([batch.ends[i] for i in batch.open_rows()])
                if patience.expired():
                    self._hand_over(mine)
                    return True
        except (RingStopped, RingStalled) as error:
            batch.discard()
            future.set_exception(error)
        except BaseException:
            self._hand_over(mine)
            raise
        else:
            future.set_result(None)
        return True

    def _run(self) -> None:
        while True:
            with self._arrived:
                while not self._incoming and not self._jobs:
                    self._arrived.wait()
                seen = int(self._wake[0])
                self._admit()
            failure: RingStopped | None = None
            try:
                self._batch.drive(self._wake.ctypes.data, seen)
            except RingStopped as stopped:
                failure = stopped
            self._settle(failure)

    def _admit(self) -> None:
        """Take queued batches. A separate method, because local variables of a sleeping thread would keep arrays alive."""
        for batch, future, deadline in self._incoming:
            self._jobs.append(_Job(future, list(self._batch.take(batch)), deadline))
        self._incoming = []

    def _settle(self, failure: RingStopped | None) -> None:
        """Complete the jobs that are done, failed or late, and remove their rows."""
        ended: list[tuple[_Job, Exception | None]] = []
        for job in self._jobs:
            waiting = [i for i in job.rows if not self._batch.done(i)]
            ends = [self._batch.ends[i] for i in waiting]
            if not waiting:
                ended.append((job, None))
            elif failure is not None and failure.end in ends:
                ended.append((job, failure))
            elif job.deadline.expired():
                ended.append((job, RingStalled(ends)))
        if not ended:
            return
        gone = {id(job) for job, _ in ended}
        self._jobs = [job for job in self._jobs if id(job) not in gone]
        kept = [i for job in self._jobs for i in job.rows]
        place = {old: new for new, old in enumerate(sorted(kept))}
        self._batch.keep(sorted(kept))
        for job in self._jobs:
            job.rows = [place[i] for i in job.rows]
        for job, error in ended:
            if error is None:
                job.future.set_result(None)
            else:
                job.future.set_exception(error)
