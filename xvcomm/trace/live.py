"""The jobs that run on this host, seen from any process of the same user, also while all their interpreters are blocked."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from xvcomm.system import processes, stacks
from xvcomm.system.requests import request
from xvcomm.trace import journal
from xvcomm.trace.format import Life
from xvcomm.trace.journal import Roster
from xvcomm.trace.snapshot import Snapshot, decode

SNAPSHOT, OWN = b"snapshot", b"own"
"""The requests to a rank for what the whole job does, and for what it does itself, with what carries its operations."""
_SECONDS, _OWN_SECONDS, _STACK_SECONDS = 10.0, 1.0, 1.0
"""How long ranks have to tell what the job does, and what they do themselves; how long processes have to write their stacks."""
_NAME = re.compile(r"/xvcomm-[^/]+-[0-9]+-[0-9a-f]{12}( \(deleted\))?$")
"""Of shared memory, see `memory.segment`."""


@dataclass(frozen=True)
class LiveJob:
    """A job with at least one process on this host.

    Attributes:
        pids: processes that have its memory open, as this process sees them.
        memory: path by which its memory can be opened.
    """

    roster: Roster
    pids: tuple[int, ...]
    memory: Path

    def snapshot(self) -> Snapshot:
        """What the job does: of this host by its memory, of others by one of its ranks, if any answers. Ranks of which nothing
        can be told are left out. Only this host's ranks tell what carries their operations, those of them that answer.
        """
        with _mapped(self.memory) as view:
            here = journal.read(view)
        assert here is not None
        living, begun = self._living(), time.time()
        asked = [rank for rank, pid in living.items() if stacks.request(pid)]
        own = list(self._ask(living.values(), OWN, _OWN_SECONDS))
        abroad = len(self.roster.here) < len(self.roster.infos)
        whole = next(self._ask(living.values(), SNAPSHOT, _SECONDS), None) if abroad else None
        texts = stacks.collect([living[rank] for rank in asked], _STACK_SECONDS, begun)
        states = dict(whole.ranks if whole is not None else {})
        known = here.ranks | {rank: state for told in own for rank, state in told.ranks.items()}
        for rank, namespace in zip(self.roster.here, self.roster.namespaces, strict=True):
            state = known[rank]
            ended = (
                rank not in living and state.life is not Life.CLOSED and namespace == os.readlink("/proc/self/ns/pid")
            )
            states[rank] = msgspec.structs.replace(
                state, ending="its process has ended" if ended else "",
                stopped=rank in living and processes.halted(living[rank]),
                stack=texts[living[rank]] if rank in asked else "",
            )  # fmt: skip
        return msgspec.structs.replace(here, ranks=dict(sorted(states.items())))

    def alone(self) -> list[Snapshot]:
        """What each rank of this host does that runs, by the clock of rank 0 as dumps are."""
        with _mapped(self.memory) as view:
            here, now = journal.read(view), time.time_ns()
            assert here is not None
            ahead = -journal.clock(journal.regions(view, self.roster).values())
        states = {rank: msgspec.structs.replace(here.ranks[rank], taken=now, ahead=ahead) for rank in self._living()}
        return [
            msgspec.structs.replace(here, taken=now - ahead, ranks={rank: state})
            for rank, state in states.items()
            if state.life is Life.RUNNING
        ]

    def _living(self) -> dict[int, int]:
        """The ranks of this host whose processes can be seen from here, with their numbers here."""
        seen = {_inner(pid): pid for pid in self.pids}
        infos = self.roster.infos
        return {
            rank: seen[place]
            for rank, namespace in zip(self.roster.here, self.roster.namespaces, strict=True)
            if (place := (namespace, infos[rank].pid)) in seen
        }

    def _ask(self, pids: Iterable[int], kind: bytes, seconds: float) -> Iterator[Snapshot]:
        """What processes answer, as it comes."""
        return map(decode, request(pids, kind, seconds, lambda answer: decode(answer).job == self.roster.job))


def jobs(groups: Collection[int] | None = None) -> list[LiveJob]:
    """Those of this user; as far as processes of some process groups only are in them, if these are given."""
    found: dict[str, tuple[Roster, list[int], Path]] = {}
    for pid in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        for memory in _memories(pid) if groups is None or _group(pid) in groups else ():
            with contextlib.suppress(OSError, ValueError), _mapped(memory) as view:
                roster = journal.roster(view)
                if roster is not None:
                    found.setdefault(roster.job, (roster, [], memory))[1].append(pid)
                    break
    return [LiveJob(roster, tuple(pids), memory) for roster, pids, memory in found.values()]


def _group(pid: int) -> int:
    """A process's group; 0 if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return 0


def _memories(pid: int) -> Iterator[Path]:
    """What a process has open that may be the memory of flight recorders."""
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it is gone, or another user's
        return
    for entry in entries:
        with contextlib.suppress(OSError):
            if _NAME.search(os.readlink(entry)) and stat.S_ISREG(entry.stat().st_mode):
                yield entry


def _inner(pid: int) -> tuple[str, int]:
    """A process's PID namespace, and its number there."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return os.readlink(f"/proc/{pid}/ns/pid"), int(line.split()[-1])
    return "", pid


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[memoryview]:
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
        memoryview(memory) as view,
    ):
        yield view
