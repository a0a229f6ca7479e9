"""The jobs that run on this host, seen from any process of the same user, also while all their interpreters are blocked."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from xvcomm.system import processes, stacks
from xvcomm.system.requests import request
from xvcomm.trace import journal
from xvcomm.trace.journal import Roster
from xvcomm.trace.snapshot import RankState, Snapshot, decode

SNAPSHOT = b"snapshot"
"""The request to a rank for what the whole job does."""
_SECONDS, _STACK_SECONDS = 5.0, 0.1
"""How long a rank has to answer a request; how long processes have to write their stacks."""


@dataclass(frozen=True)
class LiveJob:
    """A job with at least one process on this host.

    Attributes:
        pids: processes that have its memory open.
        memory: path by which its memory can be opened.
    """

    roster: Roster
    pids: tuple[int, ...]
    memory: Path

    def snapshot(self) -> Snapshot:
        """What the job does: of this host by its memory, of others by one of its ranks, if any answers."""
        with _mapped(self.memory) as view:
            here = journal.read(view)
        assert here is not None
        living = [rank for rank in self.roster.here if self.roster.infos[rank].pid in self.pids]
        asked = [rank for rank in living if stacks.request(self.roster.infos[rank].pid)]
        whole = self._whole(living) if len(self.roster.here) < len(self.roster.infos) else None
        time.sleep(_STACK_SECONDS)
        states = dict(whole.ranks if whole is not None else {})
        for rank, state in here.ranks.items():
            pid = self.roster.infos[rank].pid
            states[rank] = msgspec.structs.replace(
                state, ending="" if rank in living or state.life else "its process has ended",
                stopped=rank in living and processes.halted(pid), stack=stacks.written_by(pid) if rank in asked else "",
            )  # fmt: skip
        for rank in range(len(self.roster.infos)):
            states.setdefault(rank, RankState(answered=False))
        return msgspec.structs.replace(here, ranks=dict(sorted(states.items())))

    def _whole(self, ranks: Iterable[int]) -> Snapshot | None:
        for rank in ranks:
            data = request(self.roster.infos[rank].pid, SNAPSHOT, _SECONDS)
            if data:
                return decode(data)
        return None


def jobs() -> list[LiveJob]:
    """Those of this user."""
    found: dict[str, tuple[Roster, list[int], Path]] = {}
    for pid in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        for memory in _memories(pid):
            with contextlib.suppress(OSError, ValueError), _mapped(memory) as view:
                roster = journal.roster(view)
                if roster is not None:
                    found.setdefault(roster.job, (roster, [], memory))[1].append(pid)
                    break
    return [LiveJob(roster, tuple(pids), memory) for roster, pids, memory in found.values()]


def _memories(pid: int) -> Iterator[Path]:
    """What a process has open that may be the memory of flight recorders."""
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it is gone, or another user's
        return
    for entry in entries:
        with contextlib.suppress(OSError):
            if Path(os.readlink(entry)).name.startswith("xvcomm-"):
                yield entry


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[memoryview]:
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
        memoryview(memory) as view,
    ):
        yield view
