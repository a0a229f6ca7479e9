"""Data-parallel training that goes on when ranks are lost, and takes them in again when they come back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llama.data import Batches
from llama.stage import Framework, Stage, mean_loss
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import Aborted, DeadlineExceeded, PeerLost


@dataclass
class Progress:
    """What a rank has reached.

    Attributes:
        losses: of each step.
        ranks: the numbers of those that took part in it; the samples of the others are lost.
    """

    losses: list[float] = field(default_factory=list)
    ranks: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Number of the next step, counted from 1."""
        return len(self.losses) + 1


class Elastic:
    """Trains the whole model on every rank.

    Args:
        comm: of all ranks.
        part: the whole model.
        replicas: number of ranks with which the job was started; each has its share of the samples, by its number.
        micro_batches: of a step and rank.
    """

    def __init__(
        self, comm: Communicator, part: Framework, stage: Stage, batches: Batches, replicas: int, micro_batches: int
    ) -> None:
        self.comm, self.progress = comm, Progress()
        self._part, self._stage, self._batches = part, stage, batches
        self._replicas, self._micro_batches = replicas, micro_batches

    def run(self, steps: int) -> Progress:
        """Train up to a step; returns the same on every rank."""
        agreed = False
        while True:
            try:
                if not agreed:
                    self._catch_up()
                    agreed = True
                if self.progress.step > steps:
                    self.comm.barrier()
                    return self.progress
                self._step()
                if self._awaited():
                    self._grow()
                    agreed = False
            except PeerLost:
                self.comm, agreed = self.comm.shrink(), False

    def _step(self) -> None:
        """One step; if a rank is lost in it, the weights are as before, or those after it."""
        comm, step, stage = self.comm, self.progress.step, self._stage
        windows = self._batches.step(step)
        share = np.array_split(windows, self._replicas)[comm.job_ranks[comm.rank] % self._replicas]
        stage.begin(share.reshape(self._micro_batches, -1, windows.shape[-1]))
        found: list[Any] = []
        for micro_batch in range(self._micro_batches):
            found.append(stage.forward(None, micro_batch))
            stage.backward(None, micro_batch)
        stage.average_gradients(comm)
        loss = mean_loss(comm, found, comm.size * self._micro_batches)
        stage.update(step)
        self.progress.losses.append(loss)
        self.progress.ranks.append(comm.job_ranks)

    def _awaited(self) -> bool:
        """Whether processes wait to join; the first rank asks, so that all decide alike."""
        waiting: int = self.comm.broadcast_object(self.comm.join_requests() if self.comm.rank == 0 else 0, 0)
        return waiting > 0

    def _grow(self) -> None:
        """Take in the processes that wait; without them, if that fails."""
        try:
            self.comm = self.comm.grow()
        except (PeerLost, DeadlineExceeded, Aborted):
            self.comm = self.comm.shrink()

    def _catch_up(self) -> None:
        """All ranks continue from the one that is furthest: others may have lost a step, or have just begun."""
        comm, mine = self.comm, self.progress.step
        reached = comm.all_gather_object(mine)
        if min(reached) == max(reached):
            return
        first = reached.index(max(reached))
        state = (self.progress, self._part.state()) if comm.rank == first else None
        progress, weights = comm.broadcast_object(state, first)
        if mine < max(reached):
            self.progress = progress
            self._part.load(weights)
