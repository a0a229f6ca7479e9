"""Reports on jobs that are larger than a report asks for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from xvcomm.config import Config
from xvcomm.engine.session.explaining import Explaining
from xvcomm.engine.session.journal import Journal
from xvcomm.engine.session.recorders import Recorders
from xvcomm.trace import journal
from xvcomm.trace.callsite import find_call_site
from xvcomm.trace.journal import Roster
from xvcomm.trace.recorder import Recorder
from xvcomm.trace.snapshot import Group
from xvcomm.types.deadline import Deadline
from xvcomm.types.opcode import OpCode
from xvcomm.types.topology import RankInfo


class Job:
    """A job of two hosts, whose ranks on this one all wait in a barrier, but for one.

    Attributes:
        asked: the ranks of the other host that were asked; none answers.
    """

    def __init__(self, here: int, elsewhere: int, absent: int) -> None:
        self.asked: set[int] = set()
        infos = [
            RankInfo(r, "a" if r < here else "b", "node", 100 + r, "host", "host") for r in range(here + elsewhere)
        ]
        neighbours = tuple(range(here))
        roster = Roster("job-1", tuple(infos), neighbours, ("ns",) * here, 16)
        memory = memoryview(bytearray(journal.size(roster)))
        journal.write(memory, roster)
        own = Journal()
        own.open(cast(Any, SimpleNamespace(view=memory)), 0, None)
        regions, ranks = journal.regions(memory, roster), tuple(range(here))
        for rank in neighbours:
            recorder = own.recorder if rank == 0 else Recorder(regions[rank])
            recorder.note_group(Group(7, "0", ranks))
            if rank != absent:
                recorder.begin(7, 0, OpCode.BARRIER, 4, 1, -1, -1, find_call_site(0))
        joined = [SimpleNamespace(info=info, job="job-1", processes="ns") for info in infos]
        reach = SimpleNamespace(ask=self._ask, answers=lambda rank: False)
        recorders = Recorders(own, cast(Any, joined), 0, neighbours, cast(Any, reach), lambda rank: "")
        config = Config(explain=False)
        self.explaining = Explaining(
            recorders, config, "job-1", 0, len(infos), own.recorder.history, lambda record: True
        )

    def _ask(self, ranks: Sequence[int], question: object, deadline: Deadline) -> dict[int, Any]:
        self.asked.update(ranks)
        return {}


def test_all_ranks_of_this_host_are_told_of() -> None:
    job, begin = Job(here=200, elsewhere=0, absent=170), time.monotonic()
    found = job.explaining.explain(Deadline.after(60))
    assert found.verdict.ranks == (170,)
    assert found.verdict.text.startswith("Rank 170 never called barrier #0 that ranks 0-169 and 171-199 are in")
    assert time.monotonic() - begin < 60 and "... and 135 more" in found.text


def test_of_other_hosts_those_that_matter_most_are_asked() -> None:
    job = Job(here=70, elsewhere=100, absent=69)
    assert job.explaining.explain(Deadline.after(60), first=[169, 3]).verdict.ranks == (69,)
    assert job.asked == {169, *range(70, 133)}
