"""Starts the ranks of torch's tests by fork, so that no rank imports torch again; they end with the runner.

Only for ranks without GPUs: CUDA does not support fork.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from datetime import timedelta
from typing import Any

from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorContinuousTestBase
from torch.testing._internal.distributed.distributed_test import BACKEND

PR_SET_PDEATHSIG = 1
SECONDS_TO_END = 10.0
GROUP_TIMEOUT = timedelta(seconds=40)
fork = multiprocessing.get_context("fork")


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends; exit immediately on SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def reap(processes: list[Any]) -> list[str]:
    """Wait for ranks that should be ending and kill those that do not. Returns the errors, one line per rank."""
    wrong = []
    for process in processes:
        process.join(SECONDS_TO_END)
        if process.is_alive():
            wrong.append(f"{process.name} did not end in {SECONDS_TO_END:g} s and was killed")
            process.kill()
            process.join()
        elif process.exitcode:
            wrong.append(f"{process.name} ended with code {process.exitcode}")
    return wrong


class RanksOfOneTest(MultiProcessTestCase):
    """Mixin before torch's class: forks the ranks of each test, and waits for all of them."""

    def _spawn_processes(self) -> None:
        self._start_processes(fork.Process)

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, parent_pipe: Any, **kwargs: Any) -> None:
        end_with_parent()
        # torch keeps tests of subgroups for eight ranks and more, except with MPI. They need three. Only its gate still
        # reads this: the name of the backend was read before.
        os.environ["BACKEND"] = "mpi"
        super()._run(rank, test_name, file_name, parent_pipe, **kwargs)

    def tearDown(self) -> None:
        processes = self.processes
        super().tearDown()
        reap(processes)
        if os.path.exists(self.file_name):
            os.remove(self.file_name)


class RanksOfOneClass(DTensorContinuousTestBase):
    """Fixture of this folder's own cases: one set of ranks and one process group for all tests of a class.

    It is torch's `MultiProcContinuousTest`, which its DTensor tests use, with two changes: after a failed test
    new ranks are started, so that other tests are not affected; and ranks that fail to end are an error.
    """

    world_size = int(os.environ["WORLD_SIZE"])
    timeout = GROUP_TIMEOUT

    @classmethod
    def backend_str(cls) -> str:
        return BACKEND

    @classmethod
    def _worker_loop(cls, *args: Any) -> None:
        end_with_parent()
        super()._worker_loop(*args)

    def setUp(self) -> None:
        cls = type(self)
        if cls.poison_pill:
            for process in cls.processes:
                process.kill()
            reap(cls.processes)
            cls.poison_pill = cls._processes_spawned = False
        super().setUp()

    @classmethod
    def tearDownClass(cls) -> None:
        if not cls._processes_spawned:
            return
        for queue in cls.task_queues:
            queue.put(None)
        if cls.poison_pill:
            for process in cls.processes:
                process.kill()
        wrong = reap(cls.processes)
        os.remove(cls.rdvz_file)
        cls._processes_spawned = False
        if wrong and not cls.poison_pill:
            raise AssertionError("; ".join(wrong))
